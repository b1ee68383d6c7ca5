"""Directives in force are signed anew when the key that signed them is no longer believed."""

from datetime import datetime

from django.db import transaction

from andon.directive import from_document
from runs.directives import current, set_directive
from runs.locks import lock_run
from runs.models import Run


def sign_directives_anew() -> int:
    """Give every run its directive again, under the next number and the key in use; returns how many.

    Permits are not signed anew: a person approved them, and has to approve again.
    """
    done = 0
    for run_id in Run.objects.order_by("pk").values_list("pk", flat=True):
        with transaction.atomic():
            run = lock_run(run_id)
            now = current(run_id)
            if now is None:
                continue
            message = from_document(now.document)
            set_directive(
                run=run,
                kind=message.kind,
                attempt=message.attempt,
                incident=now.incident,
                mode=message.mode,
                deadline=datetime.fromisoformat(message.deadline) if message.deadline else None,
                plan=message.plan,
                permit=message.permit or "",
                set_by=now.set_by,
                why="signed anew: the key before it was stolen",
            )
            done += 1
    return done
