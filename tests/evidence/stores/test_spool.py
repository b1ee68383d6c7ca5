"""What a killed worker left on disk goes at once; what is in use never does."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.conf import LazySettings

from evidence.stores import spool
from evidence.stores.directory import DirectoryVault
from evidence.vault import vault

# Holds a directory of the spool in a process of its own, until it is killed.
HOLD = """
import sys, time
import django
from django.conf import settings
settings.configure(DATA_DIR=sys.argv[1])
from evidence.stores import spool
with spool.directory("item-7") as place:
    (place / "half.bin").write_bytes(b"x")
    print(place, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def root(tmp_path: Path, settings: LazySettings) -> Path:
    settings.DATA_DIR = tmp_path
    return tmp_path / "spool"


def test_a_directory_goes_with_its_process_and_not_before(root: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(root.parent)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    place = Path(worker.stdout.readline().strip())
    with spool.directory("item-8") as mine:
        assert spool.sweep() == 0
        assert (place / "half.bin").exists()
        worker.kill()
        worker.wait()
        worker.stdout.close()
        assert spool.sweep() == 1
        assert not place.exists()
        assert mine.exists()  # of this very process
    assert list(root.iterdir()) == []


def test_sweeps_beside_those_who_make_directories_take_none(root: Path) -> None:
    def use(number: int) -> bool:
        with spool.directory(f"item-{number}") as place:
            (place / "file").write_bytes(b"x")
            spool.sweep()
            return (place / "file").read_bytes() == b"x"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(200)))
    assert list(root.iterdir()) == []


def test_what_nobody_locked_is_left_alone_for_a_day(root: Path) -> None:
    """A directory is unlocked for a moment after it was made, and for long where there are no locks."""
    (root / "bag-1-x").mkdir(parents=True)
    (root / "stray").write_text("x")
    assert spool.sweep() == 0
    long_ago = time.time() - 90_000
    for left in root.iterdir():
        os.utime(left, (long_ago, long_ago))
    assert spool.sweep() == 2


def test_a_link_in_the_spool_leads_nowhere(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".owner").write_text("")
    root.mkdir()
    (root / "item-9-x").symlink_to(elsewhere)
    spool.sweep()
    assert (elsewhere / ".owner").exists()


def test_what_is_half_written_in_a_directory_vault_goes_after_a_week(vault_dir: Path) -> None:
    store = vault()
    assert isinstance(store, DirectoryVault)
    for half in ("3f2a", "uploads/77/00001-ab", "young", "uploads/78/00001-ab"):
        file = vault_dir / "incoming" / half
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"half")
    old_s = time.time() - 8 * 86_400
    for name in ("incoming/3f2a", "incoming/uploads/77", "incoming/uploads"):
        os.utime(vault_dir / name, (old_s, old_s))
    store.abort_abandoned()
    left = [str(file.relative_to(vault_dir)) for file in vault_dir.rglob("*") if file.is_file()]
    assert sorted(left) == ["incoming/uploads/78/00001-ab", "incoming/young"]
