"""What is known of the store is known to sixteen copying threads by one question."""

import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection, transaction
from django.utils import timezone

from evidence import tasks
from evidence.models import StoreProbe
from evidence.stores import probed
from evidence.stores.probed import PROBE, newest_result
from evidence.vault import vault
from runs.models import Work
from runs.work import run_due

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_worker_that_starts_has_the_store_tried_once(vault_dir: Path) -> None:
    for _ in range(3):  # three workers, or one that is started again and again
        tasks.at_start()
    assert Work.objects.filter(kind=PROBE).count() == 1
    run_due()
    assert StoreProbe.objects.get().store == vault().name
    tasks.at_start()
    assert StoreProbe.objects.count() == 1
    assert not Work.objects.filter(kind=PROBE, state=Work.State.DUE).exists()
    StoreProbe.objects.update(probed_at=timezone.now() - timedelta(minutes=11))
    tasks.at_start()  # the store may have been started again, too
    run_due()
    assert StoreProbe.objects.count() == 2


def test_one_thread_asks_what_was_probed_and_the_others_go_on(
    vault_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = vault().name
    StoreProbe.objects.create(store=name, probed_at=timezone.now(), result={"says": "new"})
    # What is known is a minute old.
    monkeypatch.setitem(probed._newest, name, (time.monotonic() - 60, {"says": "old"}))

    def ask() -> str:
        try:
            return str(newest_result(name)["says"])
        finally:
            connection.close()

    with ThreadPoolExecutor(16) as pool:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("LOCK TABLE evidence_storeprobe IN ACCESS EXCLUSIVE MODE")
            asked = [pool.submit(ask) for _ in range(16)]
            done, waiting = wait(asked, return_when=FIRST_COMPLETED)
            while len(waiting) > 1:  # the last one waits for the table, as for a slow database
                more, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                done |= more
            assert {one.result() for one in done} == {"old"}
        (last,) = waiting
        assert last.result() == "new"
    assert ask() == "new"
