"""Tags of forms that want a proof of who is pressing, and of rows of the log of accounts."""

from typing import Any

from django import template
from django.conf import settings
from django.template.context import RequestContext
from django.utils.html import format_html
from django.utils.safestring import SafeString

from runs import formatting, proof
from runs.models import AccountEvent, Person

register = template.Library()


@register.inclusion_tag("accounts/_prove.html", takes_context=True)
def prove(
    context: RequestContext, name: str, to: str, *, again: bool = False, terse: bool = False
) -> dict[str, Any]:
    """Put the fields of a proof into a form: password, code, passkey, as far as this person has them.

    Args:
        name: the id of its first field, which tells several forms of a page apart.
        to: what the password is for, as in "to sign exactly this".
        terse: where room is short, leave the passkey to the form's own button, which asks for it when
            nothing was typed.
        again: want it on this very request; else a proof of the last minutes will do, and nothing is asked.
    """
    request = context["request"]
    person = request.user
    assert isinstance(person, Person)
    # A page has a form per row; what this person can prove is asked for once.
    known = request.__dict__.setdefault("andon_ways", {})
    if person.pk not in known:
        known[person.pk] = proof.ways(person), proof.recent(request, person)
    ways, recent = known[person.pk]
    return {
        "name": name,
        "to": to,
        "terse": terse,
        "ways": ways,
        "recent": None if again else recent,
        "lasts_min": int(settings.PROOF_LASTS.total_seconds() // 60),
    }


_SHOWN = (
    "method",
    "name",
    "run",
    "scopes",
    "source",
    "days",
    "overlap_hours",
    "left",
    "at",
    "groups",
    "kept",
    "sessions",
)


@register.simple_tag
def account_event(event: AccountEvent) -> SafeString:
    """Return the details of a row of the log of accounts in words."""
    data = event.data
    parts = []
    if event.kind == AccountEvent.Kind.ROLES:
        before, after = set(data["before"]), set(data["after"])
        parts += [f"gave {_role(role)}" for role in sorted(after - before)]
        parts += [f"took {_role(role)}" for role in sorted(before - after)]
        if not after:
            parts.append("no member any more")
    for key in _SHOWN:
        if key in data:
            value = data[key]
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            parts.append(f"{_NAMES.get(key, key)} {text}".strip())
    return format_html("{}", formatting.inert("; ".join(parts), 300))


_NAMES = {
    "method": "by",
    "name": "",
    "scopes": "may",
    "days": "valid for days:",
    "overlap_hours": "old one valid for hours:",
    "left": "codes left:",
    "at": "for",
    "source": "for",
    "groups": "by the groups",
    "sessions": "others:",
}


def _role(role: str) -> str:
    return role.replace("_", " ")


@register.filter
def of(prefix: str, number: int) -> str:
    """Return a name that tells the form of one row from those of the others: `{{ "r"|of:row.pk }}`."""
    return f"{prefix}{number}"
