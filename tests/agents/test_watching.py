"""An agent that watches a node, beside a real server: no change to the trainer, and killed in between."""

import re
from pathlib import Path

import pytest

from runs.models import Directive, Event
from tests.agents.beside import Node, work_until

pytestmark = pytest.mark.django_db(transaction=True)

CASES = Path(__file__).resolve().parents[1] / "cases"


def test_a_nan_in_a_log_holds_the_run_and_a_killed_agent_repeats_nothing(node: Node, vault_dir: Path) -> None:
    # Without its times: what happened months ago is backfill, and holds nothing.
    text = re.sub(r"\[2026-03-04 [^\]]*\] ", "", (CASES / "logs" / "megatron.log").read_text())
    lines = text.splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if "nan |" in line)
    log = node.disk / "rank7.log"
    log.write_text("".join(lines[:at]))
    watch = ("--log", str(node.disk / "rank*.log"), "--kernel-log", str(node.disk / "kern.log"))
    node.agent(*watch)

    def steps() -> list[int]:
        rows = Event.objects.filter(run_id=node.run.pk, type="step").order_by("received_at", "step")
        return [step for step in rows.values_list("step", flat=True) if step is not None]

    def is_held() -> bool:
        return Directive.objects.filter(run=node.run, kind="hold").exists()

    work_until(lambda: len(steps()) == 4)  # three of training, one of the evaluation
    assert not is_held()
    node.kill()
    with log.open("a") as file:
        file.writelines(lines[at : at + 2])
    (node.disk / "kern.log").write_text((CASES / "hardware" / "kernel.log").read_text())
    node.agent(*watch)
    work_until(is_held)
    work_until(lambda: Event.objects.filter(run_id=node.run.pk, type="hardware.xid").count() == 8)
    assert sorted(steps()) == [10, 20, 20, 30, 40, 50]
    offered = Event.objects.get(run_id=node.run.pk, type="artifact.available")
    assert offered.data["uri"] == log.as_uri()
