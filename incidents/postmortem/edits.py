"""What people write in a postmortem, under history; and how it becomes final, and is opened again.

Every edit is a new row that says what it was edited from, so that of two people who write at once the
second is told, and nothing that was written is ever lost.
"""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import msgspec
from django.db import transaction
from django.utils import timezone

from andon.canonical import exact
from andon.postmortem.document import PARTS, Document
from incidents import roles, states
from incidents.models import Incident, PostmortemEdit, PostmortemVersion
from incidents.refused import Refused
from runs.models import Person

MOST_TEXT = 20_000
MOST_ACTIONS = 50
FIELDS = {"what": 500, "owner": 100, "due": 10, "ticket": 200}


def current(incident: Incident) -> dict[str, PostmortemEdit]:
    """Return the newest edit of each part."""
    rows = PostmortemEdit.objects.filter(incident=incident).exclude(part="review").select_related("person")
    return {row.part: row for row in rows.order_by("part", "-id").distinct("part")}


def history(incident: Incident) -> list[PostmortemEdit]:
    """Return every edit, newest first."""
    return list(incident.postmortem_edits.select_related("person").order_by("-id"))


def final(incident: Incident) -> PostmortemVersion | None:
    """Return the final version in force; None for a draft."""
    newest = incident.postmortem_versions.select_related("person").order_by("-number").first()
    return newest if newest is not None and newest.document is not None else None


def people(incident: Incident, digest: str) -> tuple[list[Person], list[Person]]:
    """Return who wrote, in the order of their first edit, and who reviewed what has this digest."""
    wrote: dict[int, Person] = {}
    read: dict[int, Person] = {}
    for edit in incident.postmortem_edits.select_related("person").order_by("id"):
        if edit.part != "review":
            wrote.setdefault(edit.person_id, edit.person)
        elif digest and edit.data == [digest]:
            read.setdefault(edit.person_id, edit.person)
    return list(wrote.values()), list(read.values())


def write(*, incident: Incident, person: Person, part: str, text: str, base: int | None) -> PostmortemEdit:
    """Write a new text of a part.

    Args:
        part: one of `andon.postmortem.document.PARTS`.
        base: id of the edit that was shown when the person began, None when nothing was written.

    Raises:
        Refused: not-allowed, final, no-part, too-long, changed-since.
    """
    if part not in PARTS:
        raise Refused("no-part", f"“{part[:40]}” is no part that people write.", status=422)
    text = text.replace("\r\n", "\n").strip()
    if len(text) > MOST_TEXT:
        raise Refused("too-long", f"{len(text):,} characters: at most {MOST_TEXT:,} fit.", status=422)
    return _write(incident, person, part, base, text=text)


def list_actions(
    *, incident: Incident, person: Person, rows: Sequence[Mapping[str, str]], base: int | None
) -> PostmortemEdit:
    """Write a new list of actions; a row without anything in it is left out.

    Raises:
        Refused: not-allowed, final, bad-action, changed-since.
    """
    kept = []
    for number, row in enumerate(rows, start=1):
        told = {name: str(row.get(name, "")).strip() for name in FIELDS}
        if not any(told.values()):
            continue
        _check_action(number, told)
        kept.append(told)
    if len(kept) > MOST_ACTIONS:
        raise Refused("bad-action", f"{len(kept)} actions: at most {MOST_ACTIONS} fit.", status=422)
    return _write(incident, person, "actions", base, data=kept)


def review(*, incident: Incident, person: Person, digest: str) -> PostmortemEdit:
    """Say that one has read the final version with this digest.

    Raises:
        Refused: not-allowed, not-final, changed-since, own-text.
    """
    with transaction.atomic():
        fresh = roles.locked_for(incident, person, "review a postmortem")
        version = final(fresh)
        if version is None:
            raise Refused("not-final", "A draft changes by itself: review it once it is final.")
        if version.digest != digest:
            raise Refused("changed-since", "Another version became final meanwhile. Read that one.")
        wrote, read = people(fresh, digest)
        if person in wrote:
            raise Refused("own-text", "You wrote in it. Somebody else reviews it.")
        if person in read:
            raise Refused("reviewed-already", "You reviewed this version already.")
        return PostmortemEdit.objects.create(
            incident=fresh, part="review", at=timezone.now(), person=person, data=[digest]
        )


