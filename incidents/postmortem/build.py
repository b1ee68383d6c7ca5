"""A whole postmortem: facts from the rows, prose from people, frozen once it is final."""

from collections.abc import Callable
from typing import Any

import msgspec

from andon.postmortem.document import (
    PARTS,
    Action,
    Actions,
    Document,
    Item,
    Prose,
    Section,
    Version,
    finished,
    people_in,
)
from incidents.models import Incident, PostmortemEdit, PostmortemVersion
from incidents.postmortem import edits, failure, head, resumed, story
from incidents.postmortem.book import Book
from incidents.postmortem.facts import Facts
from incidents.postmortem.figures import figures
from incidents.postmortem.words import plain, stamp, who
from runs.models import Person


def of(incident: Incident) -> Document:
    """Return the postmortem: the final version where there is one, else the draft as of now.

    Names of people stay ids; `named` puts them in.
    """
    final = edits.final(incident)
    if final is None:
        return draft(incident)
    document = msgspec.convert(final.document, Document)
    return msgspec.structs.replace(document, version=_final(incident, final))


def draft(incident: Incident) -> Document:
    """Return the postmortem as the rows are now."""
    facts, book = Facts(incident), Book(incident)
    current = edits.current(incident)
    sections = (
        Section("impact", "Impact", (*head.impact(book, facts), *_prose(current, "impact"))),
        Section("failure", "First failure", (*failure.first_failure(book, facts), *figures(book, facts))),
        Section("symptom", "Symptom and scope", tuple(failure.symptom(book, facts))),
        Section("changed", "What changed", tuple(failure.changed(book, facts))),
        Section("timeline", "Timeline", (head.phases(book, facts), head.timeline(book, facts))),
        Section("hypotheses", "Hypotheses", tuple(story.hypotheses(book, facts))),
        Section("cause", "Cause", (*story.cause(book, facts), *_prose(current, "cause"))),
        Section("recovery", "Recovery", (*story.recovery(book, facts), *resumed.after(book, facts))),
        Section("regime", "Regime changes", tuple(story.regime(book, facts))),
        Section("learned", "What we learned", tuple(_prose(current, "learned"))),
        Section("actions", "Actions", tuple(_actions(current))),
        Section("evidence", "Evidence", tuple(story.evidence(book, facts))),
    )
    summary = Section("summary", "Summary", tuple(_prose(current, "summary")))
    document = Document(
        incident=f"I-{incident.pk}",
        run=incident.run.slug,
        title=plain(incident.title, 200),
        version=_draft(incident, facts),
        head=head.head(book, facts),
        sections=(summary, *sections),
        appendix=book.appendix(),
    )
    return finished(document)


def named(document: Document) -> Document:
    """Return the document with the names of people as they are now."""
    wanted = people_in(document)
    rows = Person.objects.filter(opaque_id__in=wanted).values_list("opaque_id", "username")
    return document.text({str(opaque_id): plain(name, 48) for opaque_id, name in rows})


def lacks(incident: Incident) -> list[str]:
    """Return what keeps a draft from being made final, [] when nothing does."""
    facts = Facts(incident)
    wanting: list[Callable[[], str]] = [
        lambda: (
            "" if incident.resolved_at else f"the incident is {incident.state.replace('_', ' ')}, not over"
        ),
        lambda: "" if facts.gate.open else "required evidence is neither sealed nor waived by name",
        lambda: "" if "summary" in edits.current(incident) else "nobody has written the summary",
        lambda: "" if facts.cause else "the cause is open: close it as known, probable or unknown",
    ]
    return [said for said in (ask() for ask in wanting) if said]


def _prose(current: dict[str, PostmortemEdit], part: str) -> list[Item]:
    edit = current.get(part)
    if edit is None or not edit.text:
        return []
    return [Prose(part, edit.text, who(edit.person), stamp(edit.at))]


def _actions(current: dict[str, PostmortemEdit]) -> list[Item]:
    edit = current.get("actions")
    if edit is None or not edit.data:
        return []
    rows = tuple(msgspec.convert(row, Action) for row in edit.data)
    return [Actions(rows, who(edit.person), stamp(edit.at))]


def _draft(incident: Incident, facts: Facts) -> Version:
    counts = facts.counts
    says = f"Draft, evidence {counts['sealed']} of {counts['required']} sealed"
    return Version(status="draft", says=says, **_people(incident))


def _final(incident: Incident, final: PostmortemVersion) -> Version:
    return Version(
        status="final",
        says="",
        number=final.number,
        at=f"{stamp(final.at)} by {who(final.person)}",
        **_people(incident, final),
    )


def _people(incident: Incident, final: PostmortemVersion | None = None) -> dict[str, Any]:
    """Return who wrote and who reviewed: reviews count for the digest they were given for."""
    wrote, read = edits.people(incident, final.digest if final else "")
    return {"authors": tuple(map(who, wrote)), "reviewers": tuple(map(who, read))}


__all__ = ["PARTS", "draft", "lacks", "named", "of"]
