"""Verified is a claim with evidence."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings
from django.db import connection, transaction

from evidence.freezing import verify_checkpoints
from runs.models import Checkpoint
from runs.work import run_due
from tests.config.up import wait_until
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)


def verified(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    with transaction.atomic():
        verify_checkpoints.ask(checkpoint)
    run_due()
    checkpoint.refresh_from_db()
    return checkpoint.state, checkpoint.verification


def test_every_byte_is_read_where_this_server_may_read(sources: Path) -> None:
    state, seen = verified(world.on_disk(world.make_run(), sources, 900, state="committed"))
    assert state == "verified"
    assert (seen["files"], seen["finite_by"], seen["manifest"]) == (3, "trainer", "commit.json")


@pytest.mark.parametrize(
    ("told", "state", "why"),
    [
        ({"finite": False, "nonfinite": ["moments.3"]}, "bad", "nonfinite values in moments.3"),
        ({"finite": None}, "committed", "did not say whether"),
        ({"finite": None, "weights_finite": True}, "committed", "did not say whether"),
        (
            {"verification": {"weights_finite": True, "moments_finite": False}, "finite": True},
            "bad",
            "nonfinite",
        ),
        ({"quarantined": True}, "bad", "quarantine"),
    ],
)
def test_what_the_trainer_says_of_finiteness_counts(
    sources: Path, told: dict[str, Any], state: str, why: str
) -> None:
    found, seen = verified(world.on_disk(world.make_run(), sources, 900, state="committed", **told))
    assert found == state
    assert why in seen.get("failed", seen.get("cannot", ""))


def test_damage_is_found(sources: Path) -> None:
    checkpoint = world.on_disk(world.make_run(), sources, 900, state="committed")
    shard = sources / "step-00000900" / "shard-00002.bin"
    body = bytearray(shard.read_bytes())
    body[-1] ^= 0x10
    shard.write_bytes(body)
    state, seen = verified(checkpoint)
    assert state == "bad"
    assert "shard-00002.bin: its SHA-256 differs" in seen["failed"]


def test_a_missing_file_is_found(sources: Path) -> None:
    checkpoint = world.on_disk(world.make_run(), sources, 900, state="committed")
    (sources / "step-00000900" / "shard-00001.bin").unlink()
    assert verified(checkpoint)[0] == "bad"


def test_a_file_list_that_does_not_fit_its_digest_is_bad(sources: Path) -> None:
    checkpoint = world.on_disk(world.make_run(), sources, 900, state="committed")
    checkpoint.digest = "0" * 64
    checkpoint.save()
    assert "does not fit its digest" in verified(checkpoint)[1]["failed"]


def test_a_file_that_leaves_its_checkpoint_is_refused(sources: Path) -> None:
    (sources / "outside").write_bytes(b"x")
    table = [
        {
            "path": "../outside",
            "bytes": 1,
            "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881",
        }
    ]
    directory = sources / "step-1"
    directory.mkdir()
    state, seen = verified(world.commit(world.make_run(), 1, directory.as_uri(), table, state="committed"))
    assert state == "bad"
    assert "must lie inside" in seen["failed"]


def test_what_this_server_may_not_read_needs_the_trainers_word_that_it_read_it_back(
    tmp_path: Path, settings: LazySettings
) -> None:
    settings.SOURCE_ROOTS = []
    run = world.make_run()
    state, seen = verified(world.on_disk(run, tmp_path, 900, state="committed"))
    assert (state, "may not read" in seen["cannot"]) == ("committed", True)
    state, seen = verified(world.on_disk(run, tmp_path, 901, state="committed", read_back=True))
    assert (state, seen["digests_by"]) == ("verified", "trainer, who read the files back")


def test_a_link_out_of_the_roots_is_not_followed(sources: Path, tmp_path: Path) -> None:
    directory, table = world.write_checkpoint(tmp_path / "secret", 900)
    (sources / "step-900").symlink_to(directory)
    run = world.make_run()
    state, seen = verified(world.commit(run, 900, (sources / "step-900").as_uri(), table, state="committed"))
    assert (state, "may not read" in seen["cannot"]) == ("committed", True)


@pytest.mark.parametrize(
    ("norms", "state", "why"),
    [
        ({"weights": 104.0, "optimizer": 2.5}, "verified", ""),
        ({"weights": 1.1e6, "optimizer": 2.5}, "committed", "the norm of its weights is 1.1e+06, outside"),
        ({"weights": 104.0, "optimizer": 0.0}, "committed", "the norm of its optimizer is 0, outside"),
        ({"weights": None, "optimizer": 2.5, "ema": 9.0}, "verified", ""),
        ({}, "verified", ""),
        ("no object", "verified", ""),
    ],
)
def test_norms_outside_the_runs_band_are_not_called_verified(
    sources: Path, norms: Any, state: str, why: str
) -> None:
    run = world.make_run()
    for step in (600, 700, 800):
        known = world.on_disk(
            run, sources, step, state="committed", norms={"weights": 100.0, "optimizer": 2.0}
        )
        assert verified(known)[1]["norms_in_band"] is False, "too few before it make no band"
    found, seen = verified(world.on_disk(run, sources, 900, state="committed", norms=norms))
    assert found == state, seen
    assert why in seen.get("cannot", "")


def test_a_plan_made_while_its_checkpoint_is_verified_hears_of_it(sources: Path) -> None:
    """Neither the plan nor the verification saw the other: the checkpoint was then held minutes later."""
    run = world.make_run()
    checkpoint = world.on_disk(run, sources, 900, state="committed")
    with transaction.atomic():
        verify_checkpoints.ask(checkpoint)

    def work() -> None:
        run_due()
        connection.close()

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            dossier = world.open_dossier(run)
            verifying = pool.submit(work)
            assert wait_until(lambda: verifying.done() or _waits_for_us(), 30)
            checkpoint.refresh_from_db()
            assert checkpoint.state == "committed", "verified behind a plan that has read it as undecided"
        verifying.result(30)
    run_due()
    item = dossier.items.get(kind="last_good_checkpoint")
    assert item.source["checkpoint"] == checkpoint.pk
    assert item.held_at is not None


def _waits_for_us() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks"
            " WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
        )
        return bool(cursor.fetchone()[0])
