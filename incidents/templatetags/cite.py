"""Where the row behind an id is shown."""

import re

from django import template

register = template.Library()

_ID = re.compile(r"([A-Z])-(\d{1,18})")
# Sections of the incident page by the letter of an id; others stand on pages of their own.
_SECTIONS = {
    "F": "numbers",
    "T": "timeline",
    "E": "evidence",
    "L": "ledger",
    "A": "approval",
    "V": "timeline",
}


@register.filter
def cite(row: str, incident: int) -> str:
    """Return the address of the row that `F-117` names, as a link on the page of `incident`."""
    match = _ID.fullmatch(row)
    if match is None:
        return ""
    letter, number = match[1], match[2]
    if letter == "I":
        return f"/incidents/{number}"
    if letter == "H":
        return f"#{row}"
    return f"/incidents/{incident}#{_SECTIONS.get(letter, 'changed')}"
