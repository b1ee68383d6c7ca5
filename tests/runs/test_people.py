"""Access, tokens, the read API and the commands scripts rely on."""

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from runs.access import project_member, visible_runs
from runs.models import Directive, Membership, Person, Project, Run, RunSecret, Token
from tests.runs.conftest import Trainer, new_trainer

pytestmark = pytest.mark.django_db


def run_command(*arguments: str) -> str:
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue().strip()


class TestCreateRun:
    def test_it_prints_run_and_secret_and_the_same_again(self, project: Project) -> None:
        first = json.loads(run_command("create_run", "pt-13b"))
        assert first["run"] == "pt-13b"
        assert first["secret"].startswith("whsec_")
        assert json.loads(run_command("create_run", "pt-13b")) == first
        assert Directive.objects.get(run__slug="pt-13b").kind == "continue"

    def test_rotate_adds_a_secret_and_lets_the_older_expire(self, project: Project) -> None:
        first = json.loads(run_command("create_run", "pt-13b"))
        second = json.loads(run_command("create_run", "pt-13b", "--rotate"))
        assert second["secret"] != first["secret"]
        assert json.loads(run_command("create_run", "pt-13b")) == second
        old = RunSecret.objects.get(secret=first["secret"])
        assert old.expires_at is not None

    @pytest.mark.parametrize("name", ["", "a/b", "-a", "a" * 101, "ä"])
    def test_a_name_that_is_no_slug_is_refused(self, project: Project, name: str) -> None:
        with pytest.raises(CommandError, match="expected letters"):
            run_command("create_run", "--", name)
        assert not Run.objects.exists()


class TestCreateToken:
    def test_create_makes_a_member_of_default_with_the_role(self, project: Project) -> None:
        token = run_command("create_token", "dana", "--create", "--role", "admin")
        person = Person.objects.get(username="dana")
        assert Membership.objects.get(person=person, project=project).roles == ["admin"]
        assert not person.has_usable_password()
        assert not Token.objects.filter(sha256=token).exists()  # only the digest is kept
        answer = Client(headers={"host": "localhost", "authorization": f"Bearer {token}"}).get("/api/v1/runs")
        assert answer.json() == {"items": [], "next": None}

    def test_an_unknown_person_is_an_error_without_create(self, project: Project) -> None:
        with pytest.raises(CommandError, match="--create"):
            run_command("create_token", "nobody")


def api(person: Person, path: str) -> Any:
    from runs.actions import create_token

    token = create_token(person=person)
    return Client(headers={"host": "localhost", "authorization": f"Bearer {token}"}).get(f"/api/v1{path}")


class TestReading:
    def test_without_a_token_it_is_401(self, project: Project) -> None:
        assert Client(headers={"host": "localhost"}).get("/api/v1/runs").status_code == 401

    def test_members_see_runs_and_others_see_404(self, trainer: Trainer, people: Any) -> None:
        trainer.step(3, loss=2.5)
        document = api(people.bob, f"/runs/{trainer.run.slug}").json()
        assert (document["run"], document["step"], document["attempt"]) == (trainer.run.slug, 3, 1)
        assert document["directive"]["kind"] == "continue"
        assert document["attempts"][0]["launch_reported"] is False
        hidden = api(people.charlie, f"/runs/{trainer.run.slug}")
        assert hidden.status_code == 404
        assert hidden.json()["field"] == "run"
        assert api(people.charlie, "/runs").json()["items"] == []

    def test_lists_go_on_by_cursor(self, people: Any) -> None:
        slugs = [new_trainer().run.slug for _ in range(5)]
        seen, cursor = [], ""
        while True:
            page = api(people.alice, f"/runs?limit=2&cursor={cursor}").json()
            seen += [item["run"] for item in page["items"]]
            cursor = page["next"]
            if cursor is None:
                break
        assert seen == slugs[::-1]
        assert api(people.alice, "/runs?cursor=x").status_code == 422

    def test_an_expired_or_altered_token_is_401(self, people: Any) -> None:
        from datetime import timedelta

        from runs.actions import create_token

        token = create_token(person=people.alice, expires_in=timedelta(seconds=-1))
        for value in (token, token + "x", "é"):
            client = Client(headers={"host": "localhost", "authorization": f"Bearer {value}"})
            assert client.get("/api/v1/runs").status_code == 401

    def test_membership_decides_by_role(self, project: Project, people: Any) -> None:
        assert project_member(people.alice, project)
        assert project_member(people.bob, project, "responder", "admin")
        assert not project_member(people.bob, project, "admin")
        assert not project_member(people.charlie, project)
        assert not visible_runs(people.charlie).exists()
        people.bob.is_active = False
        assert not project_member(people.bob, project)


class TestOpenApi:
    def test_it_documents_what_trainers_call(self, project: Project) -> None:
        document = Client(headers={"host": "localhost"}).get("/api/v1/openapi.json").json()
        post = document["paths"]["/api/v1/runs/{run}/events"]["post"]
        assert "application/x-ndjson" in post["requestBody"]["content"]
        assert {"webhook-id", "webhook-timestamp", "webhook-signature"} <= {
            p["name"] for p in post["parameters"]
        }
        assert {"202", "400", "401", "404", "409", "413", "415", "422", "429"} <= set(post["responses"])
        assert "application/vnd.apache.arrow.stream" in str(document["paths"]["/api/v1/runs/{run}/frames"])
