"""What is frozen: last good, first bad, the ladder; and what follows when more is learnt."""

from pathlib import Path

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from andon.policy import EvidenceRule, Policy
from evidence.custody import verify_custody
from evidence.freezing.checkpoints import passed_over, passed_over_words
from evidence.gates import may_delete, resume_gate
from evidence.models import Dossier, Hold, Item
from evidence.plan import freeze, reconsider
from evidence.queries import last_good
from runs.directives import set_directive
from runs.locks import lock_run
from runs.models import Attempt, Checkpoint, DirectiveAck, Run, Work
from runs.signals import checkpoint_changed
from runs.work import run_due
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)


def steps(run: Run, *numbers: int, attempt: int = 1, state: str = "verified") -> None:
    for number in numbers:
        world.commit(run, number, f"s3://ckpt/a{attempt}/step-{number}", [], attempt=attempt, state=state)


def good_step(dossier: Dossier) -> int | None:
    good = last_good(dossier)
    return good.step if good else None


@pytest.mark.parametrize(
    ("b", "margin", "expected"),
    [
        (1000, 100, 900),
        (1000, 0, 950),
        (1000, 1, 950),
        (1001, 0, 1000),
        (1001, 1, 1000),
        (1000, 50, 950),
        (900, 100, 700),
        (None, 0, 1000),
    ],
)
def test_last_good_is_the_newest_verified_at_or_before_b_minus_the_margin(
    b: int | None, margin: int, expected: int
) -> None:
    run = world.make_run()
    steps(run, 700, 900, 950, 1000)
    assert good_step(world.open_dossier(run, b=b, margin=margin)) == expected


def test_a_nearer_checkpoint_inside_the_margin_is_said_to_be_passed_over() -> None:
    run = world.make_run()
    steps(run, 700, 900, 950, 990, 1000)
    dossier = world.open_dossier(run, b=1000, margin=100)
    assert passed_over(dossier) == [950, 990]
    assert "within 100\u00a0steps of the first bad step 1,000" in passed_over_words(dossier)
    assert passed_over_words(world.open_dossier(run, b=1000, margin=0)) == ""


@pytest.mark.parametrize("state", ["committed", "bad", "deleted"])
def test_only_a_verified_checkpoint_is_good(state: str) -> None:
    run = world.make_run()
    steps(run, 800)
    steps(run, 900, state=state)
    Checkpoint.objects.filter(state="committed").update(verification={"cannot": "nobody read it"})
    assert good_step(world.open_dossier(run)) == 800


def test_steps_of_a_trajectory_that_was_given_up_are_not_good() -> None:
    run = world.make_run()
    steps(run, 700, 900, attempt=1)
    Attempt.objects.create(run=run, number=2, launched_at=timezone.now(), began_from={"step": 700})
    steps(run, 800, attempt=2)
    with transaction.atomic():
        lock_run(run.pk)
        dossier = freeze(
            run=run,
            label="x",
            url="",
            why="",
            opened_by="",
            attempt=2,
            first_bad_step=1000,
            margin_steps=0,
            policy=Policy(),
        )
    assert good_step(dossier) == 800
    names = set(dossier.items.filter(kind="checkpoint_ladder").values_list("name", flat=True))
    assert names == {"ladder checkpoint, step 700 of attempt 1"}


def test_the_ladder_is_the_two_before_and_the_newest_older_than_ten_margins() -> None:
    run = world.make_run()
    steps(run, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000)
    dossier = world.open_dossier(run, b=1001, margin=50)
    rungs = dossier.items.filter(kind="checkpoint_ladder")
    assert good_step(dossier) == 900
    assert sorted(item.source["step"] for item in rungs) == [300, 700, 800]
    held = set(Hold.objects.values_list("uri", flat=True))
    assert held == {f"s3://ckpt/a1/step-{step}" for step in (300, 700, 800, 900)}


def test_first_bad_is_the_earliest_at_or_after_b() -> None:
    run = world.make_run()
    steps(run, 900)
    steps(run, 1050, 1100, state="committed")
    item = world.open_dossier(run).items.get(kind="first_bad_checkpoint")
    assert item.source["step"] == 1050
    assert not may_delete(run=run, uris=["s3://ckpt/a1/step-1050"])[0]["allow"]


