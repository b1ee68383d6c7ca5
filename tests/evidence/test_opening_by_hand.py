"""A dossier without an incident: whose evidence, from which step, by whom and why."""

from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from evidence.actions import open_dossier
from evidence.gates import may_delete
from evidence.models import Dossier
from evidence.queries import last_good
from evidence.refused import Refused
from runs.models import Attempt, Person
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"why": " "}, "reason-needed"),
        ({"attempt": 3}, "unknown-attempt"),
        ({"attempt": -1}, "unknown-attempt"),
        ({"first_bad_step": -1}, "no-such-step"),
        ({"first_bad_step": 2**63}, "no-such-step"),
        ({"margin_steps": -1}, "no-such-step"),
        ({"margin_steps": 2**40}, "no-such-step"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_frozen(
    bob: Person, given: dict[str, Any], code: str
) -> None:
    with pytest.raises(Refused) as refused:
        open_dossier(run=world.make_run(), person=bob, **({"why": "keep it"} | given))
    assert refused.value.code == code
    assert not Dossier.objects.exists()


def test_whose_evidence_and_from_which_step_is_the_persons_choice(vault_dir: Path, bob: Person) -> None:
    run = world.make_run()
    Attempt.objects.create(run=run, number=2, launched_at=timezone.now(), began_from={"step": 700})
    for step, attempt in ((700, 1), (900, 1), (950, 1), (800, 2), (1000, 2)):
        world.commit(run, step, f"s3://ckpt/a{attempt}/step-{step}", [], attempt=attempt)

    def opened(**given: Any) -> Dossier:
        return open_dossier(run=run, person=bob, why="the loss of web3 looks odd", **given)

    def step_of(dossier: Dossier) -> int | None:
        good = last_good(dossier)
        return good.step if good else None

    first = opened(attempt=1, first_bad_step=1000, margin_steps=100)
    assert (first.attempt, first.first_bad_step, first.margin_steps, step_of(first)) == (1, 1000, 100, 900)
    assert (first.label, first.url) == ("frozen by hand: the loss of web3 looks odd", "")
    newest = opened(label="  web3  ")
    assert (newest.attempt, newest.first_bad_step, step_of(newest)) == (2, None, 1000)
    assert newest.label == "web3"
    row = first.custody.get(what="opened")
    assert (row.who, row.data["why"], row.data["margin_steps"]) == (
        str(bob.opaque_id),
        "the loss of web3 looks odd",
        100,
    )
    denied = may_delete(run=run, uris=["s3://ckpt/a1/step-900"])[0]
    assert not denied["allow"]
    assert "frozen by hand" in denied["reason"]
