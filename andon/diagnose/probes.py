"""Probes: what tells the families apart, one condition at a time, with the command to type.

A probe changes one condition of a replay, or reads what exists and changes none. Only its result rules
a family out. A batch that trains cleanly alone does not clear data, and a node that passes its test is
not proven sound (intermittent faults are the common case), so those results rule nothing out.
"""

from collections.abc import Callable

import msgspec

from andon.diagnose import commands
from andon.diagnose.families import Family
from andon.diagnose.record import Record


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One way a probe comes out.

    Attributes:
        key: stable name.
        words: what was seen.
        supports: the family it makes the cause, None for none.
        rules_out: the families that cannot be the cause any more.
    """

    key: str
    words: str
    supports: Family | None = None
    rules_out: tuple[Family, ...] = ()


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One probe.

    Attributes:
        key: stable name.
        name: what is done, in a few words.
        condition: the one thing that differs from the failing step; "" for a probe that only reads.
        splits: families its results tell apart from the others, the one it is about first.
        minutes: about how long it takes; the cheaper is offered first.
        results: how it may come out; "unclear" can always be recorded.
        command: command lines from the names of a record, None where a name it needs is not known.
    """

    key: str
    name: str
    condition: str
    splits: tuple[Family, ...]
    minutes: int
    results: tuple[Result, ...]
    command: Callable[[Record], str | None]

    def result(self, key: str) -> Result | None:
        """Return one of its results; "unclear" is one of every probe."""
        return next((one for one in (*self.results, UNCLEAR) if one.key == key), None)


UNCLEAR = Result(key="unclear", words="it could not be told")

DATA, NUMERICS, OPTIMIZER, STATE, NETWORK, HARDWARE, DRIFT = (
    Family.DATA,
    Family.NUMERICS,
    Family.OPTIMIZER,
    Family.DISTRIBUTED,
    Family.COMMUNICATION,
    Family.HARDWARE,
    Family.DRIFT,
)


_BREAKS, _CLEAN = "it breaks as before", "it is clean"