def test_without_a_known_step_no_first_bad_applies() -> None:
    run = world.make_run()
    item = world.open_dossier(run, b=None).items.get(kind="first_bad_checkpoint")
    assert (item.state, item.why) == ("not_applicable", "no step is known to be bad")


def test_a_first_bad_checkpoint_committed_after_the_opening_is_taken(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    dossier = world.open_dossier(run, rules=world.policy("first_bad_checkpoint"))
    run_due()
    assert dossier.items.get().state == "planned"
    with transaction.atomic():
        checkpoint = world.on_disk(run, sources, 1050, state="committed", finite=False)
        checkpoint_changed.send(sender=Run, run=run, checkpoint=checkpoint)
    world.work(dossier)
    item = dossier.items.get()
    assert (item.name, item.state) == ("first bad checkpoint, step 1050", "sealed")


def test_when_all_ranks_hold_there_will_be_no_first_bad_checkpoint(vault_dir: Path) -> None:
    run = world.make_run()
    dossier = world.open_dossier(run, rules=world.policy("first_bad_checkpoint"))
    with transaction.atomic():
        directive = set_directive(run=run, kind="hold", incident="7")
    for rank in range(4):
        world.age(dossier, 0)
        run_due()
        assert dossier.items.get().state == "planned", f"{rank} of 4 ranks hold"
        DirectiveAck.objects.create(
            run=run,
            attempt=1,
            seq=directive.seq,
            state="held",
            step=1001,
            ranks=[rank],
            occurred_at=timezone.now(),
            received_at=timezone.now(),
        )
    world.work(dossier)
    item = dossier.items.get()
    assert item.state == "not_applicable"
    assert item.why == (
        "contained before a checkpoint of step 1000 or later was committed: all 4 ranks hold after step 1001"
        " (custody row 2)"
    )
    assert resume_gate(dossier).open


def test_a_checkpoint_still_being_verified_is_held_and_then_chosen(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 800)
    newer = world.on_disk(run, sources, 900, state="committed")
    with transaction.atomic():
        checkpoint_changed.send(sender=Run, run=run, checkpoint=newer)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    assert "being verified: step 900; step 800 is verified" in dossier.items.get().why
    assert not may_delete(run=run, uris=[newer.uri])[0]["allow"]
    world.work(dossier)
    newer.refresh_from_db()
    assert newer.state == "verified"
    assert newer.verification["digests_by"] == "andon, who read every byte"
    assert good_step(dossier) == 900
    assert dossier.items.get().state == "sealed"


def test_a_checkpoint_that_fails_verification_gives_way_to_the_older(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 800)
    newer = world.on_disk(run, sources, 900, state="committed")
    (sources / "step-00000900" / "shard-00000.bin").write_bytes(b"damaged")
    with transaction.atomic():
        checkpoint_changed.send(sender=Run, run=run, checkpoint=newer)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    world.work(dossier)
    newer.refresh_from_db()
    assert newer.state == "bad"
    assert "committed with" in newer.verification["failed"]
    assert good_step(dossier) == 800


@pytest.mark.parametrize("kind", ["hold", "rollback"])
def test_one_that_was_reported_late_becomes_last_good_until_somebody_approved(
    sources: Path, vault_dir: Path, kind: str
) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 800)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    world.work(dossier)
    assert dossier.items.get().state == "sealed"
    with transaction.atomic():
        set_directive(run=run, kind=kind, incident="7")
        newer = world.on_disk(run, sources, 900, state="committed")
        checkpoint_changed.send(sender=Run, run=run, checkpoint=newer)
    world.work(dossier)
    assert good_step(dossier) == (900 if kind == "hold" else 800)
    states = set(dossier.items.values_list("name", "state"))
    if kind == "hold":
        assert states == {
            ("no longer last good: last good checkpoint, step 800", "sealed"),
            ("last good checkpoint, step 900", "sealed"),
        }


