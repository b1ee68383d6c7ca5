"""What every page shows around its content: open incidents, the alarm line, who is signed in.

A context processor of its own, because pages of lower apps need it and may not import this app.
"""

from functools import cached_property

from django.http import HttpRequest
from django.utils import timezone
from django.utils.functional import SimpleLazyObject

from incidents import queries
from incidents.alarms import alarm_lines
from incidents.models import Incident
from incidents.page import AlarmLine
from incidents.paging import on_call
from runs.access import memberships
from runs.models import Person


class Frame:
    """Read only as far as a template asks: an error page or sign-in asks for nothing."""

    def __init__(self, request: HttpRequest) -> None:
        """Remember whose page it is."""
        user = getattr(request, "user", None)
        self.person = user if isinstance(user, Person) and user.is_authenticated else None
        self.now = timezone.now()
        self.nav = request.path.split("/")[1]  # which of the names in the bar this page belongs to

    @cached_property
    def on_call(self) -> on_call.Holder | None:
        """Who has the pager; read from rows, so that no outside address makes a page wait."""
        return on_call.of_person(self.person, self.now) if self.person is not None else None

    @property
    def theme(self) -> str:
        """The person's choice, system for a visitor."""
        return self.person.theme if self.person is not None else "system"

    @cached_property
    def open_count(self) -> int:
        """How many incidents are not resolved."""
        return queries.open_count(self.person) if self.person is not None else 0

    @cached_property
    def alarms(self) -> list[AlarmLine]:
        """One line per run that is held or has an unacknowledged incident."""
        return alarm_lines(self.person) if self.person is not None else []

    @cached_property
    def unresolved(self) -> dict[int, Incident]:
        """Unresolved incident by run id, for pages of runs."""
        if self.person is None:
            return {}
        rows = queries.visible_incidents(self.person).filter(state__in=Incident.UNRESOLVED)
        return {row.run_id: row for row in rows}

    @cached_property
    def roles(self) -> str:
        """The person's roles over all projects, in words."""
        if self.person is None:
            return ""
        mine = {role for row in memberships(self.person) for role in row.roles}
        return ", ".join(sorted(role.replace("_", " ") for role in mine))


def frame(request: HttpRequest) -> dict[str, object]:
    """Put `frame` into every template."""
    return {"frame": SimpleLazyObject(lambda: Frame(request))}
