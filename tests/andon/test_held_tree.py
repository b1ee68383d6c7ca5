"""A directory held where it lies: rotation cannot lose the bytes, and a change in place shows."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from andon import held_tree
from andon.held_tree import HoldError, hold_tree

NAME = "0b4b3c1e-0000-4000-8000-000000000000/7"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "scratch" / "step-00000900"
    (directory / "layers").mkdir(parents=True)
    for number in range(3):
        (directory / f"shard-{number}.bin").write_bytes(os.urandom(3000 + number))
    (directory / "layers" / "one.bin").write_bytes(b"x" * 10)
    return directory


def table(directory: Path) -> list[dict[str, object]]:
    return [{"path": path} for path in held_tree.list_files(directory)]


def test_it_keeps_every_byte_after_the_originals_are_deleted(checkpoint: Path) -> None:
    bodies = {path: (checkpoint / path).read_bytes() for path in held_tree.list_files(checkpoint)}
    held = hold_tree(checkpoint, checkpoint.parent, NAME, table(checkpoint))
    assert held.is_safe
    shutil.rmtree(checkpoint)
    assert held.tree == str(checkpoint.parent / ".andon-holds" / NAME)
    for entry in held.files:
        kept = held_tree.place(held.tree, checkpoint.name, entry["path"])
        assert kept.read_bytes() == bodies[entry["path"]]
        assert entry["sha256"] == hashlib.sha256(bodies[entry["path"]]).hexdigest()
        assert kept.stat().st_ino == entry["inode"]
    assert held_tree.changed(held.tree, checkpoint.name, held.files) == []


def test_holding_again_after_rotation_finds_what_was_held(checkpoint: Path) -> None:
    files = table(checkpoint)
    first = hold_tree(checkpoint, checkpoint.parent, NAME, files)
    shutil.rmtree(checkpoint)
    assert hold_tree(checkpoint, checkpoint.parent, NAME, files).files == first.files


def test_one_file_is_held_under_its_own_name(checkpoint: Path) -> None:
    file = checkpoint / "shard-1.bin"
    held = hold_tree(file, checkpoint.parent, NAME, [{"path": "", "bytes": 3001}])
    file.unlink()
    assert held_tree.place(held.tree, file.name, "").stat().st_size == 3001


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_as_root_the_trainer_can_read_what_is_held_and_no_longer_write_it(checkpoint: Path) -> None:
    shard = checkpoint / "shard-0.bin"
    shard.chmod(0o600)
    os.chown(shard, 4711, 4711)
    held = hold_tree(checkpoint, checkpoint.parent, NAME, table(checkpoint))
    about = held_tree.place(held.tree, checkpoint.name, "shard-0.bin").stat()
    assert about.st_uid == 0
    assert about.st_gid == 4711
    assert about.st_mode & 0o777 == (0o440 if held.how == "links" else 0o400)
    assert Path(held.tree).stat().st_mode & 0o222 == 0


def test_a_change_in_place_is_told_apart_from_a_file_that_was_replaced(checkpoint: Path) -> None:
    held = hold_tree(checkpoint, checkpoint.parent, NAME, table(checkpoint))
    replaced = checkpoint / "shard-0.bin"
    replaced.unlink()
    replaced.write_bytes(b"another file of the same name")
    assert held_tree.changed(held.tree, checkpoint.name, held.files) == []
    kept = held_tree.place(held.tree, checkpoint.name, "shard-1.bin")
    kept.chmod(0o644)
    body = bytearray(kept.read_bytes())
    body[7] ^= 1
    kept.write_bytes(body)
    Path(held.tree).chmod(0o755)
    held_tree.place(held.tree, checkpoint.name, "shard-2.bin").unlink()
    assert held_tree.changed(held.tree, checkpoint.name, held.files) == [
        "shard-1.bin: was changed in place after it was held",
        "shard-2.bin: its held link is gone",
    ]


@pytest.mark.parametrize("path", ["/etc/passwd", "../other", "a/../../b", "a\0b"])
def test_a_path_that_leaves_the_directory_is_refused(checkpoint: Path, path: str) -> None:
    with pytest.raises(HoldError) as refused:
        hold_tree(checkpoint, checkpoint.parent, NAME, [{"path": path}])
    assert refused.value.permanent


def test_a_missing_file_a_wrong_size_and_a_link_elsewhere_are_refused(checkpoint: Path) -> None:
    for entry in ({"path": "gone.bin"}, {"path": "shard-0.bin", "bytes": 1}):
        with pytest.raises(HoldError) as refused:
            hold_tree(checkpoint, checkpoint.parent, NAME, [entry])
        assert refused.value.permanent
    (checkpoint / "link.bin").symlink_to("/etc/passwd")
    with pytest.raises(HoldError, match="not a regular file"):
        hold_tree(checkpoint, checkpoint.parent, NAME, [{"path": "link.bin"}])


def test_where_no_link_can_be_made_it_says_so_and_names_the_files(
    checkpoint: Path,
) -> None:
    # The holds lie on another file system: links do not cross it.
    if os.stat("/dev/shm").st_dev == checkpoint.stat().st_dev:
        pytest.skip("needs two file systems")
    elsewhere = Path("/dev/shm") / f"andon-{os.getpid()}"
    elsewhere.mkdir()
    (checkpoint.parent / ".andon-holds").symlink_to(elsewhere)
    try:
        held = hold_tree(checkpoint, checkpoint.parent, NAME, table(checkpoint))
        assert (held.how, held.tree) == ("none", "")
        assert "not safe until copied" in held.says
        assert len(held.files) == 4
        assert not any(elsewhere.rglob("*.bin"))
    finally:
        shutil.rmtree(elsewhere)
