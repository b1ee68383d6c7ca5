"""Trees of held files that several workers make at the same time."""

import errno
import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from andon import held_tree

WORKERS = 8
ROUNDS = 200


def test_threads_that_hold_the_same_tree_do_not_take_a_file_for_missing(tmp_path: Path) -> None:
    base = tmp_path / "step-900"
    base.mkdir()
    (base / "shard").write_bytes(b"abc")
    files = [{"path": "shard", "bytes": 3}]
    with ThreadPoolExecutor(WORKERS) as pool:
        for number in range(ROUNDS):
            asked = [
                pool.submit(held_tree.hold_tree, base, tmp_path, f"dossier/{number}", files)
                for _ in range(WORKERS)
            ]
            (tree,) = {one.result().tree for one in asked}
            assert [path.name for path in Path(tree).rglob("*") if path.is_file()] == ["shard"]


def test_a_tree_that_is_read_only_takes_the_files_it_lacks(tmp_path: Path) -> None:
    base = tmp_path / "step-900"
    (base / "deep").mkdir(parents=True)
    names = ["one", "deep/two", "deep/three"]
    for name in names:
        (base / name).write_bytes(name.encode())
    files = [{"path": name, "bytes": len(name)} for name in names]
    first = held_tree.hold_tree(base, tmp_path, "dossier/1", files[:2])
    second = held_tree.hold_tree(base, tmp_path, "dossier/1", files)
    assert (first.tree, second.is_safe) == (second.tree, True)
    assert (Path(second.tree) / "deep/three").read_bytes() == b"deep/three"
    assert Path(second.tree).stat().st_mode & 0o222 == 0


def tables(*names: str) -> list[dict[str, object]]:
    return [{"path": name, "bytes": len(name)} for name in names]


def write(base: Path, *names: str) -> None:
    base.mkdir()
    for name in names:
        (base / name).write_bytes(name.encode())


@pytest.fixture
def cloning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose file systems clone: copying the bytes looks the same to whoever reads them."""

    def clone(target: int, request: int, source: int) -> int:
        assert request == 0x40049409
        os.pwrite(target, os.pread(source, 1 << 20, 0), 0)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)


def test_a_second_holder_of_clones_says_clones(tmp_path: Path, cloning: None) -> None:
    base = tmp_path / "step-900"
    write(base, "one", "two")
    first = held_tree.hold_tree(base, tmp_path, "dossier/1", tables("one", "two"))
    assert (first.how, "clones" in first.says) == ("reflinks", True)
    again = held_tree.hold_tree(base, tmp_path, "dossier/1", tables("one", "two"))
    assert (again.how, again.says) == ("reflinks", first.says)
    shutil.rmtree(base)  # nor does it need the originals to say so
    assert held_tree.hold_tree(base, tmp_path, "dossier/1", tables("one", "two")).how == "reflinks"


def test_a_second_holder_of_links_does_not_say_clones(tmp_path: Path, cloning: None) -> None:
    base = tmp_path / "step-900"
    write(base, "one", "two")
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(fcntl, "ioctl", no_clones)
        assert held_tree.hold_tree(base, tmp_path, "dossier/1", tables("one")).how == "links"
    # The file system clones by now (it was remounted): one file is a clone, the other still a link.
    mixed = held_tree.hold_tree(base, tmp_path, "dossier/1", tables("one", "two"))
    assert mixed.how == "links"
    assert "hard links (1 of 2 are clones)" in mixed.says
    shutil.rmtree(base)  # with the original gone a link has one name, as a clone has
    assert held_tree.hold_tree(base, tmp_path, "dossier/1", tables("one")).how == "links"


def no_clones(*_: object) -> int:
    raise OSError(errno.EOPNOTSUPP, "no clones here")
