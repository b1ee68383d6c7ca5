"""A link by which one person acknowledges one incident without signing in, and does nothing else.

It is sent with a page to somebody who was asleep. The token is signed, names its purpose, the incident and
the person, and expires; who gave it away gave away that somebody looks at the incident, never an approval.
"""

from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.core import signing

from incidents.models import Incident
from runs.access import project_member
from runs.models import Person

VALID_FOR = timedelta(hours=12)  # a night
_SALT = "andon.acknowledge/1"  # the purpose: nothing else accepts these tokens, and this accepts no other
_MOST_CHARS = 400


@dataclass(frozen=True, slots=True)
class Link:
    """Whose link it is, and whether its time is over."""

    incident: Incident
    person: Person
    expired: bool


def address(incident: Incident, person: Person) -> str:
    """Return the link to send to `person`, absolute."""
    return f"{settings.PUBLIC_URL}/acknowledge/{token(incident, person)}"


def token(incident: Incident, person: Person) -> str:
    """Return the token of one incident and one person, valid for `VALID_FOR`."""
    return signing.dumps({"i": incident.pk, "p": str(person.opaque_id)}, salt=_SALT)


def read(text: str) -> Link | None:
    """Return what a token says; None for what is none of ours, or whose person may not see it now."""
    if len(text) > _MOST_CHARS:
        return None
    expired = False
    try:
        said = signing.loads(text, salt=_SALT, max_age=VALID_FOR)
    except signing.SignatureExpired:
        said, expired = signing.loads(text, salt=_SALT), True
    except signing.BadSignature:
        return None
    incident = Incident.objects.select_related("run__project", "dossier", "acknowledged_by", "lead").filter(
        pk=said["i"]
    )
    person = Person.objects.filter(opaque_id=said["p"], is_active=True)
    found, who = incident.first(), person.first()
    if found is None or who is None or not project_member(who, found.run.project):
        return None
    return Link(found, who, expired)
