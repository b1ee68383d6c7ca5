"""Notes: Markdown as HTML that can do nothing, and the texts a note had before.

Markdown becomes HTML without any of the writer's own, and is then sanitised by a parser of its own: two
different programs would both have to be wrong.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache

import nh3
from django.utils.safestring import SafeString, mark_safe
from markdown_it import MarkdownIt
from markdown_it.token import Token

from incidents.models import Incident, Note

MOST_CHARS = 20_000
# As runs.formatting's, but for what makes lines and columns.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_IMAGE = re.compile(r"/incidents/\d{1,18}/images/[0-9a-f]{64}")
_LINK = re.compile(r"https?://|/(?!/)|#")
_TAGS = {
    *("p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "ul", "ol", "li", "a", "img"),
    *("h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"),
}
_ATTRIBUTES = {"a": {"href"}, "img": {"src", "alt"}, "ol": {"start"}}
_markdown = MarkdownIt("commonmark", {"html": False, "breaks": True, "maxNesting": 20}).enable(
    ["table", "strikethrough"]
)


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a note."""

    at: datetime
    html: SafeString


@dataclass(frozen=True, slots=True)
class Shown:
    """One note: its newest text, and those before it, newest first."""

    id: int
    by: str
    person_id: int
    at: datetime
    text: str
    html: SafeString
    earlier: list[Text] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Its number as text, for names in a template."""
        return str(self.id)

    @property
    def edits(self) -> int:
        """How many texts it had before."""
        return len(self.earlier)


def of_incident(incident: Incident) -> list[Shown]:
    """Return the notes of an incident, newest first."""
    rows = list(incident.notes.select_related("person").order_by("id"))
    by_id = {row.pk: row for row in rows}
    replaced = {row.replaces_id for row in rows if row.replaces_id is not None}
    return [_shown(row, by_id) for row in reversed(rows) if row.pk not in replaced]


def _shown(note: Note, by_id: dict[int, Note]) -> Shown:
    earlier, before = [], note.replaces_id
    while before is not None and before in by_id:
        old = by_id[before]
        earlier.append(Text(old.at, render(old.text)))
        before = old.replaces_id
    return Shown(
        note.pk, note.person.username, note.person_id, note.at, note.text, render(note.text), earlier
    )


@lru_cache(maxsize=512)
def render(text: str) -> SafeString:
    """Return Markdown as HTML: no markup of the writer's own, no address but http(s) and this server's.

    Images are those kept as evidence. Characters that hide or reorder text become U+FFFD.
    """
    text = _UNSAFE.sub("\ufffd", text[:MOST_CHARS].replace("\r\n", "\n"))
    tokens = _markdown.parse(text)
    _lower_headings(tokens)
    html = _markdown.renderer.render(tokens, _markdown.options, {})
    clean = nh3.clean(
        html,
        tags=_TAGS,
        attributes=_ATTRIBUTES,
        attribute_filter=_allowed,
        url_schemes={"http", "https"},
        link_rel="noopener noreferrer nofollow",
    )
    return mark_safe(clean)  # noqa: S308 (sanitised just above)


def _lower_headings(tokens: list[Token]) -> None:
    """Begin at h4: a note stands under a section of its page."""
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 3)}"


def _allowed(tag: str, name: str, value: str) -> str | None:
    if (tag, name) == ("img", "src"):
        return value if _IMAGE.fullmatch(value) else None
    if (tag, name) == ("a", "href"):
        return value if _LINK.match(value) else None
    return value
