"""Links out of an incident by URL template: to a dashboard, with names and time range filled in.

A template is an operator's, the names in it come from trainers. So the scheme and the host are literal text,
and whatever is filled in is percent-encoded.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

# What may stand in braces. `from` and `to` are RFC 3339, with `_ms` milliseconds since 1970 (Grafana's).
FIELDS = frozenset(
    {"run", "attempt", "incident", "node", "rank", "step", "gpu_uuid", "from", "to", "from_ms", "to_ms"}
)


@dataclass(frozen=True, slots=True)
class Link:
    """One template: the name on the page, and an address with fields in braces."""

    name: str
    url: str

    def fill(self, values: Mapping[str, object]) -> str | None:
        """Return the address with `values` in it, None when one that it needs is not known (None or "")."""
        pieces = []
        for literal, name, _, _ in string.Formatter().parse(self.url):
            pieces.append(literal)
            if name is not None:
                value = values.get(name)
                if value is None or value == "":
                    return None
                pieces.append(quote(str(value), safe=""))
        return "".join(pieces)


def parse(text: str) -> list[Link]:
    """Read `NAME=URL` entries separated by white space; an underscore in a name is shown as a blank.

    Raises:
        ValueError: no name, no http(s) address with a literal host, or a field nobody fills in.
    """
    return [_one(entry) for entry in text.split()]


def _one(entry: str) -> Link:
    name, equals, url = entry.partition("=")
    if not equals or not name:
        raise ValueError(f"{entry!r}: expected NAME=URL")
    try:
        fields = [
            (field, form, how) for _, field, form, how in string.Formatter().parse(url) if field is not None
        ]
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{name}: expected an http:// or https:// address with a host")
    if "{" in parts.netloc or parts.username is not None:
        raise ValueError(f"{name}: the host is literal: no field and no user may stand in it")
    for field, form, how in fields:
        if field not in FIELDS or form or how:
            known = ", ".join(sorted(FIELDS))
            raise ValueError(f"{name}: {{{field}}} is no field; known are {known}")
    return Link(name.replace("_", " "), url)
