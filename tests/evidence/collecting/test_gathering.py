"""What goes into each item: masked, whole or only the end, and said when there is nothing."""

import gzip
import json
import os
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from andon.signing import new_secret, sign_webhook
from evidence.actions import open_dossier
from evidence.collecting.gathering import LOG_TAIL_BYTES
from evidence.models import Dossier, Item
from evidence.queries import visible_dossiers
from evidence.refused import Refused
from evidence.vault import vault
from runs.models import Attempt, Finding, FirstBad, Frame, Run, RunSecret
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)


def bytes_of(item: Item, path: str) -> bytes:
    stored = item.stored_objects.get(path=path)
    return vault().open(stored.key, stored.version_id).read()


def rows_of(item: Item, path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in bytes_of(item, path).splitlines()]


def collected(run: Run, kind: str, b: int | None = 1000) -> Item:
    dossier = world.open_dossier(run, b=b, rules=world.policy(kind))
    world.work(dossier)
    return dossier.items.get()


def offer(run: Run, path: Path, kind: str, **more: Any) -> None:
    world.post(run, "artifact.available", data={"kind": kind, "uri": path.as_uri()} | more)


def test_logs_of_suspects_and_their_node_are_whole_of_others_the_end(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    FirstBad.objects.create(
        run=run,
        attempt=1,
        stream="rank",
        lane="3",
        rank=-1,
        step=1000,
        phase=1,
        view="local",
        received_at=timezone.now(),
    )
    line = b"step 1 loss 2.5 " + b"." * 100 + b"\n"
    for rank in range(4):
        log = sources / f"rank{rank}.log"
        log.write_bytes(line * 5000 + b"the end HF_TOKEN=hf_" + b"q" * 34 + b"\n")
        offer(run, log, "rank_log", rank=rank)
    item = collected(run, "rank_logs")
    assert item.state == "sealed", item.why
    size = len(line) * 5000
    for rank in range(4):
        kept = bytes_of(item, f"rank-{rank:05d}/rank{rank}.log")
        assert kept.endswith(b"the end HF_TOKEN=[masked]\n")
        if rank in {2, 3}:  # the first bad rank and its neighbour on node n1
            assert len(kept) > size
        else:
            assert kept.startswith(b"[the last ")
            assert len(kept) < LOG_TAIL_BYTES + 100


@pytest.mark.parametrize("required", [True, False])
def test_logs_outside_the_roots_wait_for_an_agent_and_are_missing_at_the_deadline(
    sources: Path, vault_dir: Path, tmp_path: Path, alarms: list[tuple[str, str]], required: bool
) -> None:
    run = world.make_run()
    (tmp_path / "passwd").write_text("x")
    offer(run, tmp_path / "passwd", "rank_log", rank=0)
    item = collected(run, "rank_logs")
    assert item.silent_since is not None
    assert "none of ANDON_SOURCE_ROOTS" in item.why
    assert "run `andon agent` there" in item.why
    assert alarms == []
    Item.objects.update(deadline=timezone.now(), required=required)
    world.work(item.dossier)
    item.refresh_from_db()
    assert [what for what, _ in alarms] == (["deadline passed"] if required else [])
    assert (item.state, "none of ANDON_SOURCE_ROOTS" in item.why) == ("missing", True)
    assert not item.stored_objects.exists()


def test_no_logs_offered_is_missing_once_the_attempt_ended(vault_dir: Path) -> None:
    run = world.make_run()
    dossier = world.open_dossier(run, rules=world.policy("rank_logs"))
    world.work(dossier)
    assert dossier.items.get().state == "planned"
    Attempt.objects.update(exited_at=timezone.now())
    world.work(dossier)
    item = dossier.items.get()
    assert item.state == "missing"
    assert item.why == "no rank log was offered (artifact.available, kind rank_log); attempt 1 exited"


def test_the_event_log_holds_the_window_the_turning_points_and_nonfinite_flags(vault_dir: Path) -> None:
    run = world.make_run()
    world.post(run, "run.started", 0, data={"env": {"WANDB_API_KEY": "s3cr3t-value"}})
    for step in (1, 871, 872, 1000, 1128, 1129):
        world.post(
            run,
            "step",
            step,
            data={"loss": None if step == 1000 else 2.5},
            flags={"loss": "nan"} if step == 1000 else {},
        )
    world.post(run, "heartbeat", None, rank=1)
    world.post(run, "step", 1000, attempt=2, data={"loss": 1.0})
    rows = rows_of(collected(run, "event_log"), "events.ndjson")
    assert [row["step"] for row in rows if row["type"] == "step"] == [872, 1000, 1128]
    assert {row["type"] for row in rows} == {"run.started", "step", "heartbeat"}
    bad = next(row for row in rows if row["step"] == 1000)
    assert (bad["data"]["loss"], bad["flags"]) == (None, {"loss": "nan"})
    assert rows[0]["data"]["env"] == {"WANDB_API_KEY": "[masked]"}


def test_norms_are_frames_exactly_as_posted(vault_dir: Path) -> None:
    run = world.make_run()
    bodies = [os.urandom(100), os.urandom(50), os.urandom(10)]
    for number, (stream, step, body) in enumerate(
        zip(("rank", "layer", "node"), (900, 1000, 1000), bodies, strict=True)
    ):
        Frame.objects.create(
            received_at=timezone.now(),
            run_id=run.pk,
            attempt=1,
            stream=stream,
            node="n0",
            content_type="application/vnd.apache.arrow.stream",
            body=body,
            step_first=step,
            step_last=step + 1,
            rows=1,
            webhook_id=f"f{number}",
        )
    item = collected(run, "norms")
    whole, index = bytes_of(item, "frames.bin"), rows_of(item, "frames.ndjson")
    assert [whole[row["offset"] : row["offset"] + row["bytes"]] for row in index] == bodies[:2]
    assert [row["stream"] for row in index] == ["rank", "layer"]
    hardware = collected(run, "hardware_records")
    assert bytes_of(hardware, "frames.bin") == bodies[2]


def test_schedule_batches_and_topology_come_from_what_was_posted(vault_dir: Path) -> None:
    run = world.make_run()
    world.post(run, "step", 1000, data={"lr": 3e-4, "loss": 2.0})
    world.post(run, "step", 1001, data={"loss": 2.0})
    world.post(run, "batch.seen", 1000, rank=2, data={"batch_ids": [8000], "fingerprints": ["ab"]})
    assert [row["data"]["lr"] for row in rows_of(collected(run, "schedule"), "schedule.ndjson")] == [3e-4]
    assert rows_of(collected(run, "batch_ids"), "batches.ndjson")[0]["data"]["batch_ids"] == [8000]
    topology = json.loads(bytes_of(collected(run, "topology"), "topology.json"))
    assert (topology["world_size"], topology["nodes"][1]["ranks"]) == (4, [2, 3])
    facts = json.loads(bytes_of(collected(run, "environment"), "environment.json"))
    assert facts["told"]["env"] == {"HF_TOKEN": "[masked]"}


@pytest.mark.parametrize(
    ("kind", "state", "why"),
    [
        ("schedule", "missing", "no learning rate"),
        ("batch_ids", "missing", "no batch.seen"),
        ("norms", "missing", "no loss, norm or frame"),
        ("event_log", "missing", "no event of the window"),
        ("hardware_records", "not_applicable", "nodes without GPUs"),
        ("first_bad_checkpoint", "planned", "none of step 1000 or later"),
        ("a_new_kind", "missing", "does not know how to collect 'a_new_kind'"),
    ],
)
def test_what_nobody_posted_is_said(vault_dir: Path, kind: str, state: str, why: str) -> None:
    item = collected(world.make_run(), kind)
    assert (item.state, why in item.why) == (state, True), item.why


def test_a_snapshot_that_the_trainer_offers_is_kept_as_it_is(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    directory, table = world.write_checkpoint(sources / "snapshot", 999)
    offer(run, directory, "halt_snapshot")
    item = collected(run, "halt_snapshot")
    assert item.state == "sealed", item.why
    kept = {one.path: one.sha256 for one in item.stored_objects.all()}
    assert {entry["path"]: entry["sha256"] for entry in table}.items() <= kept.items()


def test_a_dossier_can_be_opened_by_hand(vault_dir: Path, bob: Any, charlie: Any) -> None:
    run = world.make_run()
    with pytest.raises(Refused):
        open_dossier(run=run, person=charlie, why="let me")
    dossier = open_dossier(run=run, person=bob, why="keep the end of the run")
    assert isinstance(dossier, Dossier)
    assert not Finding.objects.exists()
    row = dossier.custody.get(seq=1)
    assert (row.what, row.who) == ("opened", str(bob.opaque_id))
    assert list(visible_dossiers(bob)) == [dossier]
    assert not visible_dossiers(charlie).exists()


class TestDeletions:
    """POST /api/v1/runs/{run}/deletions."""

    def post(self, run: Run, body: bytes, client: Client) -> Any:
        secret = new_secret()
        RunSecret.objects.create(run=run, secret=secret)
        stamp = int(timezone.now().timestamp())
        return client.post(
            f"/api/v1/runs/{urllib.parse.quote(run.slug)}/deletions",
            body,
            content_type="application/json",
            headers={
                "webhook-id": "d-1",
                "webhook-timestamp": str(stamp),
                "webhook-signature": sign_webhook(secret, "d-1", stamp, body),
            },
        )

    def test_it_answers_in_the_order_asked(self, client: Client) -> None:
        run = world.make_run()
        world.commit(run, 900, "s3://ckpt/step-900", [])
        dossier = world.open_dossier(run)
        body = json.dumps({"uris": ["s3://ckpt/step-100", "s3://ckpt/step-900/", "relative"]}).encode()
        answer = self.post(run, body, client)
        assert answer.status_code == 200, answer.content
        items = answer.json()["items"]
        assert [item["allow"] for item in items] == [True, False, False]
        assert items[0]["until"].endswith("Z")
        assert items[1]["dossier"] == str(dossier.pk)
        assert items[1]["uri"] == "s3://ckpt/step-900/"

    @pytest.mark.parametrize(
        ("body", "status", "field"),
        [
            (b"", 400, None),
            (b"{", 400, None),
            (b"[" * 100_000, 400, None),
            (b"{}", 422, "uris"),
            (b'{"uris": [1]}', 422, "uris[0]"),
            (b'{"uris": "x"}', 422, "uris"),
            (b'{"uris": ["/a\\u0000b", "\\ud800"]}', 200, None),
        ],
    )
    def test_bad_input_is_a_problem_that_names_the_field(
        self, body: bytes, status: int, field: str | None, client: Client
    ) -> None:
        answer = self.post(world.make_run(), body, client)
        assert answer.status_code == status, answer.content
        if status != 200:
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.json().get("field") == field
        else:
            assert [item["uri"] for item in answer.json()["items"]] == ["/a\ufffdb", "\ufffd"]

    def test_a_body_that_is_too_large_is_413(self, client: Client) -> None:
        assert self.post(world.make_run(), gzip.compress(b"x") * (1 << 18), client).status_code == 413
