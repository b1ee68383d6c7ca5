"""Secrets are pushed through everything that freezes text; none of them reaches the store or a bag."""

import json
from pathlib import Path

import pytest

from evidence.models import CustodyRow, Item
from evidence.proof.exporting import export_bag
from runs.models import Attempt
from tests import secrets
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)
KINDS = (
    "environment",
    "code_and_config",
    "event_log",
    "topology",
    "rank_logs",
    "hardware_records",
    "schedule",
)


def test_no_secret_of_the_corpus_reaches_the_store(sources: Path, vault_dir: Path, tmp_path: Path) -> None:
    texts, ordinary = secrets.texts(), secrets.ordinary()
    launch, launched = secrets.launch()
    log = sources / "rank-0.log"
    log.write_text(
        "".join(f"{plain}\n{case.text}\n" for plain, case in zip(ordinary * 9, texts, strict=False))
    )
    run = world.make_run()
    Attempt.objects.filter(run=run).update(data=launch)
    world.post(run, "run.started", data={**launch, "message": [case.text for case in texts]})
    world.post(run, "attempt.launched", data={"data": launch})
    for number, case in enumerate(texts):
        world.post(
            run, "step", 990 + number % 20, data={"lr": 3e-4, "note": case.text}, webhook_id=f"n-{number}"
        )
        world.post(run, "hardware.xid", data={"detail": case.text}, webhook_id=f"x-{number}")
    world.post(run, "step", 1000, data={"loss": None, "skipped": True}, flags={"data.loss": "nan"})
    offer = {"kind": "rank_log", "uri": log.as_uri(), "rank": 0, "bytes": log.stat().st_size}
    world.post(run, "artifact.available", data=offer)
    dossier = world.open_dossier(run, rules=world.policy(*KINDS))
    world.work(dossier, rounds=8)
    states = dict(Item.objects.filter(dossier=dossier).values_list("kind", "state"))
    assert states == dict.fromkeys(KINDS, "sealed")
    export_bag(dossier, tmp_path / "bag")
    kept = [path for root in (vault_dir, tmp_path / "bag") for path in root.rglob("*") if path.is_file()]
    everything = b"\0".join(path.read_bytes() for path in kept).decode("utf-8", "replace")
    everything += json.dumps(list(CustodyRow.objects.values_list("item_name", "data")))
    for case in (*texts, launched):
        spelled = [one for secret in case.secrets for one in (secret, json.dumps(secret)[1:-1])]
        assert [secret for secret in spelled if len(secret) > 6 and secret in everything] == [], case.name
    # And what explains the failure is there still.
    kept_log = next(path for path in kept if path.name == "rank-0.log").read_text()
    assert all(plain in kept_log for plain in ordinary)
    assert launch["config"]["revision"] in everything
    assert launch["environment"]["image"] in everything


def test_the_end_of_a_log_does_not_begin_with_half_a_secret(sources: Path, vault_dir: Path) -> None:
    from evidence.collecting.gathering import LOG_TAIL_BYTES

    run = world.make_run()
    secret = "hf_" + "q" * 200 + "z9" * 50
    end = b"step: 1\n" * ((LOG_TAIL_BYTES - 100) // 8)
    log = sources / "rank-3.log"
    log.write_bytes(b"-" * 5000 + b"\nuse " + secret.encode() + b" now\n" + end)
    world.post(
        run, "artifact.available", data={"kind": "rank_log", "uri": log.as_uri(), "rank": 3, "bytes": 1}
    )
    dossier = world.open_dossier(run, rules=world.policy("rank_logs"))
    world.work(dossier, rounds=8)
    stored = dossier.items.get().stored_objects.get()
    body = (vault_dir / "objects" / stored.key).read_bytes()
    assert b"z9z9" not in body
    assert body.endswith(b"step: 1\n")
