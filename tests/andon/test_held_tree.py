"""Trees of held files that several workers make at the same time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
