"""What the `data` of each known event type must be.

Called with `data` already cleaned (see `Cleaner`): nonfinite numbers are None with a flag.
"""

from collections.abc import Callable, Mapping
from typing import Any

from andon.wire_values import INT64_MAX, Cleaner, spelled_nonfinite

# Metrics of a step that are real numbers; a string spelling of a nonfinite value counts as one.
REAL_METRICS = frozenset({"loss", "grad_norm", "lr", "loss_scale", "step_time_s"})
COUNTS = frozenset({"tokens", "consumed_samples", "directive_seq"})

# What loggers write when they have no value. Megatron without a norm prints 0.000 on every line,
# pipeline stages without a loss print −1 (torchtitan), a missing scaler −1 (Megatron-DeepSpeed). A
# global gradient norm of exactly zero, and a negative loss of exactly −1, do not happen in training.
SENTINELS: dict[str, tuple[float, ...]] = {
    "loss": (-1.0,),
    "grad_norm": (0.0, -1.0),
    "loss_scale": (-1.0,),
}

Refuse = Callable[[str, str], Exception]
Ranks = Callable[[object, str], tuple[int, ...]]


def check_data(
    kind: str,
    data: dict[str, Any],
    cleaner: Cleaner,
    *,
    refuse: Refuse,
    ranks: Ranks,
    step: int | None,
    has_ranks: bool,
) -> None:
    """Check and normalise the data of one event in place; unknown types and keys are left alone.

    Raises:
        what `refuse(field, detail)` makes, at the first field that is wrong.
    """
    if kind == "step":
        _step(data, cleaner, refuse)
    elif kind == "action":
        _action(data, refuse, ranks, step, has_ranks)
    elif kind == "attempt.launched":
        _launched(data, refuse, ranks)
    elif kind == "directive.ack":
        if data.get("ranks") is not None:
            data["ranks"] = list(ranks(data["ranks"], "data.ranks"))
        if data.get("state") not in (None, "received", "held", "exited", "refused"):
            raise refuse("data.state", "must be received, held, exited or refused")
        if "seq" in data:
            data["seq"] = _count(data["seq"], "data.seq", refuse)
    else:
        for name in REAL_METRICS & data.keys():
            _nonfinite_text(name, data, cleaner)


def _nonfinite_text(name: str, data: dict[str, Any], cleaner: Cleaner) -> bool:
    flag = spelled_nonfinite(data[name])
    if flag is None:
        return False
    data[name] = None
    cleaner.flag(f"data.{name}", flag)
    return True


def _count(value: Any, field: str, refuse: Refuse) -> int:
    if type(value) is float and value.is_integer() and abs(value) <= 2**53:
        value = int(value)
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        raise refuse(field, "must be a whole number from 0 to 2^63−1")
    return value


def _step(data: dict[str, Any], cleaner: Cleaner, refuse: Refuse) -> None:
    for name, value in data.items():
        kind = type(value)
        if value is None:
            continue
        if name in REAL_METRICS:
            if kind is str and _nonfinite_text(name, data, cleaner):
                continue
            if kind is not float and kind is not int:
                raise refuse(f"data.{name}", "must be a number, or null when it was not measured")
            if value in SENTINELS.get(name, ()):
                data[name] = None
                cleaner.flag(f"data.{name}", "not_measured")
        elif name in COUNTS:
            if kind is str and _nonfinite_text(name, data, cleaner):
                continue
            data[name] = _count(value, f"data.{name}", refuse)
        elif name == "nonfinite":
            # True would read as bit 1, an origin; better refused than naming the wrong phase.
            if kind is float and value.is_integer():
                data[name] = int(value)
            if type(data[name]) is not int or not 0 <= data[name] <= 127:
                raise refuse("data.nonfinite", "must be a bit set from 0 to 127")
        elif name == "skipped":
            if kind is int and value in (0, 1):
                data[name] = bool(value)
            elif kind is not bool:
                raise refuse("data.skipped", "must be true or false")
        elif name == "view":
            if value not in ("local", "reduced"):
                raise refuse("data.view", 'must be "local" or "reduced"')
        elif kind is str:
            _nonfinite_text(name, data, cleaner)  # extra keys of a step are metrics too
    if "data.nonfinite" in cleaner.flags:
        raise refuse("data.nonfinite", "must be a bit set from 0 to 127")


def _launched(data: dict[str, Any], refuse: Refuse, ranks: Ranks) -> None:
    """Rank sets of nodes become lists of ints; each group kind becomes a list of rank lists."""
    if data.get("world_size") is not None:
        data["world_size"] = _count(data["world_size"], "data.world_size", refuse)
    nodes = data.get("nodes")
    if nodes is not None:
        if not isinstance(nodes, list):
            raise refuse("data.nodes", "must be a list of {node, ranks, gpu_uuids}")
        for position, node in enumerate(nodes):
            where = f"data.nodes[{position}]"
            if not isinstance(node, dict) or not isinstance(node.get("node"), str) or not node["node"]:
                raise refuse(f"{where}.node", "must be a non-empty string")
            if node.get("ranks") is not None:
                node["ranks"] = list(ranks(node["ranks"], f"{where}.ranks"))
            uuids = node.get("gpu_uuids")
            if uuids is not None and not (
                isinstance(uuids, list) and all(isinstance(uuid, str) for uuid in uuids)
            ):
                raise refuse(f"{where}.gpu_uuids", "must be a list of strings")
    groups = data.get("groups")
    if groups is not None:
        if not isinstance(groups, dict):
            raise refuse("data.groups", "must map dp, tp, pp, cp or ep to rank sets")
        for name, value in groups.items():
            field = f"data.groups.{name}"
            many = isinstance(value, list) and any(isinstance(item, list | str) for item in value)
            sets = value if many else [value]
            groups[name] = [
                list(ranks(one, f"{field}[{position}]" if many else field))
                for position, one in enumerate(sets)
            ]


_ACTION_NEEDS = ("step", "ranks", "loader_before", "loader_after", "checkpoint")


def _action(data: dict[str, Any], refuse: Refuse, ranks: Ranks, step: int | None, has_ranks: bool) -> None:
    """An automatic action is a ledger row: it names all of these, or says why it has none.

    The reasons stand in `data.reason_none`, an object from the missing field ("step", "ranks",
    "loader_before", "loader_after" or "loader" for both, "checkpoint") to a sentence.
    """
    if not isinstance(data.get("action"), str) or not data["action"]:
        raise refuse("data.action", "must name the action")
    if data.get("ranks") is not None:
        data["ranks"] = list(ranks(data["ranks"], "data.ranks"))
    if data.get("step") is not None:
        data["step"] = _count(data["step"], "data.step", refuse)
    reasons = data.get("reason_none")
    if reasons is None:
        reasons = {}
    if not isinstance(reasons, Mapping):
        raise refuse("data.reason_none", "must map a missing field to the reason why there is none")
    for name in _ACTION_NEEDS:
        value = data.get(name)
        if name == "step":
            present = step is not None or value is not None
        elif name == "ranks":
            present = has_ranks or value is not None
        else:
            present = value is not None and value not in ("", [], {}) and not isinstance(value, bool)
        reason = reasons.get(name) or (reasons.get("loader") if name.startswith("loader_") else None)
        if not present and not (isinstance(reason, str) and reason.strip()):
            field = "step" if name == "step" else f"data.{name}"
            raise refuse(field, f"missing: give it, or say in data.reason_none.{name} why there is none")
