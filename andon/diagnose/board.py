"""The diagnosis board: every failure family with what speaks for and against it, and the next probe.

Facts make a family lead, stay open or become unlikely. Only the result of a probe rules one out, and a
later result may bring it back. That no cause is found is an ordinary end.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from andon.diagnose.fact import Fact
from andon.diagnose.families import Diagnosis, Family, diagnose
from andon.diagnose.gather import gather
from andon.diagnose.meaning import MEANING
from andon.diagnose.probes import PROBES, Probe, Result
from andon.diagnose.record import Record

Standing = Literal["leading", "open", "unlikely", "ruled out"]
_CLEARLY = 2  # one strong line, or two: less than that is no reason to change what was said first
FAMILIES: tuple[Family, ...] = tuple(family for family in Family if family != Family.UNKNOWN)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One fact as it speaks about one family: what is known, what follows, from which row."""

    id: str
    text: str
    because: str
    strong: bool
    more: int = 0


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A probe that was done, with its result; in the order in which results were recorded."""

    id: str
    probe: Probe
    result: Result


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The next probe of a family; `command` is None where a name it needs is not known."""

    probe: Probe
    command: str | None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One family.

    Attributes:
        standing: leading | open | unlikely | ruled out.
        why: what gave it that standing.
        by: the probe that decided it, "" when facts did.
        supports, contradicts: what speaks for and against it, the strong first.
        probe: what to do next, None when a probe decided.
    """

    family: Family
    standing: Standing
    why: str
    by: str = ""
    supports: tuple[Line, ...] = ()
    contradicts: tuple[Line, ...] = ()
    probe: Offer | None = None

    @property
    def weight(self) -> int:
        """What speaks for it less what speaks against it: strong lines count twice."""
        return _weight(self.supports) - _weight(self.contradicts)


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """All families in the order in which their layers are checked."""

    diagnosis: Diagnosis
    rows: tuple[Row, ...]

    @property
    def leading(self) -> Row | None:
        """The one that leads; None when nothing does."""
        return next((row for row in self.rows if row.standing == "leading"), None)

    def row(self, family: Family) -> Row:
        """Return the row of one family."""
        return next(row for row in self.rows if row.family == family)


def board(record: Record, tried: Sequence[Tried] = ()) -> Board:
    """Return the board of an incident.

    Args:
        record: everything stored that may speak.
        tried: the probes done so far, oldest result first.
    """
    facts = gather(record)
    diagnosis = diagnose([one.said() for one in record.findings], record.cell(), record.facts())
    lines = {family: _lines(family, facts) for family in FAMILIES}
    decided = _decided(tried)
    leader = _leader(diagnosis, lines, decided)
    rows = []
    for family in FAMILIES:
        supports, contradicts = lines[family]
        standing, why, by = _standing(family, diagnosis, lines[family], decided.get(family), family == leader)
        rows.append(
            Row(
                family=family,
                standing=standing,
                why=why,
                by=by,
                supports=supports,
                contradicts=contradicts,
                probe=None if by else _next(family, record, tried, decided, lines),
            )
        )
    return Board(diagnosis=diagnosis, rows=tuple(rows))


Pair = tuple[tuple[Line, ...], tuple[Line, ...]]


def _lines(family: Family, facts: Sequence[Fact]) -> Pair:
    supports: list[Line] = []
    contradicts: list[Line] = []
    for fact in facts:
        for about, weight, because in MEANING.get(fact.kind, ()):
            if about == family:
                line = Line(
                    id=fact.id, text=fact.text, because=because, strong=abs(weight) > 1, more=fact.more
                )
                (supports if weight > 0 else contradicts).append(line)
    # Stable: among equals the order of gathering stays, which goes from the origin outwards.
    return tuple(sorted(supports, key=_strong_first)), tuple(sorted(contradicts, key=_strong_first))


def _strong_first(line: Line) -> bool:
    return not line.strong


def _weight(lines: Sequence[Line]) -> int:
    return sum(2 if line.strong else 1 for line in lines)


def _decided(tried: Sequence[Tried]) -> dict[Family, tuple[bool, Tried]]:
    """Return by family whether the newest result about it supports it (else rules it out)."""
    found: dict[Family, tuple[bool, Tried]] = {}
    for one in tried:
        for family in one.result.rules_out:
            found[family] = (False, one)
        if one.result.supports is not None:
            found.pop(one.result.supports, None)  # the newest word stands last: it leads
            found[one.result.supports] = (True, one)
    return found


def _leader(
    diagnosis: Diagnosis, lines: dict[Family, Pair], decided: dict[Family, tuple[bool, Tried]]
) -> Family | None:
    """Return who leads: what a probe supports, else the first diagnosis, else most of the facts.

    The first diagnosis keeps the lead until clearly more is known for another family.
    """
    supported = [family for family, (supports, _) in decided.items() if supports]
    if supported:
        return supported[-1]
    alive = [family for family in FAMILIES if family not in decided]
    weights = {family: _weight(lines[family][0]) - _weight(lines[family][1]) for family in alive}
    best = max(alive, key=lambda family: weights[family], default=None)
    if best is None:
        return None
    if diagnosis.family in alive:
        return diagnosis.family if weights[best] < weights[diagnosis.family] + _CLEARLY else best
    return best if weights[best] > 0 else None


def _standing(
    family: Family,
    diagnosis: Diagnosis,
    pair: Pair,
    decided: tuple[bool, Tried] | None,
    leads: bool,
) -> tuple[Standing, str, str]:
    if decided is not None:
        supports, one = decided
        standing: Standing = "ruled out" if not supports else "leading" if leads else "open"
        return standing, f"{one.probe.name}: {one.result.words}", one.id
    if leads:
        why = diagnosis.why if diagnosis.family == family else "most of what is known speaks for it"
        return "leading", why, ""
    if _weight(pair[1]) > _weight(pair[0]):
        return "unlikely", "more speaks against it than for it", ""
    reason = next((why for other, why in diagnosis.others if other == family), "")
    return "open", reason or ("nothing known decides" if any(pair) else "nothing known speaks of it"), ""


def _next(
    family: Family,
    record: Record,
    tried: Sequence[Tried],
    decided: dict[Family, tuple[bool, Tried]],
    lines: dict[Family, Pair],
) -> Offer | None:
    """Return the probe that tells most about `family`: a command that can be typed, then what it splits
    from the families still alive, then the cheapest."""
    done = {one.probe.key for one in tried}
    alive = {other for other in FAMILIES if other not in decided}
    alive -= {other for other in alive if _weight(lines[other][1]) > _weight(lines[other][0])}
    about = [probe for probe in PROBES if family in probe.splits and probe.key not in done]
    offers = [Offer(probe=probe, command=probe.command(record)) for probe in about]
    return min(
        offers,
        key=lambda offer: (
            offer.command is None,
            offer.probe.splits[0] != family,
            -_worth(family, offer.probe, alive),
            offer.probe.minutes,
        ),
        default=None,
    )


def _worth(family: Family, probe: Probe, alive: set[Family]) -> int:
    """Return how many minutes of another probe it may cost: what it settles, ten minutes each."""
    settles = any(family in result.rules_out for result in probe.results)
    return 10 * settles + 5 * len(alive & set(probe.splits[1:])) - probe.minutes
