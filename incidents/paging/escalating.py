"""When whom: the turns of a page that are due, from the ladder, the time, and what was sent already.

Pure apart from `escalate`, so that a ladder can be tried without a database.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction

from incidents.paging import on_call, texts
from incidents.paging.ladder import ON_CALL, Channel, Ladder, Paging, paging
from incidents.paging.models import Delivery, Page
from runs.work import enqueue

DELIVER = "incidents.deliver"
# A request to resume waits for one of the approvers; when none has answered, everybody is told.
APPROVERS_FIRST_MIN = 10.0
What = Delivery.What


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a page: after so long since it was raised, over these channels."""

    number: int
    after: timedelta
    channels: tuple[str, ...]


def turns(ladder: Ladder, resolve: Callable[[str], list[str]]) -> list[Turn]:
    """Return a ladder's turns. A step that reaches nobody gives way: the next one starts in its place.

    Args:
        resolve: the channels that a name in a step stands for.
    """
    made: list[Turn] = []
    empty_since: float | None = None
    for number, step in enumerate(ladder.steps):
        names = tuple(dict.fromkeys(one for name in step.channels for one in resolve(name)))
        start = step.after_min if empty_since is None else empty_since
        if not names:
            empty_since = start
            continue
        empty_since = None
        made.append(Turn(number, timedelta(minutes=start), names))
    return made


