"""Release and deletion: two people, after every date; nothing shortens."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import Error, IntegrityError, transaction
from django.utils import timezone

from andon import bag_format as form
from andon.bag_verify import verify
from andon.policy import EvidenceRule, Policy
from evidence.custody import verify_custody
from evidence.gates import may_delete
from evidence.models import Dossier, Item, StoredObject, VaultRequest
from evidence.proof.exporting import export_bag
from evidence.proof.seals import bag_path
from evidence.refused import Refused
from evidence.retention.dates import close_dossier
from evidence.retention.release import (
    approve_deletion,
    approve_release,
    decline,
    request_deletion,
    request_release,
)
from evidence.vault import VaultError, vault
from runs.keys import server_key
from runs.models import Person, Run
from runs.work import run_due
from tests.evidence import world
from tests.evidence.bags import MemoryTree, check, command, files_of, resigned
from tests.evidence.conftest import Clock

pytestmark = pytest.mark.django_db(transaction=True)


def sealed(run: Run, person: Person, sources: Path, *, days: int = 30) -> Dossier:
    """A closed dossier by hand with a sealed checkpoint and topology."""
    world.on_disk(run, sources, 900)
    kinds = ("last_good_checkpoint", "topology")
    rules = Policy(evidence=tuple(EvidenceRule(kind, retain_days=days) for kind in kinds))
    dossier = world.open_dossier(run, rules=rules)
    Dossier.objects.filter(pk=dossier.pk).update(url="")
    world.work(dossier)
    assert {item.state for item in dossier.items.all()} == {"sealed"}
    return close_dossier(dossier=dossier, person=person, why="looked at, nothing more to come")


def code_of(refused: pytest.ExceptionInfo[Refused]) -> str:
    return refused.value.code


def released(dossier: Dossier, one: Person, two: Person) -> Dossier:
    request = request_release(dossier=dossier, person=one, why="the postmortem is final")
    approve_release(request=request, person=two)
    run_due()
    dossier.refresh_from_db()
    return dossier


def test_nothing_is_released_before_the_last_date_has_passed(
    sources: Path, vault_dir: Path, clock: Clock, alice: Person, bob: Person
) -> None:
    dossier = sealed(world.make_run(), bob, sources)
    for days in (0, 15, 14.9):
        clock.pass_days(days)
        with pytest.raises(Refused) as refused:
            request_release(dossier=dossier, person=bob, why="space")
        assert code_of(refused) == "too-early"
        assert "is kept until" in refused.value.says
    clock.pass_days(0.2)
    request_release(dossier=dossier, person=bob, why="space")
    assert not may_delete(run=dossier.run, uris=[uri_of(dossier)])[0]["allow"], "asking releases nothing"


def uri_of(dossier: Dossier) -> str:
    return str(dossier.items.get(kind="last_good_checkpoint").source["uri"])


def test_release_takes_two_people_and_each_turn_is_a_custody_row(
    sources: Path, vault_dir: Path, clock: Clock, alice: Person, bob: Person, charlie: Person
) -> None:
    dossier = sealed(world.make_run(), bob, sources)
    tree = Path(dossier.items.get(kind="last_good_checkpoint").protected_by["tree"])
    clock.pass_days(31)
    with pytest.raises(Refused) as refused:
        request_release(dossier=dossier, person=charlie, why="let me")
    assert code_of(refused) == "not-allowed"
    with pytest.raises(Refused) as refused:
        request_release(dossier=dossier, person=bob, why=" ")
    assert code_of(refused) == "reason-needed"
    request = request_release(dossier=dossier, person=bob, why="the postmortem is final")
    with pytest.raises(Refused) as refused:
        request_release(dossier=dossier, person=alice, why="me too")
    assert code_of(refused) == "asked-already"
    for person, code in ((bob, "not-you"), (charlie, "not-allowed")):
        with pytest.raises(Refused) as refused:
            approve_release(request=request, person=person)
        assert code_of(refused) == code
    assert tree.is_dir()
    approve_release(request=request, person=alice)
    assert may_delete(run=dossier.run, uris=[uri_of(dossier)])[0]["allow"]
    run_due()
    assert not tree.exists()
    assert (sources / "step-00000900" / "shard-00000.bin").is_file(), "the trainer's own names stay"
    request.refresh_from_db()
    assert request.state == "done"
    rows = list(dossier.custody.values_list("what", "who"))[-3:]
    assert rows == [
        ("release requested", str(bob.opaque_id)),
        ("release agreed", str(alice.opaque_id)),
        ("released", "andon"),
    ]
    assert verify_custody(dossier) == []
    with pytest.raises(Refused) as refused:
        approve_release(request=request, person=alice)
    assert code_of(refused) == "over"


def test_an_open_dossier_is_not_released(sources: Path, vault_dir: Path, clock: Clock, bob: Person) -> None:
    run = world.make_run()
    dossier = world.open_dossier(run, rules=world.policy("topology"))
    clock.pass_days(100)
    with pytest.raises(Refused) as refused:
        request_release(dossier=dossier, person=bob, why="space")
    assert code_of(refused) == "open"


def test_a_declined_request_may_be_asked_again(
    sources: Path, vault_dir: Path, clock: Clock, alice: Person, bob: Person
) -> None:
    dossier = sealed(world.make_run(), bob, sources)
    clock.pass_days(31)
    request = request_release(dossier=dossier, person=bob, why="space")
    decline(request=request, person=bob, why="not yet")
    with pytest.raises(Refused) as refused:
        approve_release(request=request, person=alice)
    assert code_of(refused) == "over"
    again = request_release(dossier=dossier, person=alice, why="space, really")
    approve_release(request=again, person=bob)


def test_deletion_is_a_second_step_by_two_people_and_rows_and_chain_stay(
    sources: Path, vault_dir: Path, clock: Clock, alice: Person, bob: Person
) -> None:
    dossier = sealed(world.make_run(), bob, sources)
    clock.pass_days(31)
    with pytest.raises(Refused) as refused:
        request_deletion(dossier=dossier, person=bob, why="space")
    assert code_of(refused) == "not-released"
    released(dossier, bob, alice)
    objects = list(StoredObject.objects.filter(item__dossier=dossier))
    for one in objects:
        assert vault().open(one.key, one.version_id).read()
    request = request_deletion(dossier=dossier, person=alice, why="space")
    with pytest.raises(Refused) as refused:
        approve_deletion(request=request, person=alice)
    assert code_of(refused) == "not-you"
    approve_deletion(request=request, person=bob)
    run_due()
    dossier.refresh_from_db()
    assert dossier.deleted_at is not None
    for one in objects:
        with pytest.raises(VaultError):
            vault().open(one.key, one.version_id)
    assert not StoredObject.objects.filter(item__dossier=dossier, deleted_at=None).exists()
    assert dossier.custody.filter(what="objects deleted").count() == 2
    assert verify_custody(dossier) == []
    with pytest.raises(Refused) as refused:
        request_deletion(dossier=dossier, person=alice, why="again")
    assert code_of(refused) == "deleted"


def test_the_bag_of_what_was_deleted_says_so_and_still_proves_what_was_there(
    sources: Path, vault_dir: Path, clock: Clock, alice: Person, bob: Person, tmp_path: Path
) -> None:
    dossier = sealed(world.make_run(), bob, sources)
    clock.pass_days(31)
    released(dossier, bob, alice)
    names = sorted(bag_path(one.item, one.path) for one in StoredObject.objects.select_related("item"))
    export_bag(dossier, tmp_path / "before")
    approve_deletion(request=request_deletion(dossier=dossier, person=alice, why="space"), person=bob)
    run_due()
    call_command("export_bag", str(tmp_path / "after.zip"), "--dossier", str(dossier.pk))
    report = check(tmp_path / "after.zip", server_key().key_id)
    assert (report.problems, report.pinned, report.not_checked) == ([], True, [])
    assert report.deleted == names
    assert (check(tmp_path / "before").deleted, check(tmp_path / "before").not_checked) == ([], [])
    done = command(tmp_path / "after.zip", "--key", server_key().key_id)
    assert (done.returncode, done.stdout.count("deleted by two people")) == (0, len(names))
    # Who asked, who agreed and when lies in the bag, under the signed head of the chain.
    export_bag(dossier, tmp_path / "after")
    files = files_of(tmp_path / "after")
    rows = [json.loads(line) for line in files[form.CUSTODY].splitlines()]
    by = {row["what"]: row["who"] for row in rows if row["what"].startswith("deletion")}
    assert by == {"deletion requested": str(alice.opaque_id), "deletion agreed": str(bob.opaque_id)}
    # An object that is only left out is no deletion, and a planted deletion breaks the chain.
    inside = files_of(tmp_path / "before")
    lost = next(name for name in inside if name.startswith("data/items/"))
    assert verify(MemoryTree({name: raw for name, raw in inside.items() if name != lost})).problems
    told = inside | {form.CUSTODY: inside[form.CUSTODY] + files[form.CUSTODY].splitlines(keepends=True)[-3]}
    assert verify(MemoryTree(resigned(told, server_key()))).problems


def test_the_database_refuses_an_earlier_date(sources: Path, vault_dir: Path) -> None:
    dossier = world.open_dossier(world.make_run(), rules=world.policy("topology"))
    item = dossier.items.get()
    assert item.retain_until is not None
    earlier: list[datetime | None] = [item.retain_until - timedelta(seconds=1), None]
    for date in earlier:
        with pytest.raises(Error, match="an earlier date is refused"), transaction.atomic():
            Item.objects.filter(pk=item.pk).update(retain_until=date)
    Item.objects.filter(pk=item.pk).update(retain_until=item.retain_until + timedelta(days=1))


def test_the_database_refuses_one_person_for_both_turns(vault_dir: Path, bob: Person) -> None:
    dossier = world.open_dossier(world.make_run(), rules=world.policy("topology"))
    now, who = timezone.now(), str(bob.opaque_id)
    with pytest.raises(IntegrityError, match="by_two_people"):
        VaultRequest.objects.create(
            dossier=dossier,
            kind="release",
            state="approved",
            why="x",
            requested_by=who,
            requested_at=now,
            decided_by=who,
            decided_at=now,
        )
