"""Who entered the collective that did not end, and what its members disagree about.

The rank that reports a timeout is usually the victim: suspect is who never entered what the others
wait on. Dumps are those of PyTorch's flight recorder (torch/csrc/distributed/c10d/FlightRecorder.hpp),
one per rank; the rank is the sender's, it is not in the dump.
"""

import re
from collections import Counter
from typing import Any

from andon.diagnose.fact import Fact
from andon.diagnose.gather.hardware import error_text
from andon.diagnose.record import Posted, Record
from andon.wire_values import fold_ranks

_TIMEOUT = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
_FABRIC = re.compile(r"status=12\b|transport retry counter exceeded|ibv_poll_cq.*retry", re.I)
_ANY_SIZE = ("all_to_all", "alltoall", "gather", "scatter")  # uneven splits are legal there

Signature = tuple[str, str, str]  # name, sizes, type of one collective


def facts(record: Record) -> list[Fact]:
    """Return what flight-recorder dumps say; without any, what the watchdogs reported."""
    dumps = [event for event in record.of_type("flight_recorder.dump") if event.data.get("entries")]
    found = _dumps(dumps, _world(record)) if dumps else _watchdogs(record)
    for event in record.of_type("process.error"):
        if _FABRIC.search(error_text(event)):
            who = event.node or f"rank {event.rank}"
            text = f"{who}: {error_text(event).strip().splitlines()[0][:160]}"
            found.append(Fact(id=event.id, kind="fabric_error", text=text))
            break  # later ones are work flushed from the same broken queue pair
    return found


def _world(record: Record) -> set[int]:
    launch = record.launch
    return set(range(launch.world_size)) if launch is not None and launch.world_size else set()


def _watchdogs(record: Record) -> list[Fact]:
    stuck: dict[tuple[str, str], list[Posted]] = {}
    for event in record.of_type("process.error"):
        match = _TIMEOUT.search(error_text(event))
        if match and event.rank is not None:
            stuck.setdefault((match[1], match[2]), []).append(event)
    if not stuck:
        return []
    (number, name), reporters = min(stuck.items(), key=lambda item: int(item[0][0]))
    entered = {event.rank for event in reporters if event.rank is not None}
    what = f"{name.lower()} {int(number):,}"
    return _joined(reporters[0].id, what, entered, _world(record))


def _joined(row: str, what: str, entered: set[int], world: set[int]) -> list[Fact]:
    missing = sorted(world - entered)
    if missing and entered:
        text = (
            f"ranks {fold_ranks(sorted(entered))} wait in {what}, rank {fold_ranks(missing)} never entered it"
        )
        return [Fact(id=row, kind="rank_never_entered", text=text)]
    if world:
        return [Fact(id=row, kind="all_entered", text=f"all {len(world):,} ranks entered {what}")]
    return []


def _dumps(dumps: list[Posted], world: set[int]) -> list[Fact]:
    """Return the earliest collective, by its place in each rank's log, that its members did not share."""
    logs: dict[int, dict[str, list[dict[str, Any]]]] = {}
    rows: dict[int, str] = {}
    for event in dumps:
        if event.rank is None:
            continue
        rows[event.rank] = event.id
        for entry in event.data["entries"]:
            if isinstance(entry, dict) and not entry.get("is_p2p"):
                logs.setdefault(event.rank, {}).setdefault(_group(entry), []).append(entry)
    groups = sorted({group for log in logs.values() for group in log})
    for group in groups:
        told = {rank: log.get(group, []) for rank, log in logs.items() if group in log or len(groups) == 1}
        found = _mismatch(told, rows) or _behind(told, rows, world if len(groups) == 1 else set(told))
        if found:
            return found
    return []


def _group(entry: dict[str, Any]) -> str:
    named = entry.get("process_group")
    return str(named[0]) if isinstance(named, list) and named else str(entry.get("pg_id", "0"))


def _mismatch(told: dict[int, list[dict[str, Any]]], rows: dict[int, str]) -> list[Fact]:
    for place in range(min((len(log) for log in told.values()), default=0)):
        signatures = {rank: _signature(log[place]) for rank, log in told.items()}
        if len(set(signatures.values())) < 2:
            continue
        # The majority is right about what was meant; of two, neither is.
        usual, _ = Counter(signatures.values()).most_common(1)[0]
        odd = min((rank for rank, one in signatures.items() if one != usual), default=min(signatures))
        other = min(rank for rank, one in signatures.items() if one == usual)
        text = f"record {place}: rank {odd} {_words(signatures[odd])}, rank {other} {_words(usual)}"
        return [Fact(id=rows[odd], kind="collective_mismatch", text=text)]
    return []


def _signature(entry: dict[str, Any]) -> Signature:
    name = str(entry.get("profiling_name", ""))
    free = any(word in name.lower() and "all_gather" not in name.lower() for word in _ANY_SIZE)
    return name, "" if free else str(entry.get("input_sizes")), str(entry.get("input_dtypes") or "")


def _words(signature: Signature) -> str:
    return f"{signature[0]} {signature[1]}".strip()


def _behind(told: dict[int, list[dict[str, Any]]], rows: dict[int, str], world: set[int]) -> list[Fact]:
    last = {rank: max((_number(entry) for entry in log), default=-1) for rank, log in told.items()}
    front = max(last.values(), default=-1)
    ahead = {rank for rank, number in last.items() if number == front}
    stuck = next((log[-1] for rank, log in told.items() if rank in ahead and log), None)
    if stuck is None or str(stuck.get("state")) == "completed":
        return []
    missing = world - ahead if world else set(told) - ahead
    what = f"{stuck.get('profiling_name', 'a collective')} {front:,}"
    return _joined(rows[min(ahead)], what, ahead, ahead | missing)


def _number(entry: dict[str, Any]) -> int:
    try:
        return int(entry.get("collective_seq_id", -1))
    except (TypeError, ValueError):
        return -1
