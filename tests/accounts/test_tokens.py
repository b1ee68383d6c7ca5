"""Tokens and webhook secrets: shown once, kept as digests, rotated with an overlap, last used."""

import re
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from runs.actions import create_run
from runs.models import AccountEvent, HookToken, RunSecret, Token
from tests.accounts.conftest import signed_in, text_of
from tests.runs.conftest import Trainer

pytestmark = pytest.mark.django_db
K = AccountEvent.Kind


def shown(answer):
    found = re.search(r'<code class="cmd">([^<]+)</code>', answer.content.decode())
    assert found, text_of(answer)
    return found[1]


class TestPersonal:
    def test_it_is_shown_once_works_and_is_revoked(self, alice):
        client = signed_in("alice")
        made = client.post("/account/tokens", {"name": "dashboard", "scope": ["read"], "days": "30"})
        token = shown(made)
        assert token not in client.get("/account/tokens").content.decode()
        row = Token.objects.get()
        assert token not in str(vars(row))
        assert timedelta(days=29) < row.expires_at - timezone.now() <= timedelta(days=30)
        api = Client(headers={"authorization": f"Bearer {token}"})
        assert api.get("/api/v1/runs").status_code == 200
        page = text_of(client.get("/account/tokens"))
        assert re.search(r"dashboard read .* ago", page)  # it was used
        assert client.post("/account/tokens", {"do": "revoke", "token": row.pk}).status_code == 302
        assert api.get("/api/v1/runs").status_code == 401
        assert "You have no token" in text_of(client.get("/account/tokens"))
        kinds = AccountEvent.objects.filter(kind__in=[K.TOKEN_MADE, K.TOKEN_REVOKED]).order_by("id")
        assert [row.data["name"] for row in kinds] == ["dashboard", "dashboard"]

    @pytest.mark.parametrize(
        "given",
        [
            {"name": "", "scope": ["read"], "days": "30"},
            {"name": "x", "scope": [], "days": "30"},
            {"name": "x", "scope": ["root"], "days": "30"},
            *({"name": "x", "scope": ["read"], "days": days} for days in ("0", "367", "-1", "", "1e9", "٣")),
        ],
    )
    def test_what_is_not_complete_is_refused(self, alice, given):
        assert signed_in("alice").post("/account/tokens", given).status_code == 409
        assert not Token.objects.exists()

    def test_nobody_revokes_anothers(self, alice, bob):
        signed_in("bob").post("/account/tokens", {"name": "x", "scope": ["read"], "days": "1"})
        row = Token.objects.get()
        assert (
            signed_in("alice").post("/account/tokens", {"do": "revoke", "token": row.pk}).status_code == 409
        )
        assert Token.objects.get().revoked_at is None

    def test_wrong_tokens_are_braked_and_keep_no_right_one_out(self, alice):
        from runs.actions import create_token

        right = create_token(person=alice)
        wrong = Client(headers={"authorization": "Bearer nonsense"}, REMOTE_ADDR="192.0.2.77")
        answers = [wrong.get("/api/v1/runs").status_code for _ in range(70)]
        assert answers[:40] == [401] * 40
        assert answers[-1] == 429
        api = Client(headers={"authorization": f"Bearer {right}"}, REMOTE_ADDR="192.0.2.77")
        assert api.get("/api/v1/runs").status_code == 200


class TestHooks:
    def test_an_admin_makes_one_a_tool_posts_with_it_and_it_is_revoked(self, alice):
        client = signed_in("alice")
        form = {"name": "alertmanager of hall 3", "source": "alertmanager", "days": "365"}
        token = shown(client.post("/projects/default/hooks", form))
        assert token not in client.get("/projects/default/hooks").content.decode()
        hook = Client(headers={"authorization": f"Bearer {token}"})
        body = {"version": "4", "status": "firing", "alerts": []}
        assert (
            hook.post("/api/v1/hooks/alertmanager", body, content_type="application/json").status_code == 202
        )
        row = HookToken.objects.get()
        assert row.created_by == alice
        assert "s ago" in text_of(client.get("/projects/default/hooks"))
        client.post("/projects/default/hooks", {"do": "revoke", "token": row.pk})
        assert (
            hook.post("/api/v1/hooks/alertmanager", body, content_type="application/json").status_code == 401
        )

    def test_only_an_admin_sees_or_makes_one(self, bob):
        client = signed_in("bob")
        assert client.get("/projects/default/hooks").status_code == 403
        form = {"name": "x", "source": "alertmanager", "days": "1"}
        assert client.post("/projects/default/hooks", form).status_code == 403
        assert not HookToken.objects.exists()


class TestWebhookSecrets:
    def test_the_old_one_signs_beside_the_new_until_the_overlap_ends(self, alice):
        made = create_run(name="pt-13b")
        client = signed_in("alice")
        page = client.post("/runs/pt-13b/secrets", {"do": "rotate", "hours": "24"})
        new = shown(page)
        old_trainer, new_trainer = (Trainer(made.run, secret) for secret in (made.secret, new))
        assert old_trainer.step(1, loss=2.0).status_code == 202
        assert new_trainer.step(2, loss=2.0).status_code == 202
        old = RunSecret.objects.get(secret=made.secret)
        assert timedelta(hours=23) < old.expires_at - timezone.now() <= timedelta(hours=24)
        listed = text_of(client.get("/projects/default/secrets"))
        assert "pt-13b" in listed
        assert new not in client.get("/runs/pt-13b/secrets").content.decode()
        client.post("/runs/pt-13b/secrets", {"do": "withdraw", "secret": old.pk})
        old.refresh_from_db()
        assert old.expires_at <= timezone.now()
        rows = AccountEvent.objects.filter(kind__in=[K.SECRET_ROTATED, K.SECRET_ENDED]).order_by("id")
        assert [(row.data["run"], row.by) for row in rows] == [("pt-13b", alice.opaque_id)] * 2
        assert "whsec_" not in str([row.data for row in rows])

    def test_the_newest_is_not_withdrawn_and_an_overlap_is_chosen(self, alice):
        run = create_run(name="pt-13b").run
        client = signed_in("alice")
        newest = run.secrets.get()
        withdrawn = client.post("/runs/pt-13b/secrets", {"do": "withdraw", "secret": newest.pk})
        assert withdrawn.status_code == 409
        assert client.post("/runs/pt-13b/secrets", {"do": "rotate", "hours": "9999"}).status_code == 409
        assert run.secrets.count() == 1

    def test_only_an_admin_does_and_strangers_see_nothing(self, bob, charlie):
        create_run(name="pt-13b")
        assert signed_in("bob").post("/runs/pt-13b/secrets", {"hours": "1"}).status_code == 403
        assert signed_in("charlie").get("/runs/pt-13b/secrets").status_code == 404
        assert RunSecret.objects.count() == 1
