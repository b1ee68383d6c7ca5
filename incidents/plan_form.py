"""The form that changes a plan: what a person typed, read into what the action takes."""

import re
from typing import Any

from django.http import QueryDict

from incidents.models import Plan
from incidents.refused import Refused

# What a plan may declare, and whether it makes results incomparable unless the person says otherwise.
CHANGES = (
    ("lr", "learning rate", True),
    ("clip", "gradient clip", True),
    ("filter", "data filter", True),
    ("kernel", "kernel", True),
    ("image", "container image", False),
    ("world_size", "world size", True),
    ("global_batch", "global batch", True),
    ("layout", "parallel layout", False),
)
ROWS = 3  # changes at once; more is no smallest justified change
_SPLIT = re.compile(r"[,\s]+")


def read(given: QueryDict, excluded: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the arguments of `actions.change_plan`; what the form does not carry stays as it is.

    Args:
        excluded: what the plan in force leaves out; the form names nodes only.

    Raises:
        Refused: bad-plan: a number is none, or half a skip window was given.
    """
    read: dict[str, Any] = {
        "kind": given.get("kind") or None,
        "checkpoint_step": _number(given.get("checkpoint_step", ""), "checkpoint"),
        "why": given.get("why", "").strip(),
    }
    if given.get("kind") in (Plan.Kind.ROLLBACK_AND_SKIP, Plan.Kind.SKIP_AND_CONTINUE):
        read["skip_from"] = _number(given.get("skip_from", ""), "skip from")
        read["skip_to"] = _number(given.get("skip_to", ""), "skip to")
    if "nodes" in given:
        nodes = [one for one in _SPLIT.split(given.get("nodes", "").strip()) if one]
        read["exclusions"] = {**excluded, "nodes": nodes}
    if "change_what" in given:
        read["changes"] = changes(given)
    return read


def changes(given: QueryDict) -> list[dict[str, Any]]:
    """Return the declared changes, one for each row that names what is changed."""
    columns = [given.getlist(name) for name in ("change_what", "change_was", "change_to", "change_regime")]
    found = []
    for what, was, to, regime in zip(*columns, strict=False):
        if not what.strip():
            continue
        if not to.strip():
            raise Refused("bad-plan", f"{what}: say what it is changed to.", status=422)
        found.append(
            {
                "what": what.strip()[:100],
                "was": was.strip()[:200] or None,
                "to": to.strip()[:200],
                "changes_regime": regime != "no",
            }
        )
    return found


def _number(text: str, name: str) -> int | None:
    plain = text.replace(",", "").strip()
    if not plain:
        return None
    if not plain.isdecimal() or len(plain) > 18:
        raise Refused("bad-plan", f"{name}: “{plain[:30]}” is not a whole number.", status=422)
    return int(plain)
