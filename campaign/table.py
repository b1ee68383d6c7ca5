"""The table: every fault with what must be said of it, and the clean controls. The same in every run.

Steps, places and bits are drawn from the case's own name, so that a case that is added moves no other.
"""

import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from campaign.broken import stopped
from campaign.cases import EPOCH, FIRST, INTERVAL, MICRO_BATCHES, RANKS, TOPOLOGIES, Case, Expect
from campaign.injecting import SPIKE_STEPS, overlong_rank

CHECK = FIRST + INTERVAL  # the step after which replicas and twins are compared
EVERYONE = tuple(range(RANKS))

LATE_STATE = (
    f"moments are read every {INTERVAL} steps: between two readings one update applies them, "
    "and the next forward shows it"
)
WEIGHT = "a weight that goes bad in an update is seen by the next forward"
WEIGHT_OF_A_SLICE = (
    f"{WEIGHT}, under FSDP2 by that of all ranks: the one whose own slice is nonfinite is named"
)
NO_REPLICA = "under FSDP2 each rank holds a slice of its own: no replica exists to compare it with"
ROUNDING = "one error of the size of a rounding, once: it is gone with the step, and no value shows it"
TIE = "two replicas have no majority: both are named, and it says so"


def faults() -> list[Case]:
    """Return every fault of live ranks, topology by topology."""
    found = [case for topology in TOPOLOGIES for case in _of(topology)]
    assert len({case.name for case in found}) == len(found)
    return found


def controls() -> list[Case]:
    """Return the clean controls."""
    return [case for topology in TOPOLOGIES for case in _clean(topology)]


def all_cases() -> list[Case]:
    """Return everything: faults, controls, and the runs that end with a process."""
    return [*faults(), *controls(), *stopped()]