def repetition(made: list[Turn], ladder: Ladder, waited: timedelta) -> tuple[Turn | None, timedelta | None]:
    """Return the newest repetition of the last turn that is due, and after how long the next one is.

    Only the newest: after a night without a worker nobody needs the last forty pages at once.
    """
    every = timedelta(minutes=ladder.repeat_min or 0)
    if not made or not every:
        return None, None
    last = made[-1]
    times = max(0, (waited - last.after) // every)
    due = Turn(len(ladder.steps) + times - 1, last.after + times * every, last.channels) if times else None
    return due, last.after + (times + 1) * every


def escalate(page: Page, now: datetime) -> datetime | None:
    """Send what is due of a page; returns when to look again, None when nothing is to come.

    The caller holds the page's row.
    """
    known = paging()
    if page.ended_at is not None:
        _tell_the_end(page, known, What.RESOLVED, now)
        return None
    if page.acknowledged_at is not None:
        _tell_the_end(page, known, What.ACKNOWLEDGED, now)
        return None
    due, following = _now(page, known, now)
    for turn in due:
        _create(page, known, turn.number, turn.channels, now)
    return following


def is_unfinished(page: Page, now: datetime) -> bool:
    """Return whether a page has something to send, now or later: it then needs somebody who does it."""
    known = paging()
    due, following = _now(page, known, now)
    return following is not None or any(_missing(page, known, turn.number, turn.channels) for turn in due)


def _now(page: Page, known: Paging, now: datetime) -> tuple[list[Turn], datetime | None]:
    """Return the turns that are due, and when the next one is."""
    ladder = known.ladder(page.project.slug if page.project else "")
    waited = now - page.escalating_since
    made, repeats = plan(page, ladder, known, now)
    due = [turn for turn in made if turn.after <= waited]
    later = [turn.after for turn in made if turn.after > waited]
    if repeats:
        repeated, following = repetition(made, ladder, waited)
        due += [repeated] if repeated else []
        later += [following] if following is not None else []
    return due, page.escalating_since + min(later) if later else None


def plan(page: Page, ladder: Ladder, known: Paging, now: datetime) -> tuple[list[Turn], bool]:
    """Return the turns of this page, and whether the last one repeats until somebody has it."""

    def resolve(name: str) -> list[str]:
        if name != ON_CALL:
            return [name]
        holder = on_call.of_project(page.project, now) if page.project else None
        return known.of_person(holder.name) if holder is not None else []

    kinds = Page.Kind
    if page.kind == kinds.PERSON:
        own = [name for person in page.to_people for name in known.of_person(person)]
        return ([Turn(0, timedelta(0), tuple(own))] if own else []), False
    made = turns(ladder, resolve)
    if page.kind == kinds.BREAK_GLASS:
        return ([Turn(0, timedelta(0), tuple(known.channels))] if known.channels else []), False
    if page.kind == kinds.APPROVAL:
        return _approvers_first(page, known, made), True
    if not page.urgent:
        quiet = tuple(dict.fromkeys(one for name in ladder.quiet for one in resolve(name)))
        quiet = quiet or (made[0].channels if made else ())
        return ([Turn(0, timedelta(0), quiet)] if quiet else []), False
    return made, True


def _approvers_first(page: Page, known: Paging, made: list[Turn]) -> list[Turn]:
    """Approvers who may answer get it at once; the ladder follows ten minutes later."""
    own = [name for person in page.to_people for name in known.of_person(person)]
    if not own:
        return made
    shift = timedelta(minutes=APPROVERS_FIRST_MIN)
    # The approvers' turn comes before the ladder's: its number is beyond any step and any repetition.
    return [Turn(1_000_000, timedelta(0), tuple(own))] + [
        Turn(one.number, one.after + shift, one.channels) for one in made
    ]


def use_next(page_id: int, failed: str, now: datetime) -> None:
    """After a channel failed: use the next channel of the ladder that this round has not used, at once."""
    with transaction.atomic():
        page = Page.objects.select_for_update(of=("self",)).select_related("project").get(pk=page_id)
        if page.ended_at is not None or page.acknowledged_at is not None:
            return
        known = paging()
        made, _ = plan(page, known.ladder(page.project.slug if page.project else ""), known, now)
        used = {name for round_, _, name in _made(page) if round_ in (0, page.round)} | {failed}
        for turn in made:
            for name in turn.channels:
                if name not in used:
                    _create(page, known, turn.number, (name,), now)
                    return


def _made(page: Page) -> set[tuple[int, int, str]]:
    """Return round, turn and channel of what is there of a page."""
    rows = page.deliveries.filter(what=What.RAISED)
    return {(one.round, one.turn, one.channel) for one in rows if one.round or _stands(page, one)}


def _stands(page: Page, alert: Delivery) -> bool:
    """Whether an alert is one of this life of the page, and was not given up before it was raised anew."""
    given_up = alert.state == Delivery.State.DROPPED and alert.created_at < page.escalating_since
    return alert.created_at >= page.raised_at and not given_up


def _missing(
    page: Page, known: Paging, turn: int, names: Iterable[str]
) -> list[tuple[Channel, tuple[int, int]]]:
    """Return the channels of a turn that have no delivery of it yet, with its round and number."""
    there, missing = _made(page), []
    for name in names:
        channel = known.channels.get(name)
        if channel is None:
            continue
        # An alert is one for the whole life of the page: its own delivery sends it again while it fires.
        place = (0, 0) if channel.kind == "alertmanager" else (page.round, turn)
        if (*place, name) not in there:
            missing.append((channel, place))
    return missing


def _create(page: Page, known: Paging, turn: int, names: Iterable[str], now: datetime) -> None:
    """Write the deliveries of a turn that are not there yet, and ask for each."""
    for channel, place in _missing(page, known, turn, names):
        _write(page, channel, What.RAISED, *place, now)


def _tell_the_end(page: Page, known: Paging, what: str, now: datetime) -> None:
    """Tell every channel that was told the beginning; of an acknowledgement only tools hear."""
    # A page that was over and is raised anew begins again: who was told of its earlier life was told its end.
    begun = list(page.deliveries.filter(what=What.RAISED, created_at__gte=page.raised_at).order_by("id"))
    told = {one.channel for one in begun if one.state == Delivery.State.SENT}
    there = set(page.deliveries.filter(what=what, round=page.round).values_list("channel", flat=True))
    for name in dict.fromkeys(one.channel for one in begun if one.channel in told):
        channel = known.channels.get(name)
        if channel is None or channel.kind == "alertmanager" or name in there:
            continue
        if what == What.RESOLVED or channel.kind == "webhook":
            _write(page, channel, what, page.round, 0, now)
    for one in begun:
        firing = known.channels.get(one.channel)
        alert = firing is not None and firing.kind == "alertmanager" and what == What.RESOLVED
        if one.state == Delivery.State.DUE or alert:
            ask_delivery(one.pk)  # it finds that all is over: gives up, or resolves its alert


def _write(page: Page, channel: Channel, what: str, round_: int, turn: int, now: datetime) -> None:
    """Write one delivery, its words and key fixed before it is first tried."""
    title, text = texts.message(page, channel, what, now)
    said = {"title": title, "text": text, "created_at": now, "state": Delivery.State.DUE, "error": ""}
    # Only an alert is ever there already: the one of an earlier life, which fires again.
    delivery, _ = Delivery.objects.update_or_create(
        page=page,
        what=what,
        round=round_,
        turn=turn,
        channel=channel.name,
        defaults=said,
        create_defaults={**said, "key": texts.key(page, channel.name, what, round_, turn)},
    )
    ask_delivery(delivery.pk)


def ask_delivery(pk: int) -> None:
    """Have one delivery tried as soon as this transaction has committed."""
    enqueue(kind=DELIVER, key=str(pk), payload={"delivery": pk})
