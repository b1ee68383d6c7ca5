"""Template filters and tags over `runs.formatting`: the forms that the pages' contract fixes."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from runs import formatting

register = template.Library()

register.filter("count", lambda value: "" if value == "" else formatting.count(value))
register.filter("loss", formatting.loss)
register.filter("grad_norm", formatting.grad_norm)
register.filter("lr", formatting.learning_rate)
register.filter("z", formatting.z_score)
register.filter("size", formatting.size)
register.filter("duration", formatting.duration)
register.filter("money", formatting.money)
register.filter("gpu_hours", formatting.gpu_hours)
register.filter("rank_words", formatting.rank_words)
register.filter("inert", formatting.inert)
register.filter("short", lambda text: formatting.inert(text, 48))


@register.filter
def plural(number: int, words: str) -> str:
    """Return `{{ n|plural:"step" }}` or `{{ n|plural:"body,bodies" }}` with its number."""
    one, _, many = words.partition(",")
    return formatting.plural(number, one, many)


@register.filter
def wordlist(words: str) -> list[str]:
    """Return the words of a literal, for a short loop."""
    return words.split()


@register.filter
def without(lines: Sequence[Any], incident: int) -> list[Any]:
    """Return the lines of other incidents than this one."""
    return [line for line in lines if line.incident != incident]


@register.filter
def get(mapping: dict[object, object], key: object) -> object:
    """Return `mapping[key]`, "" when it has none."""
    return mapping.get(key, "") if isinstance(mapping, dict) else ""


@register.filter
def dash(text: str) -> str:
    """Return folded numbers with an en dash and blanks: `56–60, 62`."""
    return re.sub(r"(?<=\d),(?=\d)", ", ", re.sub(r"(?<=\d)-(?=\d)", formatting.RANGE, text))


@register.filter
def spaced(name: str) -> str:
    """Return a column name as words: `grad norm`."""
    return name.replace("_", " ")


@register.filter
def brief(text: str, most: int = 130) -> str:
    """Return a sentence short enough for the strip: what stands in brackets or after the first clause goes.

    The whole of it stands further down the page.
    """
    if len(text) <= most:
        return text
    for end in (" (", "; ", ". "):
        head, found, _ = text.partition(end)
        if found and len(head) <= most:
            return f"{head}."
    return f"{text[:most].rsplit(' ', 1)[0]}…"


@register.filter
def percent(part: float, whole: float) -> str:
    """Return the share of `part` in `whole`."""
    return formatting.percent(part, whole)


@register.filter
def times(value: float, by: float) -> float:
    """Return the product: hours at a price."""
    return value * by


@register.filter
def ranks(values: Iterable[int]) -> str:
    """Return folded ranks, cut after five pieces."""
    return formatting.ranks(values)


@register.filter
def all_ranks(values: Iterable[int]) -> str:
    """Return all ranks folded, for the disclosure behind a cut list."""
    return ", ".join(formatting.fold(values))


def _time(moment: datetime, text: str, relative: str = "") -> SafeString:
    moment = moment.astimezone(UTC)
    exact = f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
    return format_html(
        '<time datetime="{}" title="{}"{}>{}</time>',
        exact,
        exact,
        format_html(' data-live="{}"', relative) if relative else "",
        text,
    )


@register.simple_tag
def when(moment: datetime | None, now: datetime | None = None) -> SafeString | str:
    """Return `4 min ago, 03:12:07 UTC`; the relative part is kept current by the page's script."""
    if moment is None:
        return "never"
    now = now or timezone.now()
    return format_html(
        "{}, {} UTC", _time(moment, formatting.ago(moment, now), "ago"), formatting.clock(moment, now)
    )


@register.simple_tag
def ago(moment: datetime | None) -> SafeString | str:
    """Return `4 min ago`, kept current by the page's script."""
    return "never" if moment is None else _time(moment, formatting.ago(moment, timezone.now()), "ago")


@register.simple_tag
def lasting(since: datetime | None) -> SafeString | str:
    """Return how long something has lasted: `4 min`, kept current by the page's script."""
    if since is None:
        return "not known yet"
    return _time(since, formatting.duration((timezone.now() - since).total_seconds()), "for")


_ACCRUING = {"gpu_hours": formatting.gpu_hours, "money": formatting.money}


@register.simple_tag
def accrued(since: datetime, per_hour: float, form: str) -> SafeString:
    """Return what `per_hour` came to since a moment, as `gpu_hours` or `money`, kept current by the page."""
    hours = (timezone.now() - since).total_seconds() / 3600
    return format_html(
        '<data value="{}" data-live="{}" data-since="{}">{}</data>',
        per_hour,
        form,
        since.isoformat(),
        _ACCRUING[form](hours * per_hour),
    )


@register.simple_tag
def at(moment: datetime | None) -> SafeString | str:
    """Return `03:12:07 UTC`, with the date when it was not today."""
    if moment is None:
        return "never"
    return _time(moment, f"{formatting.clock(moment, timezone.now())} UTC")


@register.simple_tag
def clock(moment: datetime | None) -> SafeString | str:
    """Return `03:12:07.412` for a table, with the date when it was not today."""
    return "" if moment is None else _time(moment, formatting.clock(moment, timezone.now(), ms=True))


@register.simple_tag
def lag(occurred: datetime | None, received: datetime | None) -> SafeString | str:
    """Return `+94 ms`; above 10 s with the word late."""
    if occurred is None or received is None:
        return ""
    text = formatting.lag(occurred, received)
    if (received - occurred).total_seconds() > formatting.LATE_AFTER_S:
        return format_html('{} <b class="bad">late</b>', text)
    return text


@register.simple_tag
def digest(value: str, words: str = "digest") -> SafeString:
    """Return a digest as first 8…last 4 in mono with a button that copies all of it."""
    if not value:
        return format_html('<span class="faint">{}</span>', "not known yet")
    value = formatting.inert(value, 200)  # a permit id, for one, is what a trainer wrote
    return format_html(
        '<span class="digest"><span class="mono" title="{0}">{1}</span>'
        '<button type="button" class="copy" data-copy="{0}" aria-label="Copy {2} {1}">copy</button></span>',
        value,
        formatting.digest(value),
        words,
    )


GLYPHS = {
    "sealed": ("ok", "ok"),
    "done": ("ok", "ok"),
    "sealed, nearly empty": ("part", "warn"),
    "held": ("part", "warn"),
    "collecting": ("part", "warn"),
    "running": ("part", "warn"),
    "planned": ("todo", "faint"),
    "not yet": ("todo", "faint"),
    "not applicable": ("none", "faint"),
    "missing": ("none", "bad"),
    "unknown": ("none", "warn"),
    "failed": ("cross", "bad"),
}


@register.simple_tag
def glyph(word: str) -> SafeString:
    """Return the shape of a state with the word as its accessible name (never colour alone)."""
    shape, tone = GLYPHS.get(word.replace("_", " "), ("todo", "faint"))
    return format_html(
        '<svg class="i {}" role="img" aria-label="{}"><use href="#g-{}"/></svg>',
        tone,
        word.replace("_", " "),
        shape,
    )


@register.simple_tag
def swatch(state: str) -> SafeString:
    """Return the coloured square with its glyph of a grid state, hidden from readers (a word follows)."""
    return format_html('<svg class="sw" aria-hidden="true"><use href="#s-{}"/></svg>', state)
