"""The one door by which a held run goes on: request, approval, permit.

Button, API and command call these functions. All of them raise `Refused(code, says)`.
"""

from typing import Any

from incidents.models import Approval, Incident, ResumeRequest
from runs.models import Person, Run


def subject(incident: Incident) -> tuple[dict[str, Any], str]:
    """Return what an approver signs, and its SHA-256 over RFC 8785 (lower-case hex)."""
    raise NotImplementedError


def request_resume(*, incident: Incident, person: Person, digest: str, note: str = "") -> ResumeRequest:
    """Ask to resume by exactly what the page showed (`digest`)."""
    raise NotImplementedError


def approve(*, incident: Incident, person: Person, digest: str) -> Approval:
    """Approve the live request; the last approval needed issues the permit."""
    raise NotImplementedError


def reject(*, incident: Incident, person: Person, why: str) -> ResumeRequest:
    """Reject the live request with a reason."""
    raise NotImplementedError


def false_alarm(*, incident: Incident, person: Person, why: str) -> Incident:
    """Declare that nothing was wrong: one approver, a reason, resume in place, evidence kept."""
    raise NotImplementedError


def exchange(*, run: Run, incident_id: int, attempt: int, webhook_id: str) -> dict[str, Any]:
    """Hand the permit out, once: the same `webhook_id` gets the same document again."""
    raise NotImplementedError