def finalise(
    *, incident: Incident, person: Person, document: Document, digest: str, lacks: list[str]
) -> PostmortemVersion:
    """Freeze the postmortem as it is now.

    Args:
        document: the draft, read now.
        digest: of the draft that the person saw.
        lacks: what keeps it from being final.

    Raises:
        Refused: not-allowed, final, not-ready, changed-since.
    """
    with transaction.atomic():
        fresh = roles.locked_for(incident, person, "make a postmortem final")
        _need_draft(fresh)
        if lacks:
            raise Refused("not-ready", f"It cannot be final yet: {'; '.join(lacks)}.")
        if document.digest != digest:
            raise Refused("changed-since", "Its facts or texts changed since you opened it. Read it again.")
        version = PostmortemVersion.objects.create(
            incident=fresh,
            number=fresh.postmortem_versions.count() + 1,
            at=timezone.now(),
            person=person,
            document=exact(msgspec.to_builtins(document)),
            digest=document.digest,
        )
        _tell(fresh, person, f"postmortem made final, version {version.number}, digest {version.digest}")
    return version


def reopen(*, incident: Incident, person: Person, why: str) -> PostmortemVersion:
    """Make a draft of a final postmortem again; the version that was final stays in the history.

    Raises:
        Refused: not-allowed, not-final, reason-needed.
    """
    if not why.strip():
        raise Refused("reason-needed", "Say why: others have read the version that was final.")
    with transaction.atomic():
        fresh = roles.locked_for(incident, person, "open a postmortem again")
        if final(fresh) is None:
            raise Refused("not-final", "It is a draft already.")
        version = PostmortemVersion.objects.create(
            incident=fresh,
            number=fresh.postmortem_versions.count() + 1,
            at=timezone.now(),
            person=person,
            why=why.strip()[:MOST_TEXT],
        )
        _tell(fresh, person, f"postmortem opened again: {version.why}")
    return version


def _write(incident: Incident, person: Person, part: str, base: int | None, **fields: Any) -> PostmortemEdit:
    with transaction.atomic():
        fresh = roles.locked_for(incident, person, "edit a postmortem")
        _need_draft(fresh)
        newest = current(fresh).get(part)
        if (newest.pk if newest else None) != base:
            by = (
                f"{newest.person.username} changed it at {newest.at:%H:%M:%S} UTC" if newest else "it is gone"
            )
            raise Refused(
                "changed-since", f"Not saved: {by}, after you opened it. Yours is below, theirs beside it."
            )
        return PostmortemEdit.objects.create(
            incident=fresh, part=part, at=timezone.now(), person=person, **fields
        )


def _check_action(number: int, told: dict[str, str]) -> None:
    if not told["what"]:
        raise Refused("bad-action", f"Action {number} does not say what is to be done.", status=422)
    for name, most in FIELDS.items():
        if len(told[name]) > most:
            raise Refused(
                "bad-action", f"Action {number}: {name} is longer than {most} characters.", status=422
            )
    if told["due"]:
        try:
            date.fromisoformat(told["due"])
        except ValueError:
            raise Refused(
                "bad-action", f"Action {number}: due must be a date, 2026-11-30.", status=422
            ) from None


def _need_draft(incident: Incident) -> None:
    version = final(incident)
    if version is not None:
        raise Refused("final", f"Version {version.number} is final. Open it again first, with a reason.")


def _tell(incident: Incident, person: Person, text: str) -> None:
    states.record(incident, kind="postmortem", text=text, person=person)
