"""How the way to people does: lines of the System page, and the channels of the on-call page."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.utils import timezone

from incidents.paging import deadman, on_call
from incidents.paging.ladder import paging
from incidents.paging.models import Beat, ChannelState, OnCallAnswer, Page
from runs import formatting as words
from runs.models import HookToken, Person


@dataclass(frozen=True, slots=True)
class ChannelLine:
    """One channel of the file, never with its address."""

    name: str
    kind: str
    person: str
    last_sent_at: datetime | None
    failing_since: datetime | None
    error: str


@dataclass(frozen=True, slots=True)
class Line:
    """One line: `word` is done | running | missing | unknown, as the glyphs of the System page are named."""

    name: str
    glyph: str
    says: str
    number: str = ""


def channels() -> list[ChannelLine]:
    """Return every channel of the file with what is known of it."""
    known = {state.name: state for state in ChannelState.objects.all()}
    lines = []
    for name, channel in paging().channels.items():
        state = known.get(name, ChannelState(name=name))
        lines.append(
            ChannelLine(
                name, channel.kind, channel.person, state.last_sent_at, state.failing_since, state.error
            )
        )
    return lines


def external(now: datetime) -> str:
    """Return what the external on-call address does, "" where there is none or it answers."""
    row = OnCallAnswer.objects.order_by("id").first() if settings.ONCALL_URL else None
    if row is None:
        return "" if not settings.ONCALL_URL else "the on-call address was not asked yet"
    if not row.error:
        return ""
    since = f"since {words.clock(row.answered_at, now)} UTC" if row.answered_at else "yet"
    return f"the on-call address has not answered {since}: {words.inert(row.error, 200)}"


def lines(person: Person) -> list[Line]:
    """Return the System page's lines on paging: the sweep, the way to people, who is on call."""
    now = timezone.now()
    return [_sweep(now), _paging(now), _on_call(person, now), _hooks(person, now)]


def _sweep(now: datetime) -> Line:
    last = Beat.objects.filter(name=deadman.SWEEP).values_list("at", flat=True).first()
    if last is None:
        return Line("Sweep", "unknown", "unknown: none was seen yet")
    late = now - last > timedelta(seconds=settings.SWEEP_MISSED_S)
    return Line("Sweep", "missing" if late else "done", f"ran {words.ago(last, now)}")


def _paging(now: datetime) -> Line:
    known, all_channels = paging(), channels()
    failing = [one for one in all_channels if one.failing_since is not None]
    up = Page.objects.filter(ended_at=None, acknowledged_at=None).count()
    number = words.plural(up, "page") + " up" if up else ""
    if known.why:
        return Line("Paging", "missing", words.inert(known.why, 240), number)
    if not all_channels or not (known.default.steps or known.projects):
        return Line("Paging", "missing", "the file names no channel or no step: nobody is paged", number)
    if failing:
        worst = failing[0]
        since = words.ago(worst.failing_since, now) if worst.failing_since else ""
        more = f" and {len(failing) - 1} more" if len(failing) > 1 else ""
        says = f"{worst.name}{more} fails, first {since}: {words.inert(worst.error, 160)}"
        return Line("Paging", "running" if len(failing) < len(all_channels) else "missing", says, number)
    sent = [one.last_sent_at for one in all_channels if one.last_sent_at is not None]
    if not sent:
        return Line("Paging", "unknown", "not proven: nothing was sent yet (manage.py paging --test)", number)
    unproven = len(all_channels) - len(sent)
    says = f"proven {words.ago(max(sent), now)}"
    if unproven:
        says += f"; {words.plural(unproven, 'channel')} never took a message"
    return Line("Paging", "done" if not unproven else "running", says, number)


def _hooks(person: Person, now: datetime) -> Line:
    tokens = list(
        HookToken.objects.filter(project__memberships__person=person, revoked_at=None).order_by("id")
    )
    if not tokens:
        return Line("Hooks", "done", "no fleet tool has a token")
    used = [one.last_used_at for one in tokens if one.last_used_at is not None]
    says = f"last used {words.ago(max(used), now)}" if used else "never used"
    refused = sum(one.refused for one in tokens)
    if refused:
        why = next(one.refused_why for one in tokens if one.refused)
        says += f"; {words.plural(refused, 'body', 'bodies')} refused: {words.inert(why, 120)}"
    return Line("Hooks", "running" if refused else "done", says, words.plural(len(tokens), "token"))


def _on_call(person: Person, now: datetime) -> Line:
    holder, problem = on_call.of_person(person, now), external(now)
    if holder is None:
        return Line("On call", "missing", problem or "nobody: the paging file has no list")
    until = f" until {words.clock(holder.until, now)} UTC" if holder.until else ""
    following = f", then {words.inert(holder.following, 48)}" if holder.following else ""
    says = f"{words.inert(holder.name, 48)}{until}{following}"
    if problem or holder.warn:
        return Line("On call", "running", f"{says}; {problem or holder.warn}")
    return Line("On call", "done", says)
