"""What was recorded of the machines of the first bad ranks: the number of the Xid belongs beside the rank."""

from collections.abc import Sequence
from typing import Any

from andon.diagnose.devices import ecc, is_fault, xid
from incidents.launched import Place
from runs import formatting as words
from runs.models import NodeEvent

_KINDS = ("xid", "ecc", "link")
_READ = 200  # newest; a storm of one fault is one fault
_SHOWN = 2


def of_places(run_id: int, attempt: int, where: Sequence[Place]) -> str:
    """Return "Xid 48 on node-02 at step 76: double-bit ECC error."; "" where no fault was recorded.

    Args:
        where: the nodes of the first bad ranks.
    """
    nodes = [place.node for place in where]
    if not nodes:
        return ""
    rows = NodeEvent.objects.filter(run_id=run_id, attempt=attempt, node__in=nodes, kind__in=_KINDS)
    said: list[str] = []
    for node, kind, step, data in rows.order_by("-occurred_at", "-pk").values_list(
        "node", "kind", "step", "data"
    )[:_READ]:
        if is_fault(f"hardware.{kind}", data):
            line = _says(node, kind, step, data)
            if line not in said:
                said.append(line)
    more = f"; {words.plural(len(said) - _SHOWN, 'more fault')}" if len(said) > _SHOWN else ""
    return f"{'; '.join(said[:_SHOWN])}{more}." if said else ""


def _says(node: str, kind: str, step: int | None, data: dict[str, Any]) -> str:
    where = f"on {words.inert(node, 48)}" + (f" at step {words.count(step)}" if step is not None else "")
    if kind == "xid":
        code, _, meaning = xid(data)
        return f"Xid {code} {where}: {meaning}" if code is not None else f"an Xid without a code {where}"
    if kind == "ecc":
        uncorrected, _ = ecc(data)
        many = (
            words.plural(uncorrected, "uncorrected ECC error")
            if uncorrected
            else "ECC errors, count not told"
        )
        return f"{many} {where}"
    return f"a link fault {where}"
