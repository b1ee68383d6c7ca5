"""What outsiders named is text on every page and in every part of one: no markup, no reordering, no flood."""

from types import SimpleNamespace
from typing import Any

import pytest
from django.db.models import Model
from django.test import Client

from evidence.models import Dossier, Item, StoredObject
from incidents.models import Incident, Note, Plan, StateChange
from runs.models import Attempt, Finding, NodeEvent, NodeReading, NodeStay, RunProgress, UnreadBody
from tests.pages import seed
from tests.pages.window import addresses, names
from tests.pages.words import HOSTILE, is_inert

pytestmark = pytest.mark.django_db(transaction=True)


def again(row: Model, **fields: str) -> None:
    """Write a row once more with other fields: what is append-only is not changed."""
    row.pk, row._state.adding = None, True
    for name, value in fields.items():
        setattr(row, name, value)
    row.save(force_insert=True)


def test_names_from_outside_are_inert_everywhere(
    as_bob: Client, bob, incident: SimpleNamespace, full: dict[str, Any]
) -> None:
    seed.post_events(
        "gpt-16",
        incident.secret,
        [{"type": "process.error", "attempt": 1, "rank": 13, "step": 150, "data": {"message": HOSTILE}}],
    )
    run, row = incident.run, incident.row
    Attempt.objects.filter(run=run).update(
        nodes=[{"node": HOSTILE, "ranks": list(range(16))}],
        permit_id=HOSTILE[:64],
        data={"config": {HOSTILE[:100]: HOSTILE}, "revision": HOSTILE, "image": HOSTILE},
    )
    at = row.opened_at
    NodeStay.objects.create(run=run, attempt=1, node=HOSTILE[:200], switch=HOSTILE[:100])
    NodeEvent.objects.create(
        run=run,
        attempt=1,
        node="node-01",
        kind="state",
        occurred_at=at,
        received_at=at,
        data={"state": HOSTILE, "reason": HOSTILE},
    )
    NodeReading.objects.create(run=run, attempt=1, node="node-01", device=HOSTILE[:60], step=1, at=at)
    RunProgress.objects.filter(run=run).update(not_watched_since=row.opened_at, not_watched_why=HOSTILE)
    again(Finding.objects.filter(run=run).first(), series=HOSTILE[:60], detail=HOSTILE, says="f" * 64)
    UnreadBody.objects.create(
        run=run,
        webhook_id=HOSTILE[:60],
        received_at=row.opened_at,
        status=422,
        problem={"detail": HOSTILE, "field": HOSTILE},
        body=b"x",
        bytes_total=1,
    )
    Incident.objects.filter(pk=row.pk).update(
        title=HOSTILE[:200], family_why=HOSTILE, first_bad=row.first_bad | {"layer": HOSTILE}
    )
    # A note is a person's own prose: it may be long, and stands whole.
    Note.objects.create(incident=row, person=bob, at=row.opened_at, text=HOSTILE[:3_000])
    Plan.objects.filter(incident=row).update(why=HOSTILE)
    again(StateChange.objects.filter(incident=row).first(), why=HOSTILE)
    Dossier.objects.filter(run=run).update(label=HOSTILE[:200], why=HOSTILE)
    item = Item.objects.get(pk=full["item_id"])
    Item.objects.filter(pk=item.pk).update(name=HOSTILE[:200], why=HOSTILE)
    StoredObject.objects.filter(item=item).update(path=HOSTILE, version_id=HOSTILE[:200])

    assert names() <= set(full)
    shown = 0
    for address in [*addresses(full), "/search?q=%3Cscript%3Ealert(1)%3C/script%3E", "/runs?q=%3Cscript%3E"]:
        answer = as_bob.get(address)
        assert answer.status_code < 500, address
        if answer.status_code == 200 and answer["Content-Type"].startswith("text/html"):
            is_inert(answer.content.decode(), address)
            shown += "\ufffd" in answer.content.decode()
    # The names do stand there, or nothing was tried.
    assert shown >= 10
