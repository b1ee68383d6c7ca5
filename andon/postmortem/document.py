"""A postmortem as data: sentences of fact with the ids they came from, and what people wrote beside them.

A sentence without an id cannot be made, an id without its row in the appendix cannot be kept, and a row
that nothing cites is left out: so that whoever reads can check all of it, and nothing else is claimed.
People appear as `{uuid}` in every text; the names are beside it, because names can be erased.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import rfc8785

SCHEMA = "andon.postmortem/1"
PARTS = ("summary", "impact", "cause", "learned")  # what people write, beside the actions
_ID = re.compile(r"[A-Z]-[0-9]+")
_PERSON = re.compile(r"\{([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\}")


class Sentence(msgspec.Struct, frozen=True, tag="fact"):
    """A fact in one sentence, and the ids of the rows it was filled from."""

    text: str
    ids: tuple[str, ...]

    def __post_init__(self) -> None:
        _need_ids(self.ids, self.text)


class Row(msgspec.Struct, frozen=True):
    """One line of a table of facts."""

    cells: tuple[str, ...]
    ids: tuple[str, ...]

    def __post_init__(self) -> None:
        _need_ids(self.ids, " ".join(self.cells))


class Table(msgspec.Struct, frozen=True, tag="table"):
    """Facts of one shape. A head of "" is a column of names."""

    head: tuple[str, ...]
    rows: tuple[Row, ...]


class Group(msgspec.Struct, frozen=True, tag="group"):
    """Facts under a heading of their own; `mark` sets them in a border (what must not be overlooked)."""

    title: str
    facts: tuple[Sentence, ...]
    mark: bool = False


class Prose(msgspec.Struct, frozen=True, tag="prose"):
    """What a person wrote, with who and when; never mixed into a fact."""

    part: str
    text: str
    by: str  # "{uuid}"
    at: str


class Action(msgspec.Struct, frozen=True):
    """One thing to do: what, by whom, until when, where it is followed."""

    what: str
    owner: str = ""
    due: str = ""  # an ISO date
    ticket: str = ""


class Actions(msgspec.Struct, frozen=True, tag="actions"):
    """What people will do, with who listed it and when."""

    rows: tuple[Action, ...]
    by: str
    at: str


class Figure(msgspec.Struct, frozen=True, tag="figure"):
    """A figure drawn as SVG, its caption a sentence of fact, and its data as text."""

    key: str
    title: str
    caption: Sentence
    svg: str
    data: str


class Commands(msgspec.Struct, frozen=True, tag="commands"):
    """Command lines to type, and the sentence that says what they show."""

    says: Sentence
    lines: tuple[str, ...]


Item = Sentence | Table | Group | Prose | Actions | Figure | Commands


class Section(msgspec.Struct, frozen=True):
    """One section."""

    key: str
    title: str
    items: tuple[Item, ...]


class Cited(msgspec.Struct, frozen=True):
    """One cited row in full, for the appendix."""

    id: str
    what: str
    fields: tuple[tuple[str, str], ...]


class Version(msgspec.Struct, frozen=True):
    """What is told about the postmortem itself.

    `status` is draft | final; `says` is the draft's own line ("Draft, evidence 13 of 15 sealed").
    """

    status: Literal["draft", "final"]
    says: str
    number: int = 0
    at: str = ""
    authors: tuple[str, ...] = ()
    reviewers: tuple[str, ...] = ()


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A whole postmortem; `digest` is that of its inputs: of everything but itself and the version."""

    schema: str = SCHEMA
    incident: str
    run: str
    title: str
    version: Version
    head: Table
    sections: tuple[Section, ...]
    appendix: tuple[Cited, ...]
    digest: str = ""

    def section(self, key: str) -> Section:
        """Return a section by its key."""
        return next(section for section in self.sections if section.key == key)

    def text(self, people: dict[str, str]) -> "Document":
        """Return the document with people's names in place of their ids; an unknown id stays, shortened."""
        raw = msgspec.json.encode(self).decode()

        def name(match: re.Match[str]) -> str:
            known = people.get(match[1])
            # Encoded, because the name goes into a JSON text.
            return msgspec.json.encode(known).decode()[1:-1] if known else f"person {match[1][:8]}"

        return msgspec.json.decode(_PERSON.sub(name, raw).encode(), type=Document)


def person(opaque_id: object) -> str:
    """Return how a text names a person."""
    return f"{{{opaque_id}}}"


def people_in(document: Document) -> set[str]:
    """Return the ids of all people a document names."""
    return set(_PERSON.findall(msgspec.json.encode(document).decode()))


def finished(document: Document) -> Document:
    """Return the document with its digest, once every id it cites is in its appendix and nothing else is.

    Raises:
        ValueError: an id has no row, or a row is cited by nothing.
    """
    cited, kept = set(ids_of(document)), {row.id for row in document.appendix}
    if cited - kept:
        raise ValueError(f"cited, but not in the appendix: {', '.join(sorted(cited - kept, key=by_number))}")
    if kept - cited:
        raise ValueError(f"in the appendix, but not cited: {', '.join(sorted(kept - cited, key=by_number))}")
    bare = msgspec.structs.replace(document, digest="", version=Version(status="draft", says=""))
    digest = hashlib.sha256(rfc8785.dumps(msgspec.to_builtins(bare))).hexdigest()
    return msgspec.structs.replace(document, digest=digest)


def ids_of(document: Document) -> Iterator[str]:
    """Return every id that something in the document cites."""
    for item in (document.head, *(item for section in document.sections for item in section.items)):
        for sentence in sentences(item):
            yield from sentence.ids


def sentences(item: Item) -> Iterable[Sentence | Row]:
    """Return the facts of an item; what people wrote has none."""
    match item:
        case Sentence():
            return (item,)
        case Table():
            return item.rows
        case Group():
            return item.facts
        case Figure():
            return (item.caption,)
        case Commands():
            return (item.says,)
        case _:
            return ()


def by_number(row: str) -> tuple[str, int]:
    """Return a sort key of ids: F-9 before F-10."""
    letter, _, number = row.partition("-")
    return letter, int(number) if number.isdecimal() else 0


def encode(document: Document) -> bytes:
    """Return the document as JSON: sorted keys, one spelling, a final newline."""
    # Numbers are strings already: what people read and what machines compare is the same text.
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1) + b"\n"


def decode(raw: bytes) -> Document:
    """Read what `encode` wrote.

    Raises:
        msgspec.ValidationError: it is something else.
    """
    return msgspec.json.decode(raw, type=Document)


def _need_ids(ids: tuple[str, ...], text: str) -> None:
    if not ids or not all(_ID.fullmatch(one) for one in ids):
        raise ValueError(f"no id, no sentence: {text[:80]!r} cites {ids!r}")
