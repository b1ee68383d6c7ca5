"""Two workers on one item, sources that go, a full spool, and a broker that forgets: nothing is doubled."""

import os
import resource

import pytest
import redis

from evidence.custody import verify_custody
from evidence.gates import resume_gate
from evidence.models import Item
from evidence.queries import last_good as last_good_of
from evidence.vault import vault
from runs.models import Checkpoint
from tests.evidence import world
from tests.faults.shop import (
    Shop,
    digests_of,
    is_whole,
    last_good,
    leases_end,
    nothing_is_claimed_too_early,
)
from tests.faults.store_proxy import How

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.xdist_group("vault-faults")]


def test_a_worker_that_was_taken_for_dead_comes_back_and_changes_nothing(shop: Shop) -> None:
    run = shop.new_run()
    directory = shop.on_disk(run, 900, size=9 << 20, files=2)
    expected = digests_of(directory)
    dossier = world.open_dossier(run, rules=last_good())
    shop.worker()
    shop.until_struck(shop.proxy.fail(How.DELAY, "POST", "uploadId="))
    leases_end()
    shop.start_worker()
    shop.until("the second worker seals it", lambda: dossier.items.get().state == "sealed")
    before = list(dossier.custody.values_list("seq", "digest"))
    shop.proxy.heal()
    shop.until("the first worker gives up", lambda: not shop.proxy.waiting)
    is_whole(shop, dossier, expected)
    assert list(dossier.custody.values_list("seq", "digest")) == before


def test_two_workers_share_the_checkpoints_of_a_dossier(shop: Shop) -> None:
    run = shop.new_run()
    for step in (500, 600, 700, 800, 900):
        shop.in_store(run, step)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint", "checkpoint_ladder"))
    shop.worker()
    shop.start_worker()
    final = {"sealed", "missing", "not_applicable"}
    shop.until("all is final", lambda: {item.state for item in dossier.items.all()} <= final)
    assert {item.state for item in dossier.items.all()} == {"sealed"}
    stored = [(one.key, one.version_id) for item in dossier.items.all() for one in item.stored_objects.all()]
    assert shop.versions(dossier) == sorted(stored)
    assert len(stored) == 4 * dossier.items.count()
    for what in ("held", "sealed"):
        assert dossier.custody.filter(what=what).count() == dossier.items.count()
    nothing_doubled = [one.number for one in dossier.seals.order_by("number")]
    assert nothing_doubled == list(range(1, dossier.items.count() + 1))


def test_a_source_without_locks_that_is_deleted_in_the_middle_is_missing_and_gives_way(shop: Shop) -> None:
    bucket, run = shop.endpoint.new_bucket(locked=False), shop.new_run()
    shop.in_store(run, 800, bucket=bucket)
    newest = shop.in_store(run, 900, bucket=bucket)
    dossier = world.open_dossier(run, rules=last_good())
    shop.worker()
    with shop.at_request(How.DELAY, "PUT", f"/{shop.bucket}/evidence/", skip=1):
        item = dossier.items.get()
        assert (item.state, item.held_at) == ("collecting", None)
        assert item.protected_by["says"].startswith("not safe until copied")
        shop.rotate(newest, bucket)
    shop.until(
        "the one before is sealed",
        lambda: dossier.items.filter(kind="last_good_checkpoint", state="sealed").exists(),
    )
    good = last_good_of(dossier)
    assert good is not None
    assert good.step == 800
    lost = dossier.custody.get(what="missing")
    assert newest in str(lost.data["why"])
    assert Checkpoint.objects.get(step=900).state == "bad"
    assert not dossier.custody.filter(what="held").exists()
    # Holding and copying are two works on one item: what both see is said once.
    assert dossier.custody.filter(what="not safe until copied").count() == 2
    assert verify_custody(dossier) == []


def test_a_source_without_locks_that_is_deleted_before_the_hold_is_missing(shop: Shop) -> None:
    bucket, run = shop.endpoint.new_bucket(locked=False), shop.new_run()
    newest = shop.in_store(run, 900, bucket=bucket)
    dossier = world.open_dossier(run, rules=last_good())
    shop.rotate(newest, bucket)
    shop.worker()
    shop.until("it is given up", lambda: dossier.items.filter(state="missing").exists())
    assert not resume_gate(dossier).open
    assert shop.versions(dossier) == []
    (line,) = resume_gate(dossier).lacking
    assert "missing" in line.says
    nothing_is_claimed_too_early(dossier)


def test_a_full_spool_is_our_trouble_and_makes_nothing_missing(shop: Shop) -> None:
    run = shop.new_run()
    log = shop.scratch / "rank-0.log"
    log.write_bytes(b"step 1 loss 2.5\n" * 20_000)
    world.post(run, "artifact.available", data={"kind": "rank_log", "uri": log.as_uri(), "rank": 0})
    dossier = world.open_dossier(run, rules=world.policy("rank_logs"))
    world.age(dossier, 60)  # no rank is still writing
    worker = shop.worker()
    limits = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (100_000, limits[1]))
    shop.until("the item says so", lambda: dossier.items.get().why.startswith("spool: no room"))
    Item.objects.update(deadline=dossier.opened_at)
    attempts = shop.attempts(dossier.items.get())
    shop.until("it is tried again", lambda: shop.attempts(dossier.items.get()) > attempts + 1)
    item = dossier.items.get()
    assert item.state not in {"missing", "sealed"}
    assert item.silent_since is None
    nothing_is_claimed_too_early(dossier)
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, limits)
    shop.until("with room it is sealed", lambda: dossier.items.get().state == "sealed")
    (stored,) = dossier.items.get().stored_objects.all()
    body = vault().open(stored.key, stored.version_id).read()
    # Its end, from the first whole line on.
    assert body.splitlines()[-10_000:] == log.read_bytes().splitlines()[-10_000:]
    assert verify_custody(dossier) == []
    left = [
        name for name in os.listdir(shop.directory / "data" / "spool") if name.startswith(f"item-{item.pk}-")
    ]
    assert left == []


def test_a_broker_that_is_emptied_and_then_killed_loses_no_work(shop: Shop) -> None:
    run = shop.new_run()
    directory = shop.on_disk(run, 900)
    expected = digests_of(directory)
    dossier = world.open_dossier(run, rules=last_good())
    shop.worker()
    with shop.at_request(How.BUSY, "PUT", f"/{shop.bucket}/evidence/", times=99):
        redis.Redis.from_url(shop.broker.url()).flushall()
        shop.restart_broker()
    shop.until("it is sealed", lambda: dossier.items.get().state == "sealed")
    is_whole(shop, dossier, expected)
