"""Where the row behind an id is shown."""

import re

from django import template

register = template.Library()

_ID = re.compile(r"[A-Z]-\d{1,18}")


@register.filter
def cite(row: str, incident: int) -> str:
    """Return the address of the row that `F-117` names: in full in the appendix of the postmortem."""
    if not _ID.fullmatch(row):
        return ""
    if row.startswith("I-"):
        return f"/incidents/{row.removeprefix('I-')}"
    return f"#{row}" if row.startswith("H-") else f"/incidents/{incident}/postmortem#{row}"
