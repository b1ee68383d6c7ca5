"""From freeze to sealed, on real files."""

from pathlib import Path

import pytest

from evidence.custody import verify_custody
from evidence.gates import resume_gate
from evidence.models import Seal, StoredObject
from evidence.queries import evidence_counts, last_good
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_dossier_goes_from_planned_to_sealed_and_its_chain_verifies(sources: Path, vault_dir: Path) -> None:
    run = world.make_run()
    for step in (700, 800, 900):
        world.on_disk(run, sources, step)
    for rank in range(4):
        log = sources / f"rank{rank}.log"
        log.write_text(f"step 1000 rank {rank}\nexport HF_TOKEN=hf_{'b' * 30}\n")
        world.post(run, "artifact.available", rank=rank, data={"kind": "rank_log", "uri": log.as_uri()})
    for step in range(990, 1001):
        world.post(
            run, "step", step, data={"loss": 2.5, "grad_norm": 0.3, "lr": 3e-4, "skipped": step == 1000}
        )
        world.post(run, "batch.seen", step, rank=3, data={"batch_ids": [step * 8]})
    dossier = world.open_dossier(run, margin=1)
    world.work(dossier)
    states = {item.name: (item.state, item.why) for item in dossier.items.all()}
    assert states["last good checkpoint, step 900"][0] == "sealed", states
    shown = dossier.custody.get(what="not applicable", item_name="first bad checkpoint")
    assert states["first bad checkpoint"] == (
        "not_applicable",
        f"contained before the update of step 1000: the update was skipped (custody row {shown.seq})",
    )
    assert shown.data["shown_by"] == {
        "step": 1000,
        "skipped_in": [{"type": "step", "post": "w-step-1000", "index": 0}],
    }
    required = {item.name: item.state for item in dossier.items.filter(required=True)}
    assert set(required.values()) == {"sealed", "not_applicable"}, states
    assert resume_gate(dossier).open
    assert verify_custody(dossier) == []
    good = last_good(dossier)
    assert good is not None
    assert good.step == 900
    counts = evidence_counts(dossier)
    assert counts["required"] == counts["held"] == counts["sealed"] == 7
    for stored in StoredObject.objects.filter(item__dossier=dossier):
        body = (vault_dir / "objects" / stored.key).read_bytes()
        assert b"hf_" not in body
    assert Seal.objects.filter(dossier=dossier).count() >= 7
