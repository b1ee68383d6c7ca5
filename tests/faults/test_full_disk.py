"""A full disk under the vault: nothing is called sealed that is not there; with room it completes."""

import hashlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.__main__ import REQUESTER, RUN, Demo
from demo.check import Checker
from demo.people import Person
from tests.config.up import parent_of, processes_with
from tests.faults.demos import all_obey, eventually, inside, sealed, started
from tests.faults.house import House

pytestmark = [pytest.mark.xdist_group("demos"), pytest.mark.timeout(240)]
ROOM_BYTES = 192 * 1024  # less than one checkpoint of the recording


@dataclass
class Tight:
    """A demo whose vault has no room, until `relieve` is called."""

    demo: Demo
    vault: Path
    relieve: Callable[[], None]


def worker_of(demo: Demo) -> int:
    (found,) = [
        pid
        for pid, line in processes_with(f"ANDON_DATA_DIR={demo.data_dir}").items()
        if "config.celery worker" in line and parent_of(pid) == demo.server.process.pid
    ]
    return found


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Tight]:
    """A small file system for the vault; where we may not mount one, a worker that may not write much."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES},mode=700", "none", str(disk)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        more = ["mount", "-o", "remount,size=64m", str(disk)]
        try:
            with started(tmp_path / "d", ANDON_VAULT_URL=f"file://{disk}/vault") as demo:
                yield Tight(demo, disk / "vault", lambda: subprocess.run(more, check=True) and None)
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=False)
        return
    with started(tmp_path / "d") as demo:
        worker = worker_of(demo)
        none = resource.RLIM_INFINITY
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (ROOM_BYTES, none))
        yield Tight(
            demo,
            demo.data_dir / "vault",
            lambda: resource.prlimit(worker, resource.RLIMIT_FSIZE, (none, none)) and None,
        )


def test_nothing_is_sealed_that_is_not_there(tight: Tight):
    house = inside(tight.demo)
    trainer = tight.demo.launch()
    token = tight.demo.server.manage("create_token", REQUESTER).strip().splitlines()[-1]
    checker = Checker(tight.demo.server, RUN, token, trainer.answer)
    eventually("an incident", checker.incident)
    eventually("the run is held all the same", lambda: all_obey(checker))
    eventually("somebody is told", lambda: "full" in str(trouble(house)) or "large" in str(trouble(house)))
    incident = checker.incident()
    assert incident["evidence"]["missing"] == 0
    assert not sealed(incident["evidence"])
    everything_sealed_is_there(house, tight.vault)
    assert ("last_good_checkpoint", "sealed") not in house.sql("SELECT kind, state FROM evidence_item")

    # The gate is shut, and says so.
    mira = Person(tight.demo.server.url, REQUESTER, tight.demo.passwords[REQUESTER])
    mira.sign_in()
    page = mira.get(f"/incidents/{incident['id']}")
    assert page.status == 200
    requested = [form for form in page.parsed().forms if form.action.endswith("/request")]
    assert requested == []

    tight.relieve()
    eventually("with room it completes", lambda: sealed(checker.incident()["evidence"]))
    everything_sealed_is_there(house, tight.vault)
    incoming = tight.vault / "incoming"
    assert not incoming.exists() or list(incoming.iterdir()) == []


def trouble(house: House) -> list[tuple[str, ...]]:
    """Return what units of work say went wrong."""
    return house.sql("SELECT error FROM runs_work WHERE kind LIKE 'evidence.%%' AND error <> ''")


def everything_sealed_is_there(house: House, vault: Path) -> None:
    """Every object of every sealed item is in the vault with the bytes that were promised."""
    rows = house.sql(
        "SELECT o.key, o.sha256, o.bytes_total FROM evidence_storedobject o"
        " JOIN evidence_item i ON i.id = o.item_id WHERE i.state = 'sealed'"
    )
    for key, sha256, size in rows:
        raw = (vault / "objects" / key).read_bytes()
        assert len(raw) == size
        assert hashlib.sha256(raw).hexdigest() == sha256
    # A sealed item has all its files stored, not some.
    short = (
        "SELECT i.name FROM evidence_item i WHERE i.state = 'sealed' AND jsonb_array_length(i.files) >"
        " (SELECT count(*) FROM evidence_storedobject o WHERE o.item_id = i.id)"
    )
    assert house.sql(short) == []
