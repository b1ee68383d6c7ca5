"""What a person sees while an item is on its way: bytes that move, and trouble of our own that lasts."""

import time
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings
from django.db import connection
from django.utils import timezone

from evidence.gates import resume_gate
from evidence.models import Item
from evidence.pages.listing import item_lines
from runs.models import Work
from runs.work import run_due
from tests.evidence import world
from tests.evidence.conftest import Clock
from tests.evidence.s3calls import before

pytestmark = pytest.mark.django_db(transaction=True)
PART = 8 << 20
_DAY_S = 86_400


def test_a_vault_that_takes_nothing_is_tried_less_and_less_often(
    sources: Path, vault_dir: Path, settings: LazySettings, clock: Clock
) -> None:
    run = world.make_run()
    world.on_disk(run, sources, 900)
    good = settings.VAULT_URL
    settings.VAULT_URL = f"file://{sources}/step-00000900/commit.json/no"
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    waits: list[float] = []
    since: set[Any] = set()
    for _ in range(16):
        run_due()
        work = Work.objects.get(kind="evidence.item", state="due")
        waits.append((work.not_before - timezone.now()).total_seconds())
        assert work.error.startswith("vault: ")
        since.add(dossier.items.get().trouble_since)
        clock.pass_days(waits[-1] / _DAY_S)
    assert len(since) == 1, "since when stays while it lasts"
    assert waits[0] <= 2
    assert max(waits) <= 60
    for number in range(1, len(waits)):
        # As long as it takes to have lasted half as long again, give or take the jitter.
        lasted = sum(waits[:number])
        assert 0.75 * min(60, lasted / 2) - 1 <= waits[number] <= max(2, lasted / 2 + 1)
    assert len({round(wait, 2) for wait in waits[-4:]}) > 1, "what failed together does not return together"
    (begun,) = since
    assert f"since {begun:%H:%M:%S} UTC; still trying" in resume_gate(dossier).lacking[0].says
    assert "still trying" in item_lines(dossier)[0].reason
    settings.VAULT_URL = good
    world.work(dossier)
    item = dossier.items.get()
    assert (item.state, item.why, item.trouble_since) == ("sealed", "", None)


def test_one_large_file_shows_its_progress_before_it_ends(sources: Path, vault_s3: str) -> None:
    run = world.make_run()
    directory, table = world.write_checkpoint(sources, 900, size=3 * PART, files=1)
    world.commit(run, 900, directory.as_uri(), table)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    shown: list[int] = []

    def look(_: str, url: str) -> None:
        if "partNumber=3" not in url:
            return
        until = time.monotonic() + 20
        while not (done := Item.objects.get().bytes_done) and time.monotonic() < until:
            time.sleep(0.05)
        shown.append(done)
        connection.close()

    with before(look, "UploadPart"):
        world.work(dossier, rounds=2)
    assert shown
    assert shown[0] >= PART
    assert shown[0] % PART < 3000, "whole parts, and the small manifest beside them"
    assert dossier.items.get().state == "sealed"
