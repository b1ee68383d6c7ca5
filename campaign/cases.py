"""What one case of the campaign is: where a fault is put in, and what must be said of it."""

from dataclasses import dataclass, field

FIRST = 1000  # the last step before every case: the detectors know sixty steps by then
HISTORY = 60
INTERVAL = 5  # steps between two measurements of layers and moments
RANKS = 4
EPOCH = 4  # steps after which an overlong sample comes back

TOPOLOGIES = ("ddp", "fsdp2", "accumulation", "pipeline", "scaler")
MICRO_BATCHES = {"accumulation": 3, "pipeline": 2}


@dataclass(frozen=True)
class Expect:
    """What the product must say and do.

    Attributes:
        by: who must say it (campaign/judging.py); "acts": it is enough that the ranks act.
        first, last: the steps of which it may be said.
        ranks: exactly these; empty: no rank may be named.
        phase: of the first-bad cell, or what a finding is about (a kind, a tensor, a part); micro: in which
            micro-batch, where it must be told.
        skips: updates that all ranks must drop; halt: the step at which all must stop, dropping its update.
        holds: all ranks leave with 93 (before any step, where `halt` is None).
        bad_steps: steps whose updates would do harm: none of them may be applied.
        miss: the fault cannot be seen here, and why; it is listed, and told when it was found all the same.
        note: what a reader of the table must know.
    """

    by: str = "acts"
    first: int = 0
    last: int = 0
    ranks: tuple[int, ...] = ()
    phase: str = ""
    micro: int | None = None
    skips: tuple[int, ...] = ()
    halt: int | None = None
    holds: bool = False
    bad_steps: tuple[int, ...] = ()
    miss: str = ""
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One fault, or a clean control (`kind` "clean").

    Attributes:
        kind: the row of the report it counts in.
        place: what is done (campaign/injecting.py).
        rank: where; None: on all.
        step: in which step it begins; until: the last step trained.
        value: "nan" or "inf"; micro: in which micro-batch; bit, amount: what they are for this place.
        lasting: it comes again when the step is run again.
        acts: the policy's rules that act besides nonfinite; checksum_steps, twin_steps: as for `watch`.
    """

    name: str
    topology: str
    kind: str
    place: str
    rank: int | None = None
    step: int = FIRST + 3
    until: int = FIRST + 6
    value: str = "nan"
    micro: int = 0
    bit: int = 0
    amount: float = 0.0
    lasting: bool = True
    acts: tuple[str, ...] = ()
    checksum_steps: int = 0
    twin_steps: int = 0
    expect: Expect = field(default_factory=Expect)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong in it."""
        return self.kind == "clean"

    @property
    def micro_batches(self) -> int:
        """How many there are in a step."""
        return MICRO_BATCHES.get(self.topology, 1)
