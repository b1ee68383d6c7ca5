"""kill -9 of a Celery worker at every boundary of an item's way into a store; another one finishes it."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from evidence.gates import resume_gate
from evidence.models import Dossier
from tests.evidence import world
from tests.faults.shop import Shop, digests_of, is_whole, last_good, leases_end, nothing_is_claimed_too_early
from tests.faults.store_proxy import How

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.xdist_group("vault-faults")]
ALL = 99


@dataclass(frozen=True)
class Stage:
    """Where a worker stops, what state its item then has, and where the source lies."""

    stop: Callable[[Shop, Dossier], AbstractContextManager[None]]
    state: str
    on_disk: bool = False


STAGES = {
    "before the hold": Stage(
        lambda shop, _: shop.at_request(How.STALL, "PUT", f"/{shop.trainer}/", "legal-hold", times=ALL),
        "planned",
    ),
    "some versions held and others not": Stage(
        lambda shop, _: shop.at_request(How.STALL, f"PUT /{shop.trainer}/", "legal-hold", skip=2, times=ALL),
        "planned",
    ),
    "held in the store, not yet in a row": Stage(
        lambda shop, _: shop.at_table("evidence_custodyrow"),
        "planned",
    ),
    "held, nothing copied": Stage(
        lambda shop, _: shop.at_request(How.STALL, "PUT", f"/{shop.bucket}/evidence/", times=ALL),
        "collecting",
    ),
    "some copied, the answer about one lost": Stage(
        lambda shop, _: shop.at_request(How.NO_ANSWER, "PUT", f"/{shop.bucket}/evidence/", skip=1),
        "collecting",
    ),
    "copied, not read back": Stage(
        lambda shop, _: shop.at_request(How.STALL, "GET", f"/{shop.bucket}/evidence/", times=ALL),
        "collecting",
    ),
    "read back, not locked": Stage(
        lambda shop, _: shop.at_request(How.STALL, f"/{shop.bucket}/evidence/", "retention", times=ALL),
        "collecting",
    ),
    "in the middle of an upload": Stage(
        lambda shop, _: shop.at_request(How.STALL, "PUT", "partNumber=2", times=ALL),
        "collecting",
        on_disk=True,
    ),
    "all parts sent, no object made": Stage(
        lambda shop, _: shop.at_request(How.STALL, "POST", "uploadId=", times=ALL),
        "collecting",
        on_disk=True,
    ),
    "object made, the answer lost": Stage(
        lambda shop, _: shop.at_request(How.NO_ANSWER, "POST", "uploadId="),
        "collecting",
        on_disk=True,
    ),
    "all stored, not sealed": Stage(
        lambda shop, dossier: shop.before_the_seal(dossier),
        "collecting",
        on_disk=True,
    ),
    "while it is sealed": Stage(
        lambda shop, _: shop.at_table("evidence_seal"),
        "collecting",
        on_disk=True,
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_killed_there_is_followed_by_another(shop: Shop, stage: str) -> None:
    where, run = STAGES[stage], shop.new_run()
    if where.on_disk:
        directory = shop.on_disk(run, 900, size=9 << 20, files=2)  # of two parts each
    else:
        prefix = shop.in_store(run, 900)
        directory = shop.directory / "made" / run.slug / "step-00000900"
    expected = digests_of(directory)
    dossier = world.open_dossier(run, rules=last_good())
    worker = shop.worker()
    with where.stop(shop, dossier):
        shop.kill(worker)
    item = dossier.items.get()
    assert item.state == where.state
    assert not resume_gate(dossier).open
    nothing_is_claimed_too_early(dossier)
    if item.held_at is not None:
        # Held means that the trainer's rotation takes nothing away.
        shutil.rmtree(directory) if where.on_disk else shop.rotate(prefix)
    leases_end()
    shop.start_worker()
    shop.until("another worker seals it", lambda: dossier.items.get().state == "sealed")
    assert resume_gate(dossier).open
    is_whole(shop, dossier, expected)
