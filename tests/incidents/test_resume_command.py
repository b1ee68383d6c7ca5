"""The commands call what the buttons call, and the API does too."""

import io
import json
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from incidents.models import Permit
from incidents.standing_approvals.models import StandingApproval
from runs.actions import create_token

pytestmark = pytest.mark.django_db


def run(*words, password="", monkeypatch=None):
    out = io.StringIO()
    if monkeypatch is not None:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{password}\n"))
    call_command(*words, stdout=out)
    text = out.getvalue()
    return json.loads(text) if words[0] == "resume" else [json.loads(one) for one in text.splitlines()]


class TestCommands:
    def test_from_show_to_permit(self, world, team, monkeypatch):
        number = str(world.incident().pk)
        shown = run("resume", number, "--as", "tomas")
        assert shown["gate"] == "open"
        asked = run("resume", number, "request", "--as", "tomas", "--digest", shown["digest"])
        assert asked["request"]["state"] == "open"
        words = (
            "resume",
            number,
            "approve",
            "--as",
            "jonas",
            "--digest",
            shown["digest"],
            "--password-stdin",
        )
        with pytest.raises(CommandError, match="the password does not fit"):
            run(*words, password="wrong", monkeypatch=monkeypatch)
        done = run(*words, password="jonas-password", monkeypatch=monkeypatch)
        assert done["request"]["permit"] == str(Permit.objects.get().public_id)

    def test_a_refusal_is_its_words(self, world, team):
        with pytest.raises(CommandError, match="changed: What you saw has changed"):
            run("resume", str(world.incident().pk), "request", "--as", "tomas", "--digest", "0" * 64)
        with pytest.raises(CommandError, match="no incident"):
            run("resume", str(world.incident().pk), "--as", "charlie")

    def test_a_standing_approval_from_writing_to_revoking(self, project, team, monkeypatch):
        words = ["standing_approval", "create", "--as", "mira", "--kind", "loss_spike", "--per-day", "1"]
        (made,) = run(*words, "--furthest-steps", "500", "--why", "nights")
        assert made["state"] == "waits for a signature"
        sign = ["standing_approval", "sign", made["id"], "--digest", made["digest"], "--password-stdin"]
        with pytest.raises(CommandError, match="You wrote it"):
            run(*sign, "--as", "mira", password="mira-password", monkeypatch=monkeypatch)
        (signed,) = run(*sign, "--as", "jonas", password="jonas-password", monkeypatch=monkeypatch)
        assert signed["state"] == "in force"
        (ended,) = run("standing_approval", "revoke", made["id"], "--as", "tomas", "--why", "over")
        assert ended["state"] == "revoked"
        assert [one["id"] for one in run("standing_approval", "list")] == [made["id"]]

    def test_restored_voids_what_was_under_way(self, world, team, settings, tmp_path):
        settings.VAULT_URL = f"file://{tmp_path}/vault"
        shown = run("resume", str(world.incident().pk), "--as", "tomas")
        run("resume", str(world.incident().pk), "request", "--as", "tomas", "--digest", shown["digest"])
        (told,) = run("restored")
        assert (told["voided"], told["vault"]["unknown"]) == (1, 0)
        assert run("restored")[0]["voided"] == 0


class TestApi:
    def post(self, person, path, document):
        headers = {"authorization": f"Bearer {create_token(person=person)}"}
        return Client().post(f"/api/v1{path}", document, content_type="application/json", headers=headers)

    def test_reject_withdraw_and_false_alarm(self, world, team):
        here = f"/incidents/{world.incident().pk}"
        headers = {"authorization": f"Bearer {create_token(person=team.tomas)}"}
        digest = Client().get(f"/api/v1{here}", headers=headers).json()["approval"]["digest"]
        assert self.post(team.tomas, f"{here}/request", {"digest": digest}).status_code == 200
        assert self.post(team.vera, f"{here}/reject", {"why": "x"}).status_code == 403
        assert (
            self.post(team.jonas, f"{here}/reject", {"why": "look"}).json()["request"]["state"] == "rejected"
        )
        self.post(team.tomas, f"{here}/request", {"digest": digest})
        assert self.post(team.tomas, f"{here}/withdraw", {}).json()["request"]["state"] == "voided"
        wrong = self.post(team.jonas, f"{here}/false-alarm", {"why": "the mixture", "password": "x"})
        assert (wrong.status_code, wrong.json()["type"].rsplit("/", 1)[-1]) == (403, "password")
        right = {"why": "the mixture", "password": "jonas-password"}
        assert self.post(team.jonas, f"{here}/false-alarm", right).json()["state"] == "approved"

    def test_breaking_the_glass_needs_the_role(self, world, team):
        here = f"/incidents/{world.incident().pk}"
        given = {"why": "x", "run_name": world.run.slug, "digest": "0" * 64, "password": "jonas-password"}
        answer = self.post(team.jonas, f"{here}/break-glass", given)
        assert answer.status_code == 403
        assert "may break the glass: admin" in answer.json()["detail"]

    def test_standing_approvals(self, project, team):
        new = {
            "kinds": ["loss_spike"],
            "per_day": 1,
            "why": "nights",
            "expires_at": (timezone.now() + timedelta(days=3)).isoformat(),
        }
        made = self.post(team.mira, "/standing-approvals", new).json()
        assert self.post(team.charlie, "/standing-approvals", new).status_code == 404
        given = {"digest": made["digest"], "password": "jonas-password"}
        signed = self.post(team.jonas, f"/standing-approvals/{made['id']}/sign", given).json()
        assert signed["document"]["signature"]
        assert self.post(team.charlie, f"/standing-approvals/{made['id']}/sign", given).status_code == 404
        ended = self.post(team.tomas, f"/standing-approvals/{made['id']}/revoke", {"why": "over"}).json()
        assert ended["state"] == "revoked"
        assert StandingApproval.objects.get().revoked_by == team.tomas
