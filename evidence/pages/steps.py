"""The steps that people take about a dossier: what a page says of each, what stands in its way, who may."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from evidence.checkpoint_bytes import allowing
from evidence.collecting import samples
from evidence.models import Dossier, Item, VaultRequest
from evidence.retention import compliance, dates, release, two_people
from evidence.retention.two_people import Reason
from runs import formatting
from runs.models import Role

_TWO = "one person who asks and another who agrees"


def _nothing(dossier: Dossier) -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the page of a step says, and who may press its button."""

    name: str
    says: str
    needs: str
    button: str
    may: tuple[Role, ...]
    who: str  # for those who may not
    why_not: Callable[[Dossier], Reason]
    notes: Callable[[Dossier], dict[str, str]] = _nothing  # further lines of its page


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPeople(Step):
    """A step that two people take, with what carries each turn out."""

    may: tuple[Role, ...] = two_people.ASKERS
    who: str = "A responder, approver, vault officer or admin of the project may ask for it."
    kind: VaultRequest.Kind
    item: Item | None = None  # the one that it is about, where it is not the whole dossier
    subject: Callable[[Dossier], dict[str, Any]]
    ask: Callable[..., VaultRequest]
    agree: Callable[..., VaultRequest]


TWO_PEOPLE = {
    "release": TwoPeople(
        name="Release",
        says="Lets go of what this dossier holds: legal holds, hard links, the deletion gate. What another "
        "dossier counts on stays held. What the vault stores stays stored.",
        needs=f"every date passed, {_TWO}",
        button="Ask to release",
        why_not=release.why_not_release,
        kind=VaultRequest.Kind.RELEASE,
        subject=release.held,
        ask=release.request_release,
        agree=release.approve_release,
    ),
    "deletion": TwoPeople(
        name="Delete",
        says="Deletes the objects the vault stores for this dossier. The custody chain, the seals and the "
        "list of what was there stay. This cannot be undone.",
        needs=f"every date passed, {_TWO}",
        button="Ask to delete",
        why_not=release.why_not_deletion,
        kind=VaultRequest.Kind.DELETION,
        subject=release.stored,
        ask=release.request_deletion,
        agree=release.approve_deletion,
    ),
    "compliance": TwoPeople(
        name="Lock under COMPLIANCE",
        says="Locks what the policy asks for until the dates shown. Nobody can delete it or shorten a date "
        "before then, not even who owns the store. The cost runs until then. This cannot be undone.",
        needs=f"the dossier closed, bytes × days within the run's budget, {_TWO}",
        button="Ask to lock under COMPLIANCE",
        why_not=compliance.why_not,
        notes=compliance.budget,
        kind=VaultRequest.Kind.COMPLIANCE,
        subject=compliance.subject,
        ask=compliance.request_compliance,
        agree=compliance.confirm_compliance,
    ),
    "erasure": TwoPeople(
        name="Erase raw samples",
        says="Erases the key of this dossier's raw samples: nobody can read them any more, wherever a copy "
        "lies. Chain, seals and digests stay true. This cannot be undone.",
        needs=f"raw samples that can still be read, {_TWO}; at any date",
        button="Ask to erase raw samples",
        why_not=samples.why_not_erase,
        kind=VaultRequest.Kind.ERASURE,
        subject=samples.subject,
        ask=samples.request_erasure,
        agree=samples.approve_erasure,
    ),
}


def read_checkpoint(item: Item) -> TwoPeople:
    """Return the step by which a vault officer may read a checkpoint that one person must not read alone."""
    return TwoPeople(
        name="Read checkpoint bytes",
        says="Lets one vault officer read this checkpoint's bytes by an API token, never by a browser. Each "
        "reading is a row of custody with who and why, and people are told.",
        needs=f"a vault officer and a reason; above {allowing.limit_words(item)}, by policy, {_TWO}",
        button="Ask to read it",
        may=allowing.READERS,
        who="A vault officer of the project may read it.",
        why_not=lambda _: allowing.why_not_ask(item),
        kind=VaultRequest.Kind.READING,
        item=item,
        subject=lambda _: allowing.subject(item),
        # Its dossier is known: the page of a step names it for those that are about all of it.
        ask=lambda *, dossier, person, why: allowing.request_reading(item=item, person=person, why=why),
        agree=allowing.approve_reading,
    )


CLOSE = Step(
    name="Close",
    says="Keeps each item for its policy's days from today, and no longer extends the dates by itself. "
    "After the last date it can be released. A closed dossier does not open again.",
    needs="a dossier opened by hand, one person, a reason",
    button="Close the dossier",
    may=dates.CLOSERS,
    who="A responder, approver, vault officer or admin of the project may close it.",
    why_not=dates.why_not_close,
    notes=dates.if_closed,
)
EXTEND = Step(
    name="Keep longer",
    says="Moves the dates of its items to a later day. What is kept longer already stays so. No date "
    "moves earlier afterwards: where the store locks, it locks until then.",
    needs="a later day, at most ten years ahead; one person, a reason",
    button="Keep it longer",
    may=dates.EXTENDERS,
    who="An approver, vault officer or admin of the project may keep it longer.",
    why_not=dates.why_not_extend,
)
# Each step's page below its dossier, as the dossier names it.
LINKS = (
    ("close", "Close"),
    ("extend", "Keep longer"),
    ("compliance", "Lock under COMPLIANCE"),
    ("erasure", "Erase raw samples"),
    ("release", "Release"),
    ("deletion", "Delete what it stores"),
)
_NAMES = {
    "checkpoint": "checkpoint",
    "holds": "holds on sources",
    "trees": "held trees on nodes",
    "objects": "objects",
    "files": "files of raw samples",
    "bytes": "in all",
    "gb_days": "bytes × days",
    "cost_per_month": "cost",
    "hours": "may be read for",
}


def subject_lines(subject: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what is asked for as lines of a page: a name, and how much of it until when."""
    lines = [
        (str(one["item"]), f"{formatting.size(one['bytes'])}, until {_day(one['until'])}")
        for one in subject.get("items", [])
    ]
    return lines + [(words, _words(name, subject[name])) for name, words in _NAMES.items() if name in subject]


def _day(stamp: str) -> str:
    return f"{datetime.fromisoformat(stamp):%d %b %Y %H:%M} UTC" if stamp else "no date"


def _words(name: str, value: Any) -> str:
    if name == "bytes":
        return formatting.size(value)
    if name == "gb_days":
        return f"{value:,}{formatting.NBSP}GB × days"
    if name == "cost_per_month":
        return f"{value} a month"
    if name == "hours":
        return f"{value}{formatting.NBSP}h"
    return f"{value:,}" if isinstance(value, int) else str(value)
