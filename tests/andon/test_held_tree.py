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
