"""Every kind of evidence has a source, an order and a sentence for when nobody has it."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from andon.policy import DEFAULT_EVIDENCE, EvidenceRule, Policy, decode
from evidence.collecting.gathering import GATHERERS, NOTHING
from evidence.gates import resume_gate
from evidence.kinds import ARTIFACT_KINDS, CHECKPOINT_KINDS, KINDS, OFFERED_KINDS, VIEW_KINDS, WINDOW_KINDS
from evidence.models import Dossier, Item
from evidence.plan import reconsider
from evidence.vault import vault
from runs.locks import lock_run
from runs.models import Attempt, Run
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)


def test_every_kind_is_asked_for_by_default_except_raw_samples() -> None:
    asked = [rule.kind for rule in DEFAULT_EVIDENCE]
    assert len(asked) == len(set(asked))
    assert set(KINDS) - set(asked) == {"raw_samples"}
    assert set(asked) <= set(KINDS)


def test_every_kind_has_a_source_and_a_sentence_for_nothing() -> None:
    for kind, about in KINDS.items():
        stored = kind in CHECKPOINT_KINDS - {"halt_snapshot"}
        assert (about.source == "stored") == stored
        assert stored or kind in GATHERERS or kind in OFFERED_KINDS, kind
        assert stored or kind in VIEW_KINDS or kind in NOTHING, kind
    assert set(ARTIFACT_KINDS.values()) | VIEW_KINDS | WINDOW_KINDS <= set(KINDS)
    assert set(ARTIFACT_KINDS.values()) >= OFFERED_KINDS


def test_items_stand_in_order_of_volatility() -> None:
    dossier = world.open_dossier(world.make_run(), rules=Policy())
    orders = [item.order for item in dossier.items.all()]
    assert orders == sorted(orders)
    first = {item.kind for item in dossier.items.all() if item.order == 1}
    assert first == {"halt_snapshot", "flight_recorder", "batch_ids", "batch_statistics"}
    assert KINDS["rank_logs"].order < KINDS["hardware_records"].order < KINDS["last_good_checkpoint"].order


def collected(run: Run, *kinds: str, **more: Any) -> Dossier:
    dossier = world.open_dossier(run, rules=world.policy(*kinds), **more)
    world.work(dossier)
    return dossier


def item_of(dossier: Dossier, kind: str) -> Item:
    return dossier.items.filter(kind=kind).latest("id")


def document(item: Item) -> Any:
    one = item.stored_objects.get()
    return json.loads(vault().open(one.key, one.version_id).read())


PARTS = {
    "weights": ["shard-00000.bin"],
    "optimizer": ["shard-00001.bin"],
    "rng": ["shard-00002.bin"],
    "rng.model-parallel": {"rng_tracker_states": "shard-00002.bin"},
    "dataloader": ["shard-00002.bin"],
}


def test_parts_of_the_last_good_checkpoint_are_views_and_not_copies(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    checkpoint = world.on_disk(run, sources, 900, parts=PARTS)
    dossier = collected(run, "last_good_checkpoint", *VIEW_KINDS)
    optimizer = item_of(dossier, "optimizer_state")
    assert optimizer.state == "sealed", optimizer.why
    seen = document(optimizer)
    assert seen["of"]["digest"] == checkpoint.digest
    assert seen["parts"] == {"optimizer": ["shard-00001.bin"]}
    assert [row["sha256"] for row in seen["files"]] == [checkpoint.files[1]["sha256"]]
    assert optimizer.bytes_total is not None
    assert optimizer.bytes_total < 2000, "names and digests, not the bytes"
    assert set(document(item_of(dossier, "rng_state"))["parts"]) == {"rng", "rng.model-parallel"}
    loader = document(item_of(dossier, "loader_state"))
    assert loader["positions"]["loader_position"] == 7200
    router = item_of(dossier, "router_state")
    assert router.state == "not_applicable"
    assert "the commit of step 900 has no such part; it names dataloader, optimizer" in router.why


def test_without_named_parts_or_without_a_checkpoint_a_view_is_missing(
    sources: Path, vault_dir: Path
) -> None:
    run = world.make_run()
    dossier = collected(run, "last_good_checkpoint", "rng_state")
    assert item_of(dossier, "rng_state").why.startswith(
        "there is no last good checkpoint to view: no verified"
    )
    world.on_disk(run, sources, 900)
    dossier = collected(run, "last_good_checkpoint", "rng_state")
    assert item_of(dossier, "rng_state").state == "missing"
    assert item_of(dossier, "rng_state").why == (
        "the commit of step 900 names no parts (checkpoint.committed, data.parts)"
    )


def test_another_last_good_checkpoint_is_viewed_anew(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    for step in (800, 900):
        world.on_disk(run, sources, step, parts=PARTS)
    dossier = collected(run, "last_good_checkpoint", "optimizer_state")
    with transaction.atomic():
        lock_run(run.pk)
        reconsider(dossier, first_bad_step=850)
    world.work(dossier)
    views = dossier.items.filter(kind="optimizer_state").order_by("id")
    assert [document(item)["of"]["step"] for item in views] == [900, 800]


@pytest.mark.parametrize(
    ("kind", "event", "data", "told"),
    [
        (
            "batch_statistics",
            "batch.seen",
            {"batch_ids": [8], "lengths": [512, 80], "mask_density": [0.9], "domain": "web"},
            {"lengths": [512, 80], "mask_density": [0.9], "domain": "web"},
        ),
        (
            "data_shards",
            "batch.seen",
            {"dataset_version": "web3-2041", "file": "web3-00017.bin", "offset": 4096, "lengths": [1]},
            {"dataset_version": "web3-2041", "file": "web3-00017.bin", "offset": 4096},
        ),
        (
            "mixture",
            "loader.position",
            {"mixture": {"web": "0.7", "code": "0.3"}, "loader_position": 8},
            {"mixture": {"web": "0.7", "code": "0.3"}},
        ),
    ],
)
def test_what_was_read_is_kept_by_step_and_rank(
    vault_dir: Path, kind: str, event: str, data: dict[str, Any], told: dict[str, Any]
) -> None:
    run = world.make_run()
    world.post(run, event, 1000, rank=2, data=data)
    world.post(run, event, 3000, rank=2, data=data)  # outside the window
    item = item_of(collected(run, kind), kind)
    assert item.state == "sealed", item.why
    line = document(item)
    assert (line["step"], line["rank"], line["told"]) == (1000, 2, told)


def test_tokenizer_and_packing_are_what_the_launch_told(vault_dir: Path) -> None:
    run = world.make_run()
    Attempt.objects.update(data={"tokenizer": "llama-3", "packing_version": "2", "config": {"lr": "3e-4"}})
    item = item_of(collected(run, "tokenizer"), "tokenizer")
    assert document(item)["told"] == {"tokenizer": "llama-3", "packing_version": "2"}


def test_stacks_and_dumps_are_kept_with_what_ranks_told(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    stack = sources / "rank-2.stack"
    stack.write_text("Thread 0x7f: allreduce\nexport HF_TOKEN=hf_" + "c" * 30 + "\n")
    world.post(run, "flight_recorder.dump", 1000, rank=2, data={"collective_seq": 41})
    world.post(run, "artifact.available", rank=2, data={"kind": "stacks", "uri": stack.as_uri()})
    item = item_of(collected(run, "flight_recorder"), "flight_recorder")
    assert item.state == "sealed", item.why
    kept = {one.path: vault().open(one.key, one.version_id).read() for one in item.stored_objects.all()}
    assert set(kept) == {"flight_recorder.ndjson", "rank-00002/rank-2.stack"}
    assert b"hf_ccc" not in kept["rank-00002/rank-2.stack"]


def test_what_no_trainer_tells_is_missing_with_a_sentence_and_leaves_the_gate_open(
    sources: Path, vault_dir: Path
) -> None:
    run = world.make_run()
    Attempt.objects.update(exited_at=timezone.now())
    optional = {rule.kind for rule in DEFAULT_EVIDENCE if not rule.required}
    rules = Policy(evidence=tuple(rule for rule in DEFAULT_EVIDENCE if not rule.required))
    dossier = world.open_dossier(run, rules=rules)
    world.work(dossier)
    items = {item.kind: item for item in dossier.items.all()}
    assert set(items) == optional
    told = {"code_and_config", "environment"}
    for kind in optional - told:
        assert items[kind].state in {"missing", "not_applicable"}, kind
        assert len(items[kind].why) > 15, kind
    assert resume_gate(dossier).open


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "batch_ids", "lock": "compliance"},
        {"kind": "rank_logs", "lock": "compliance"},
        {"kind": "norms", "retain_days": 0},
        {"kind": "norms", "retain_days": 40_000},
        {"kind": "norms", "lock": "forever"},
        {"kind": "norms", "keep": True},
    ],
)
def test_a_freeze_plan_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"norms|batch_ids|rank_logs|evidence"):
        decode({"evidence": [wrong]})


def test_a_freeze_plan_is_data_of_the_run(vault_dir: Path) -> None:
    rules = decode({"evidence": [{"kind": "norms", "required": False, "retain_days": 7, "deadline_s": 60}]})
    assert rules.evidence == (EvidenceRule("norms", required=False, retain_days=7, deadline_s=60),)
    dossier = world.open_dossier(world.make_run(), rules=rules)
    item = dossier.items.get()
    assert (item.required, item.retain_days) == (False, 7)
    assert item.retain_until is not None
    assert (item.retain_until - dossier.opened_at).days in {6, 7}
    assert dossier.plan["policy_digest"] == rules.digest()
