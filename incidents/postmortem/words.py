"""How a postmortem writes times and lengths: absolute, because nobody reads it on the day it is about."""

from datetime import UTC, datetime

from andon.postmortem.document import person
from runs import formatting
from runs.models import Person

ANDON = "Andon"


def stamp(moment: datetime | None) -> str:
    """Return "2026-10-29 03:12:07.412 UTC"; "not known" for None."""
    if moment is None:
        return "not known"
    moment = moment.astimezone(UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d} UTC"


def minutes(start: datetime | None, end: datetime | None) -> str:
    """Return the minutes between two moments with one decimal; "not known" where one is missing."""
    if start is None or end is None:
        return "not known"
    length = round((end - start).total_seconds() / 60, 1) or 0.0  # never a negative nothing
    return f"{length:,.1f} min".replace("-", formatting.MINUS)


def who(one: Person | None) -> str:
    """Return how a text names a person, by an id that says nothing once the name was erased."""
    return person(one.opaque_id) if one is not None else ANDON


def who_by_id(opaque_id: str) -> str:
    """Return how a text names whoever decided: a person by id, or a rule by its name."""
    is_person = len(opaque_id) == 36 and opaque_id.count("-") == 4
    if is_person:
        return person(opaque_id)
    return ANDON if opaque_id in ("", "andon") else formatting.inert(opaque_id)


def plain(value: object, most: int = 400) -> str:
    """Return outside text that can neither hide nor reorder what stands beside it."""
    return formatting.inert(value, most)
