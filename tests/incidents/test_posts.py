"""From a signed post to a held run and back, through the real receiver."""

import json
import time
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test import Client

from andon.signing import new_secret, sign_webhook
from incidents import approval, opening, review
from incidents.models import Incident, LedgerRow
from runs import identity
from runs.directives import current_document
from runs.models import Finding, RunSecret
from runs.progress import board
from tests.incidents.world import World, seal

pytestmark = pytest.mark.django_db(transaction=True)


class Trainer:
    """Posts events of one run, signed."""

    def __init__(self, world: World) -> None:
        identity.forget()
        self.world = world
        self.secret = RunSecret.objects.create(run=world.run, secret=new_secret()).secret

    def post(self, *events: dict) -> dict:
        body, name, stamp = json.dumps(list(events)).encode(), f"w-{uuid.uuid4()}", int(time.time())
        answer = Client().post(
            f"/api/v1/runs/{self.world.run.slug}/events",
            body,
            content_type="application/json",
            headers={
                "webhook-id": name,
                "webhook-timestamp": str(stamp),
                "webhook-signature": sign_webhook(self.secret, name, stamp, body),
            },
        )
        assert answer.status_code == 202, answer.content
        return answer.json()


def step(number: int, loss: object = 2.5, **more: object) -> dict:
    return {"type": "step", "step": number, "data": {"loss": loss, "loader_position": number * 32}, **more}


@pytest.fixture
def trainer(project):
    world = World(project)
    trainer = Trainer(world)
    for at in (30, 40):
        world.checkpoint(at)
    trainer.post(*[step(n) for n in range(41, 44)])
    yield trainer
    board.flush()  # progress is written behind the answer, at most once a second


def resume(trainer, team) -> str:
    incident = trainer.world.incident()
    seal(incident.dossier)
    digest = approval.subject(incident)[1]
    approval.request_resume(incident=incident, person=team.mira, digest=digest)
    approval.approve(incident=incident, person=team.jonas, digest=digest)
    held = {"seq": 2, "step": 44, "state": "held", "ranks": "0-3"}
    trainer.post({"type": "directive.ack", "attempt": 1, "step": 44, "data": held})
    document = approval.exchange(run=incident.run, incident_id=incident.pk, attempt=2, webhook_id="sup")
    return document["permit"]


class TestLoop:
    def test_the_reply_to_the_nan_itself_says_hold(self, trainer):
        answer = trainer.post(step(44, "NaN", rank=3))
        assert answer["directive"]["kind"] == "hold"
        incident = trainer.world.incident()
        assert answer["directive"]["incident"] == str(incident.pk)
        assert (incident.first_bad["step"], incident.first_bad["ranks"]) == (44, [3])

    def test_it_goes_on_by_the_permit_from_the_last_good_checkpoint(self, trainer, team):
        trainer.post(step(44, "NaN", rank=3))
        permit = resume(trainer, team)
        launch = {"type": "attempt.launched", "attempt": 2, "data": {"world_size": 4, "permit": permit}}
        answer = trainer.post(launch)
        assert (answer["directive"]["kind"], answer["directive"]["attempt"]) == ("continue", 2)
        assert trainer.world.incident().state == Incident.State.WATCHING
        rollback = LedgerRow.objects.get(action="rollback")
        assert rollback.checkpoint["step"] == 40
        assert rollback.before["loader_position"] == 44 * 32
        assert rollback.after["loader_position"] == 40 * 32

    def test_a_straggling_nan_of_the_held_attempt_leaves_the_approval_standing(self, trainer, team):
        trainer.post(step(44, "NaN", rank=3))
        incident = trainer.world.incident()
        seal(incident.dossier)
        digest = approval.subject(incident)[1]
        approval.request_resume(incident=incident, person=team.mira, digest=digest)
        approval.approve(incident=incident, person=team.jonas, digest=digest)
        answer = trainer.post(step(45, "NaN", rank=2))
        assert answer["directive"]["kind"] == "rollback"
        assert Incident.objects.count() == 1
        review.again(incident.pk)
        assert trainer.world.incident().state == Incident.State.APPROVED

    def test_a_launch_without_permit_is_answered_with_hold(self, trainer):
        trainer.post(step(44, "NaN", rank=3))
        answer = trainer.post({"type": "attempt.launched", "attempt": 2, "data": {"world_size": 4}})
        assert (answer["directive"]["kind"], answer["directive"]["attempt"]) == ("hold", 2)

    def test_a_nan_of_the_attempt_before_holds_nothing(self, trainer):
        trainer.post({"type": "attempt.launched", "attempt": 2, "data": {"world_size": 4}})
        answer = trainer.post(step(44, "NaN", attempt=1, rank=3))
        assert answer["directive"]["kind"] == "continue"
        assert not Incident.objects.exists()

    def test_an_hour_old_nan_from_a_spool_holds_nothing_and_is_shown(self, trainer):
        hour_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
        answer = trainer.post(step(44, "NaN", rank=3, time=hour_ago))
        assert answer["directive"]["kind"] == "continue"
        assert Finding.objects.filter(backfill=True).exists()

    def test_with_incidents_broken_data_and_hold_survive_and_the_sweep_opens_one(self, trainer):
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE incidents_incident ADD CONSTRAINT broken CHECK (id < 0) NOT VALID")
        try:
            for n in (44, 45):
                answer = trainer.post(step(n, "NaN", rank=3))
                assert (answer["directive"]["kind"], answer["directive"]["incident"]) == ("hold", None)
        finally:
            with connection.cursor() as cursor:
                cursor.execute("ALTER TABLE incidents_incident DROP CONSTRAINT broken")
        opening.sweep_findings()
        opening.sweep_findings()
        incident = trainer.world.incident()
        assert Incident.objects.count() == 1
        assert current_document(incident.run_id)["incident"] == str(incident.pk)
        assert incident.first_bad["step"] == 44
