"""The store is busy, hangs up, does not answer, or bits flip on the way: items wait, and then are whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from django.conf import LazySettings
from django.db import connection

from evidence import vault as vaults
from evidence.gates import resume_gate
from evidence.models import Dossier
from evidence.stores import s3_client
from runs import work as works
from runs.models import Checkpoint, Work
from runs.work import run_due, run_one
from tests.evidence import world
from tests.faults.shop import Shop, digests_of, is_whole, last_good, nothing_is_claimed_too_early
from tests.faults.store_proxy import How

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.xdist_group("vault-faults")]
ALL = 999


def frozen(shop: Shop, *, size: int = 3000, files: int = 3) -> tuple[Dossier, Path]:
    """Open a dossier about a checkpoint on disk."""
    run = shop.new_run()
    directory = shop.on_disk(run, 900, size=size, files=files)
    return world.open_dossier(run, rules=last_good()), directory


@pytest.mark.parametrize(("how", "says"), [(How.BUSY, "SlowDown"), (How.RESET, "Error")])
def test_a_store_that_takes_nothing_is_said_and_waited_for(shop: Shop, how: How, says: str) -> None:
    dossier, directory = frozen(shop)
    expected = digests_of(directory)
    shop.worker()
    shop.proxy.fail(how, f"/{shop.bucket}/evidence/", times=ALL)
    shop.until("the item says so", lambda: dossier.items.get().why.startswith("vault: "))
    item = dossier.items.get()
    assert says in item.why
    assert (item.state, item.silent_since) == ("collecting", None)  # held; the source is not to blame
    (line,) = resume_gate(dossier).lacking
    assert "vault: " in line.says
    nothing_is_claimed_too_early(dossier)
    shop.proxy.heal()
    shop.until("it is sealed", lambda: dossier.items.get().state == "sealed")
    is_whole(shop, dossier, expected)


def test_a_store_that_fails_now_and_then_is_asked_again(shop: Shop) -> None:
    dossier, directory = frozen(shop, size=9 << 20, files=2)
    expected = digests_of(directory)
    shop.worker()
    faults = [
        shop.proxy.fail(How.BUSY, "POST", "uploads"),
        shop.proxy.fail(How.RESET, "PUT", "partNumber=1"),
        shop.proxy.fail(How.NO_ANSWER, "PUT", "partNumber=2"),
        shop.proxy.fail(How.BUSY, "PUT", "partNumber=2", skip=1),
        shop.proxy.fail(How.RESET, "POST", "uploadId="),
    ]
    shop.until_struck(faults[2])
    faults[2].go.set()
    shop.until("it is sealed", lambda: dossier.items.get().state == "sealed")
    assert [fault.struck for fault in faults] == [1] * len(faults)
    is_whole(shop, dossier, expected)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, settings: LazySettings) -> Iterator[None]:
    """A client that waits for 2 s where others wait for a minute, and leases that end within 1.2 s."""
    settings.VAULT_READ_TIMEOUT_S = 2
    monkeypatch.setattr(works, "LEASE_S", 1.2)
    monkeypatch.setattr(works, "RENEW_EVERY_S", 0.3)
    for made in (s3_client.client, vaults._vault):
        made.cache_clear()
    yield
    for made in (s3_client.client, vaults._vault):
        made.cache_clear()


@contextmanager
def another_worker() -> Iterator[None]:
    """Have a second worker take whatever it can get while the block runs."""
    over = Event()

    def work() -> None:
        while not over.wait(0.2):
            run_due()
        connection.close()

    other = Thread(target=work)
    other.start()
    try:
        yield
    finally:
        over.set()
        other.join()


# Where it happens, and whether the store has done by then what it was asked for.
@pytest.mark.parametrize(
    ("source", "how", "words"),
    [
        ("disk", How.STALL, ("PUT", "/evidence/")),
        ("disk", How.NO_ANSWER, ("PUT", "/evidence/")),
        ("disk", How.NO_ANSWER, ("POST", "?uploads")),
        ("store", How.NO_ANSWER, ("PUT", "/evidence/")),
    ],
    ids=["put", "put, done", "upload begun", "copied"],
)
def test_a_store_that_stalls_for_longer_than_anybody_waits(
    shop: Shop, impatient: None, source: str, how: How, words: tuple[str, ...]
) -> None:
    run = shop.new_run()
    size = 9 << 20 if "POST" in words else 3000
    if source == "disk":
        expected = digests_of(shop.on_disk(run, 900, size=size))
    else:
        shop.in_store(run, 900, size=size)
        expected = digests_of(shop.directory / "made" / run.slug / "step-00000900")
    dossier = world.open_dossier(run, rules=last_good())
    run_one(Work.objects.get(kind="evidence.start").pk)
    fault = shop.proxy.fail(how, *words, times=2)
    with another_worker():
        run_due()
    assert fault.struck
    assert Work.objects.filter(attempts__gt=1).count() == 0, "no lease was lost, and nobody took over"
    item = dossier.items.get()
    if item.state != "sealed":  # what can be asked twice, boto3 asked twice
        assert "ReadTimeoutError" in item.why
        nothing_is_claimed_too_early(dossier)
    shop.proxy.heal()
    world.work(dossier)
    is_whole(shop, dossier, expected)


@pytest.mark.parametrize(("size", "least"), [(3000, 3000), (9 << 20, 2 << 20)], ids=["object", "part"])
def test_a_bit_flipped_on_the_way_there_is_caught_and_sent_again(shop: Shop, size: int, least: int) -> None:
    dossier, directory = frozen(shop, size=size)
    expected = digests_of(directory)
    shop.worker()
    fault = shop.proxy.fail(How.FLIP, "PUT", f"/{shop.bucket}/evidence/", least_bytes=least)
    shop.until("it is sealed", lambda: dossier.items.get().state == "sealed")
    assert fault.struck == 1
    is_whole(shop, dossier, expected)


def test_a_bit_flipped_on_the_way_back_does_not_make_a_good_checkpoint_bad(shop: Shop) -> None:
    run = shop.new_run()
    shop.in_store(run, 900)
    dossier = world.open_dossier(run, rules=last_good())
    shop.worker()
    # The store copies, and what it copied is read back once.
    fault = shop.proxy.fail(How.FLIP_ANSWER, "GET", f"/{shop.bucket}/evidence/")
    shop.until("the item is final", lambda: dossier.items.filter(state__in=("sealed", "missing")).exists())
    assert dossier.items.get().why == ""
    assert fault.struck == 1
    assert Checkpoint.objects.get().state == "verified"
    is_whole(shop, dossier, digests_of(shop.directory / "made" / run.slug / "step-00000900"))