def test_one_that_nobody_verifies_in_time_gives_way_to_the_older(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 800)
    world.on_disk(run, sources, 900, state="committed")
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    run_due()
    assert good_step(dossier) is None
    world.age(dossier, 301)
    world.work(dossier)
    assert good_step(dossier) == 800
    assert dossier.items.get().state == "sealed"


def test_moving_first_bad_earlier_chooses_again_and_keeps_what_was_held(
    sources: Path, vault_dir: Path
) -> None:
    run = world.make_run()
    for step in (700, 800, 900):
        world.on_disk(run, sources, step)
    world.post(run, "step", 850, data={"loss": 2.0})
    world.post(run, "step", 1000, data={"loss": 2.0})
    rules = world.policy("last_good_checkpoint", "event_log")
    dossier = world.open_dossier(run, rules=rules)
    world.work(dossier)
    assert good_step(dossier) == 900
    with transaction.atomic():
        lock_run(run.pk)
        reconsider(dossier, first_bad_step=850)
    assert good_step(dossier) == 800
    assert not resume_gate(dossier).open
    world.work(dossier)
    assert resume_gate(dossier).open
    old = dossier.items.get(kind="checkpoint_ladder", name__startswith="no longer last good")
    assert (old.state, old.required) == ("sealed", False)
    logs = dossier.items.filter(kind="event_log")
    assert [item.state for item in logs] == ["sealed", "sealed"]
    assert verify_custody(dossier) == []
    with transaction.atomic():
        lock_run(run.pk)
        reconsider(dossier, first_bad_step=990)
    dossier.refresh_from_db()
    assert dossier.first_bad_step == 850, "it only moves earlier"


def test_the_opening_transaction_writes_rows_only_and_few(sources: Path) -> None:
    run = world.make_run()
    for step in range(10, 1000, 10):
        world.commit(run, step, f"s3://ckpt/step-{step}", [])
    for rank in range(64):
        world.post(
            run, "artifact.available", rank=rank, data={"kind": "rank_log", "uri": f"file:///logs/{rank}"}
        )
    with CaptureQueriesContext(connection) as queries:
        dossier = world.open_dossier(run, margin=100)
    assert len(queries) <= 20, "\n".join(query["sql"][:120] for query in queries)
    assert (
        Hold.objects.filter(dossier=dossier).count() == 64 + 3
    )  # last good and two rungs; none is older than ten margins
    assert Work.objects.filter(kind__startswith="evidence").count() == 1
    assert not may_delete(run=run, uris=["file:///logs/7"])[0]["allow"]


def test_very_many_offered_files_are_held_by_their_directories() -> None:
    run = world.make_run()
    for rank in range(300):
        uri = f"file:///logs/node-{rank // 100}/rank-{rank}.log"
        world.post(run, "artifact.available", rank=rank, data={"kind": "rank_log", "uri": uri})
    dossier = world.open_dossier(run, rules=world.policy("rank_logs"))
    held = sorted(Hold.objects.filter(dossier=dossier).values_list("uri", flat=True))
    assert held == ["file:///logs/node-0", "file:///logs/node-1", "file:///logs/node-2"]
    assert not may_delete(run=run, uris=["/logs/node-2/rank-250.log"])[0]["allow"]


def test_a_plan_rolls_back_with_the_transaction_that_opened_it() -> None:
    run = world.make_run()
    steps(run, 900)
    with transaction.atomic():
        world.open_dossier(run)
        transaction.set_rollback(True)
    assert not Dossier.objects.exists()
    assert not Hold.objects.exists()
    assert not Item.objects.exists()
    assert may_delete(run=run, uris=["s3://ckpt/a1/step-900"])[0]["allow"]


def test_compliance_is_not_locked_in_without_two_people() -> None:
    run = world.make_run()
    rules = Policy(evidence=(EvidenceRule("topology", lock="compliance"),))
    dossier = world.open_dossier(run, rules=rules)
    assert dossier.items.get().lock == "legal_hold"
    assert dossier.plan["compliance_asked"] == ["topology"]
