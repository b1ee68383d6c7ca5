"""A held tree is removed to the last of its own files, and nothing else with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon import held_tree
from andon.held_tree import HoldError
from andon.tree_removal import remove

FILES = ["one", "deep/two", "deep/er/three"]


class Scene:
    """A checkpoint that is held, and what its hold wrote down."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.base = self.root / "step-900"
        for name in FILES:
            (self.base / name).parent.mkdir(parents=True, exist_ok=True)
            (self.base / name).write_bytes(name.encode())
        held = held_tree.hold_tree(self.base, self.root, "dossier/7-1", [{"path": name} for name in FILES])
        self.tree = Path(held.tree)
        self.ours = {str(entry["path"]): int(entry["inode"]) for entry in held.files}

    def originals(self) -> list[str]:
        return sorted(str(p.relative_to(self.base)) for p in self.base.rglob("*") if p.is_file())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_tree_goes_and_the_originals_stay(scene: Scene) -> None:
    other = held_tree.hold_tree(scene.base, scene.root, "dossier/8-2", [{"path": "one"}])
    gone = remove(scene.tree, scene.root, scene.ours)
    assert (gone.files, gone.left) == (3, [])
    assert not scene.tree.exists()
    assert scene.originals() == sorted(FILES)
    assert (Path(other.tree) / "one").read_bytes() == b"one"
    assert remove(scene.tree, scene.root, scene.ours).left == []  # asked again
    remove(Path(other.tree), scene.root, {"one": int(other.files[0]["inode"])})
    assert not (scene.root / held_tree.TREES / "dossier").exists()


def test_what_no_hold_made_is_left_and_named(scene: Scene) -> None:
    deep = scene.tree / "deep"
    for directory in (scene.tree, deep):
        directory.chmod(0o755)
    (deep / "notes.txt").write_text("somebody's own")
    (deep / "link").symlink_to(scene.base)
    (scene.tree / "theirs").mkdir()
    (scene.tree / "theirs" / "one").write_text("x")
    (scene.tree / "one").unlink()
    (scene.tree / "one").write_text("another file under a held name")
    gone = remove(scene.tree, scene.root, scene.ours)
    assert gone.left == ["deep/link", "deep/notes.txt", "one", "theirs"]
    assert (deep / "notes.txt").read_text() == "somebody's own"
    assert (scene.tree / "theirs" / "one").exists()
    assert not (deep / "er").exists()
    assert scene.originals() == sorted(FILES)


@pytest.mark.parametrize("which", ["trees", "dossier", "tree", "inside"])
def test_no_link_leads_a_removal_to_the_originals(scene: Scene, which: str) -> None:
    """Somebody put a link to the checkpoint itself where the tree, or a part of it, was."""
    trees = scene.root / held_tree.TREES
    where = {"trees": trees, "dossier": trees / "dossier", "tree": scene.tree, "inside": scene.tree / "deep"}
    away = scene.root / "away"
    for directory in [p for p in trees.rglob("*") if p.is_dir()]:
        directory.chmod(0o755)
    where[which].rename(away)
    # The originals have exactly the names and inodes that are held.
    shape = {"trees": "dossier/7-1", "dossier": "7-1", "tree": ".", "inside": "."}[which]
    real = scene.base / "deep" if which == "inside" else scene.base
    target = scene.root / "trap" / shape
    target.parent.mkdir(parents=True, exist_ok=True)
    if shape == ".":
        where[which].symlink_to(real)
    else:
        target.symlink_to(real)
        where[which].symlink_to(scene.root / "trap")
    if which == "inside":
        assert remove(scene.tree, scene.root, scene.ours).left == ["deep"]
    else:
        with pytest.raises(HoldError, match="a link or a file lies in its way"):
            remove(scene.tree, scene.root, scene.ours)
    assert scene.originals() == sorted(FILES)


@given(st.lists(st.sampled_from(["..", ".", "/", "one", "deep", "two", "step-900", "", "é"]), max_size=5))
def test_no_name_reaches_beyond_the_tree(tmp_path_factory: pytest.TempPathFactory, pieces: list[str]) -> None:
    scene = Scene(tmp_path_factory.mktemp("scene"))
    remove(scene.tree, scene.root, {"/".join(pieces): None})
    assert scene.originals() == sorted(FILES)


def test_a_removal_killed_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    """Killed in front of every single removal of a name, one after another."""
    scene = Scene(tmp_path)
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom andon import tree_removal\n"
        "calls = []\n"
        "def stop(real):\n"
        "    def one(*given, **named):\n"
        "        calls.append(1)\n"
        "        if len(calls) > int(sys.argv[1]):\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return real(*given, **named)\n"
        "    return one\n"
        "os.unlink, os.rmdir = stop(os.unlink), stop(os.rmdir)\n"
        f"tree_removal.remove(Path({str(scene.tree)!r}), Path({str(scene.root)!r}), {scene.ours!r})\n"
    )
    killed = 0
    while subprocess.run([sys.executable, "-c", code, "1"], check=False).returncode == -signal.SIGKILL:
        killed += 1
        assert scene.originals() == sorted(FILES)
        assert killed < 20
    assert killed >= 4  # three files and their directories, one name for each life
    assert not scene.tree.exists()
    assert remove(scene.tree, scene.root, scene.ours).files == 3