PROBES: tuple[Probe, ...] = (
    Probe(
        key="read_batch",
        name="Read the batch of the first bad step: lengths, ids, masks, duplicates",
        condition="",
        splits=(DATA,),
        minutes=2,
        command=commands.batch,
        results=(
            Result(
                key="odd", words="a sample is odd: overlong, corrupt, masked out, repeated", supports=DATA
            ),
            Result(key="ordinary", words="it looks like the others; that does not clear it"),
        ),
    ),
    Probe(
        key="other_batch",
        name="Run the step with another batch on the same ranks",
        condition="batch",
        splits=(DATA, NUMERICS, HARDWARE),
        minutes=10,
        command=commands.other_batch,
        results=(
            Result(key="breaks", words=_BREAKS, rules_out=(DATA,)),
            Result(key="clean", words=_CLEAN, supports=DATA),
        ),
    ),
    Probe(
        key="batch_alone",
        name="Run that batch alone on one GPU",
        condition="number of ranks",
        splits=(DATA, NETWORK, STATE),
        minutes=10,
        command=commands.probe(),
        results=(
            Result(key="breaks", words=_BREAKS, supports=DATA, rules_out=(NETWORK, STATE)),
            Result(key="clean", words="it is clean; that does not clear data"),
        ),
    ),
    Probe(
        key="fp32",
        name="Run the step in fp32",
        condition="precision",
        splits=(NUMERICS, DATA),
        minutes=10,
        command=commands.probe("precision=fp32"),
        results=(
            Result(key="breaks", words=_BREAKS, rules_out=(NUMERICS,)),
            Result(key="clean", words=_CLEAN, supports=NUMERICS),
        ),
    ),
    Probe(
        key="unfused",
        name="Run the step with unfused kernels",
        condition="kernels",
        splits=(NUMERICS,),
        minutes=15,
        command=commands.probe("kernels=unfused"),
        results=(
            Result(key="breaks", words=f"{_BREAKS}; fused kernels are cleared, overflow is not"),
            Result(key="clean", words=_CLEAN, supports=NUMERICS),
        ),
    ),
    Probe(
        key="lower_lr",
        name="Train on from a copy with lr × 0.3",
        condition="learning rate",
        splits=(OPTIMIZER, DATA),
        minutes=30,
        command=commands.replay,
        results=(
            Result(key="breaks", words="it spikes as before", rules_out=(OPTIMIZER,)),
            Result(key="clean", words="it improves", supports=OPTIMIZER),
        ),
    ),
    Probe(
        key="verify_checkpoint",
        name="Verify the newest checkpoint before it again: files, finite weights and moments",
        condition="",
        splits=(OPTIMIZER, STATE),
        minutes=10,
        command=commands.checkpoint,
        results=(
            Result(key="bad", words="it is not whole or not finite", supports=STATE),
            Result(key="sound", words="it is whole and finite"),
        ),
    ),
    Probe(
        key="restore_check",
        name="Load that checkpoint and compare every part with what was saved",
        condition="",
        splits=(STATE,),
        minutes=15,
        command=commands.probe(),
        results=(
            Result(key="differs", words="a part differs", supports=STATE),
            Result(
                key="equal", words="weights, moments, scheduler, RNG, loader: all equal", rules_out=(STATE,)
            ),
        ),
    ),
    Probe(
        key="read_collectives",
        name="Read the flight recorder of every rank: who entered what",
        condition="",
        splits=(NETWORK, STATE, HARDWARE),
        minutes=5,
        command=commands.collectives,
        results=(
            Result(key="missing", words="a rank never entered: that rank is the suspect"),
            Result(
                key="mismatch",
                words="ranks disagree about the collective",
                supports=STATE,
                rules_out=(NETWORK, HARDWARE),
            ),
            Result(key="all", words="all entered, it did not end", supports=NETWORK, rules_out=(STATE,)),
        ),
    ),
    Probe(
        key="all_reduce",
        name="Measure all-reduce across the suspect's pair against its quiet baseline",
        condition="",
        splits=(NETWORK, HARDWARE),
        minutes=5,
        command=commands.all_reduce,
        results=(
            Result(key="slow", words="below 0.9 of the baseline, or it fails", supports=NETWORK),
            Result(key="baseline", words="at its baseline now; a transient is not cleared"),
            Result(key="no_baseline", words="measured, but no baseline of this node type exists"),
        ),
    ),
    Probe(
        key="counters",
        name="Read retransmits, congestion marks and pauses of the suspect's ports",
        condition="",
        splits=(NETWORK,),
        minutes=2,
        command=commands.counters,
        results=(
            Result(key="rising", words="timeouts, retransmits or pauses rise", supports=NETWORK),
            Result(key="quiet", words="nothing rises now"),
        ),
    ),
    Probe(
        key="other_network",
        name="Run the step over sockets instead of InfiniBand",
        condition="network path",
        splits=(NETWORK,),
        minutes=20,
        command=commands.network,
        results=(
            Result(key="breaks", words=_BREAKS, rules_out=(NETWORK,)),
            Result(key="clean", words=_CLEAN, supports=NETWORK),
        ),
    ),
    Probe(
        key="ecc",
        name="Read ECC counts, row remaps and the kernel log of the suspect",
        condition="",
        splits=(HARDWARE,),
        minutes=2,
        command=commands.ecc,
        results=(
            Result(key="faults", words="uncorrected errors or an Xid near the failure", supports=HARDWARE),
            Result(key="none", words="none; many flips leave none"),
        ),
    ),
    Probe(
        key="dcgm",
        name="Test the suspect node with dcgmi diag level 3",
        condition="",
        splits=(HARDWARE,),
        minutes=15,
        command=commands.dcgm,
        results=(
            Result(key="fails", words="it fails", supports=HARDWARE),
            Result(key="passes", words="it passes; intermittent faults do, too"),
        ),
    ),
    Probe(
        key="swap_node",
        name="Run the step with the suspect node replaced, same data",
        condition="node",
        splits=(HARDWARE, DATA, NUMERICS),
        minutes=20,
        command=commands.replay,
        results=(
            Result(key="breaks", words=f"{_BREAKS}, on another node", rules_out=(HARDWARE,)),
            Result(key="clean", words=_CLEAN, supports=HARDWARE),
        ),
    ),
    Probe(
        key="twin",
        name="Compute the step on the suspect and on a second rank, compare digests before any reduce",
        condition="device",
        splits=(HARDWARE, DATA, NUMERICS),
        minutes=10,
        command=commands.twin,
        results=(
            Result(key="differ", words="digests differ", supports=HARDWARE),
            Result(key="same", words="the same result on both", rules_out=(HARDWARE,)),
        ),
    ),
    Probe(
        key="diff",
        name="Compare code, configuration and image with the attempt before",
        condition="",
        splits=(DRIFT,),
        minutes=2,
        command=commands.diff,
        results=(
            Result(key="same", words="nothing differs", rules_out=(DRIFT,)),
            Result(key="differs", words="something differs; that alone proves no cause"),
        ),
    ),
    Probe(
        key="older_code",
        name="Run the step with the revision before",
        condition="revision",
        splits=(DRIFT,),
        minutes=20,
        command=commands.older_code,
        results=(
            Result(key="breaks", words=_BREAKS, rules_out=(DRIFT,)),
            Result(key="clean", words=_CLEAN, supports=DRIFT),
        ),
    ),
)
_BY_KEY = {probe.key: probe for probe in PROBES}

OWN = "own"


def own(family: Family, name: str, condition: str) -> Probe:
    """Return a probe that a person thought of, about one family."""
    return Probe(
        key=OWN,
        name=name,
        condition=condition,
        splits=(family,),
        minutes=0,
        command=lambda record: None,
        results=(
            Result(key="supports", words=f"it makes {family} the cause", supports=family),
            Result(key="rules_out", words=f"{family} cannot be the cause", rules_out=(family,)),
        ),
    )


def probe_of(key: str) -> Probe | None:
    """Return a probe of the table by its key."""
    return _BY_KEY.get(key)