def _draw(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def _of(topology: str) -> Iterator[Case]:
    yield from _nonfinite(topology)
    yield from _state(topology)
    yield from _losses(topology)
    yield from _flips(topology)
    yield from _slow(topology)
    yield from _data(topology)
    yield from _restores(topology)
    yield from _dead(topology)
    if topology == "scaler":
        yield from _scaler()


def _with_loss(topology: str) -> tuple[int, ...]:
    return (2, 3) if topology == "pipeline" else EVERYONE


def _with_data(topology: str) -> tuple[int, ...]:
    return (0, 1) if topology == "pipeline" else EVERYONE


def _nonfinite(topology: str) -> Iterator[Case]:
    """NaN and Inf per phase and rank: one step is dropped on all ranks, and the rank is named."""
    phases = {"data": "data", "forward": "forward", "loss": "forward", "backward": "backward"}
    ranks = {"data": _with_data(topology), "loss": _with_loss(topology)}
    for place, phase in phases.items():
        for rank in ranks.get(place, EVERYONE):
            for value in ("nan", "inf"):
                name = f"{topology}: {value} in {place} on rank {rank}"
                draw = _draw(name)
                step = FIRST + 1 + int(draw.integers(5))
                micro = int(draw.integers(MICRO_BATCHES.get(topology, 1)))
                lasting = place == "data" or bool(draw.integers(4))
                # Which micro-batch a gradient went bad in shows when the step is run again.
                told = micro if topology in MICRO_BATCHES and lasting else None
                expect = Expect(
                    "first_bad", step, step, (rank,), phase, told, skips=(step,), bad_steps=(step,)
                )
                yield Case(
                    name,
                    topology,
                    f"{place}, {value}",
                    place,
                    rank,
                    step,
                    step + 2,
                    value,
                    micro,
                    lasting=lasting,
                    expect=expect,
                )
    for rank in EVERYONE:
        name = f"{topology}: a reduced gradient on rank {rank}"
        draw = _draw(name)
        step = FIRST + 1 + int(draw.integers(5))
        value = ("nan", "inf")[rank % 2]
        expect = Expect("first_bad", step, step, (), "reduce", skips=(step,), bad_steps=(step,))
        yield Case(name, topology, "reduced gradient", "reduced", rank, step, step + 2, value, expect=expect)


def _state(topology: str) -> Iterator[Case]:
    """Weights and moments that go bad in an update: nothing is applied on top, and all stop."""
    for rank in EVERYONE:
        name = f"{topology}: a weight on rank {rank}"
        draw = _draw(name)
        step = (FIRST + 1, FIRST + 2, FIRST + 4, CHECK)[(rank + len(topology)) % 4]
        halt = step + (1 if step == CHECK else 2)
        skips = () if step == CHECK else (step + 1,)
        value = ("nan", "inf")[int(draw.integers(2))]
        expect = Expect(
            "first_bad",
            step + 1,
            step + 1,
            (rank,),
            "forward",
            skips=skips,
            halt=halt,
            bad_steps=(step + 1, step + 2),
            note=WEIGHT_OF_A_SLICE if topology == "fsdp2" else WEIGHT,
        )
        bit = int(draw.integers(8))
        yield Case(name, topology, "weight", "weight", rank, step, halt, value, bit=bit, expect=expect)

        name = f"{topology}: a moment on rank {rank}"
        step = (FIRST + 1, CHECK)[rank % 2]
        if step == CHECK:
            expect = Expect("first_bad", step, step, (), "optimizer", halt=step + 1, bad_steps=(step + 1,))
        else:
            expect = Expect(
                "first_bad",
                step + 2,
                step + 2,
                (rank,),
                "forward",
                skips=(step + 2,),
                halt=step + 3,
                bad_steps=(step + 2, step + 3),
                note=LATE_STATE,
            )
        bit = int(_draw(name).integers(8))
        yield Case(name, topology, "moment", "moment", rank, step, step + 3, "nan", bit=bit, expect=expect)


def _losses(topology: str) -> Iterator[Case]:
    """Spikes and creep of finite values: the mean over all ranks decides."""
    for number, amount in enumerate((1.5, 3.0)):
        step = FIRST + 2 + number
        expect = Expect("verdict", step, step, (), "loss_spike", halt=step + 2, bad_steps=(step + 2,))
        name = f"{topology}: a loss spike on all ranks, {amount}"
        yield Case(
            name,
            topology,
            "spike",
            "spike",
            None,
            step,
            step + 4,
            amount=amount,
            acts=("spike",),
            expect=expect,
        )
    for rank in _with_loss(topology):
        name = f"{topology}: a loss spike on rank {rank}"
        step = FIRST + 1 + int(_draw(name).integers(4))
        expect = Expect("ranks", step, step, (rank,), halt=step + 2, bad_steps=(step + 2,))
        yield Case(
            name, topology, "spike", "spike", rank, step, step + 4, amount=4.0, acts=("spike",), expect=expect
        )
    step = FIRST + 2
    expect = Expect("verdict", step, step, (), "loss_spike")
    yield Case(
        f"{topology}: a loss spike that is only observed",
        topology,
        "spike",
        "spike",
        None,
        step,
        step + SPIKE_STEPS + 1,
        amount=2.0,
        expect=expect,
    )
    yield Case(
        f"{topology}: a loss spike of one step",
        topology,
        "spike",
        "one spike",
        None,
        step,
        step + 3,
        amount=2.0,
        acts=("spike",),
        expect=expect,
    )
    for amount in (0.1, 0.2):
        expect = Expect("grad_norm", step, step + 14, (), "grad_norm_creep")
        name = f"{topology}: creep by {amount} a step"
        yield Case(name, topology, "creep", "creep", None, step, step + 15, amount=amount, expect=expect)


def _flips(topology: str) -> Iterator[Case]:
    """Single bits, and a rank that multiplies wrongly: what differs between replicas or twins is found."""
    tie = topology == "pipeline"
    for rank in EVERYONE:
        named = tuple(sorted((rank, rank ^ 1))) if tie else (rank,)
        for what in ("weight", "moment"):
            name = f"{topology}: a bit flips in a {what} on rank {rank}"
            draw = _draw(name)
            step, bit = FIRST + 1 + int(draw.integers(5)), 12 + int(draw.integers(11))
            expect = Expect(
                "checksum", CHECK, CHECK, named, what, halt=CHECK + 1, bad_steps=(CHECK + 1,), note=TIE * tie
            )
            if topology == "fsdp2":
                expect = Expect("checksum", CHECK, CHECK, miss=NO_REPLICA)
            case = Case(
                name,
                topology,
                f"bit flip, {what}",
                f"{what} flip",
                rank,
                step,
                CHECK + 2,
                bit=bit,
                expect=expect,
            )
            yield replace(case, checksum_steps=INTERVAL, acts=("corruption",))

        name = f"{topology}: the highest bit flips in a weight on rank {rank}"
        step = FIRST + 1 + int(_draw(name).integers(3))
        bad = (step + 1, step + 2)
        expect = Expect(
            "first_bad", step + 1, step + 1, (rank,), "forward", skips=bad[:1], halt=step + 2, bad_steps=bad
        )
        yield Case(
            name, topology, "bit flip, weight", "weight flip", rank, step, step + 2, bit=30, expect=expect
        )

        name = f"{topology}: the highest bit flips in an activation on rank {rank}"
        step = FIRST + 1 + int(_draw(name).integers(5))
        expect = Expect("first_bad", step, step, (rank,), "forward", skips=(step,), bad_steps=(step,))
        yield Case(
            name,
            topology,
            "bit flip, activation",
            "activation",
            rank,
            step,
            step + 2,
            bit=30,
            lasting=False,
            expect=expect,
        )

        expect = Expect(
            "twin", CHECK, CHECK, named, "persistent", halt=CHECK + 1, bad_steps=(CHECK + 1,), note=TIE * tie
        )
        case = Case(
            f"{topology}: rank {rank} multiplies wrongly",
            topology,
            "wrong matmul",
            "matmul",
            rank,
            FIRST + 1,
            CHECK + 2,
            amount=0.02,
            expect=expect,
        )
        yield replace(case, checksum_steps=INTERVAL, twin_steps=INTERVAL, acts=("corruption",))
    yield Case(
        f"{topology}: a low bit flips in an activation",
        topology,
        "bit flip, activation",
        "activation",
        1,
        FIRST + 3,
        FIRST + 6,
        bit=4,
        lasting=False,
        checksum_steps=INTERVAL,
        expect=Expect("first_bad", FIRST + 3, FIRST + 3, miss=ROUNDING),
    )


def _slow(topology: str) -> Iterator[Case]:
    for rank in EVERYONE:
        expect = Expect("straggler", FIRST + 9, FIRST + 19, (rank,), "straggler")
        name = f"{topology}: rank {rank} is slow"
        yield Case(name, topology, "slow rank", "slow", rank, FIRST + 1, FIRST + 20, expect=expect)


def _data(topology: str) -> Iterator[Case]:
    for rank in _with_data(topology):
        name = f"{topology}: rank {rank} reads a batch again"
        step = FIRST + 3 + int(_draw(name).integers(3))
        expect = Expect("ring", step, step, (rank,), "")
        yield Case(name, topology, "duplicate batch", "duplicate", rank, step, step + 1, expect=expect)

        name = f"{topology}: an overlong sample returns each epoch, first on rank {rank}"
        draw = _draw(name)
        step = FIRST + 1 + int(draw.integers(3))
        steps = (step, step + EPOCH, step + 2 * EPOCH)
        expect = Expect(
            "recurrence", step, step, (), "forward", skips=steps[:2], halt=steps[2], bad_steps=steps
        )
        micro = int(draw.integers(MICRO_BATCHES.get(topology, 1)))
        case = Case(
            name, topology, "overlong sample", "overlong", rank, step, steps[2], micro=micro, expect=expect
        )
        yield replace(
            case, expect=replace(expect, ranks=tuple(overlong_rank(case, turn) for turn in range(3)))
        )


def _restores(topology: str) -> Iterator[Case]:
    """One part of the state wrong on one rank or on all."""
    parts: list[tuple[str, int | None]] = [("weights", 1), ("moments", 2), ("moments", None)]
    parts += [("schedule", None), ("schedule", 3), ("loader", None), ("rng", 0), ("rng", 3)]
    if topology == "scaler":
        parts += [("scale", None), ("scale", 1)]
    for part, rank in parts:
        shared = rank is None or (topology == "fsdp2" and part in ("weights", "moments"))
        ranks = EVERYONE if shared else (rank or 0,)
        where = "on all ranks" if rank is None else f"on rank {rank}"
        name = f"{topology}: {part} not restored {where}"
        expect = Expect("restore", ranks=ranks, phase={"scale": "scaler"}.get(part, part), holds=True)
        yield Case(
            name,
            topology,
            "wrong restore",
            part,
            rank,
            bit=int(_draw(name).integers(8)),
            expect=expect,
        )


def _dead(topology: str) -> Iterator[Case]:
    """The server is gone: the trainer decides alone."""
    for rank, value in ((2, "nan"), (3, "inf")):
        step = FIRST + 2
        expect = Expect("acts", skips=(step, step + 2), halt=step + 3, bad_steps=(step, step + 2, step + 3))
        name = f"{topology}: bad losses on rank {rank} with the server dead"
        yield Case(name, topology, "server dead", "dead", rank, step, step + 4, value, expect=expect)


def _scaler() -> Iterator[Case]:
    for rank in EVERYONE:
        step = FIRST + 2
        dropped = tuple(range(step, step + 20))
        expect = Expect(
            "first_bad",
            step,
            step,
            (rank,),
            "backward",
            skips=dropped[:-1],
            halt=dropped[-1],
            bad_steps=dropped,
        )
        yield Case(
            f"scaler: overflows without end on rank {rank}",
            "scaler",
            "scaler collapse",
            "overflow",
            rank,
            step,
            dropped[-1],
            expect=expect,
        )
    expect = Expect("verdict", FIRST + 1, FIRST + 1, (), "scaler_not_restored")
    yield Case(
        "scaler: it begins at sixteen times the scale it ended with",
        "scaler",
        "scaler collapse",
        "scale not restored",
        None,
        FIRST + 1,
        FIRST + 3,
        expect=expect,
    )


def _clean(topology: str) -> Iterator[Case]:
    acts = ("spike", "corruption", "straggler", "grad_norm", "layer")
    plain = Case("", topology, "clean", "none", until=FIRST + 10)
    checked = replace(plain, checksum_steps=INTERVAL, twin_steps=INTERVAL)
    kinds = {
        "ordinary": (6, plain),
        "with every rule acting": (5, replace(checked, acts=acts)),
        "with replicas and twins compared": (2, checked),
        "with a declared boundary": (2, replace(plain, place="boundary", amount=1.5, acts=("spike",))),
        "with samples of all lengths": (3, replace(plain, place="ragged", acts=("spike",))),
        "with a NaN in evaluation": (2, replace(plain, place="eval")),
        "restored as saved": (2, replace(plain, place="nothing")),
    }
    for what, (count, case) in kinds.items():
        for number in range(count):
            yield replace(case, name=f"{topology}: {what}, {number + 1}")
