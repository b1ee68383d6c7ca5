"""A paging file, a channel that works, a channel that can be made to fail, and a held run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from incidents.models import Incident
from tests.incidents.conftest import team, world  # noqa: F401 - the same people and the same held run
from tests.incidents.world import held
from tests.paging.receivers import Receiver, receiver

SECRET = "whsec_" + "c2VjcmV0IG9mIGEgd2ViaG9vaywgMzIgYnl0ZXMhIQ=="


@pytest.fixture
def hook() -> Iterator[Receiver]:
    """The receiver of the channel `ops`, our own signed webhook."""
    with receiver() as one:
        yield one


@pytest.fixture
def phone() -> Iterator[Receiver]:
    """The service behind the channel `mira-phone`, reached by Apprise."""
    with receiver() as one:
        yield one


@pytest.fixture
def spare() -> Iterator[Receiver]:
    """The receiver of the channel `spare`, the ladder's last step."""
    with receiver() as one:
        yield one


class File:
    """The operator's file; `write` changes it."""

    def __init__(self, path: Path, channels: dict[str, dict[str, str]]) -> None:
        self.path = path
        self.channels = channels
        self.version = 0

    def write(self, rest: str = "") -> None:
        tables = "\n".join(
            f"[channels.{name}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in one.items())
            for name, one in self.channels.items()
        )
        self.version += 1
        # Its time is looked at: two writes within one tick of the clock must differ.
        self.path.write_text(f"{rest}\n{tables}\n# {self.version}\n", "utf-8")


STEPS = """
repeat_min = 15
steps = [
 {after_min = 0, channels = ["on-call"]},
 {after_min = 5, channels = ["ops"]},
 {after_min = 20, channels = ["spare"]},
]
[on_call]
people = ["mira"]
starts = 2020-01-06T00:00:00Z
"""


@pytest.fixture
def file(tmp_path: Path, settings, hook: Receiver, phone: Receiver, spare: Receiver) -> File:
    """A file with a phone for mira, then `ops` after 5 min, then `spare` after 20."""
    one = File(
        tmp_path / "paging.toml",
        {
            "mira-phone": {"kind": "apprise", "address": f"json://127.0.0.1:{phone.port}/", "person": "mira"},
            "ops": {"kind": "webhook", "address": hook.url("/in"), "secret": SECRET},
            "spare": {"kind": "webhook", "address": spare.url("/in"), "secret": SECRET},
        },
    )
    one.write(STEPS)
    settings.PAGING_FILE = str(one.path)
    return one


def aged(incident: Incident, minutes: float) -> None:
    """Let an incident and its pages be older by so many minutes."""
    from datetime import timedelta

    from django.db.models import F

    from incidents.paging.models import Page
    from runs.models import Work

    by = timedelta(minutes=minutes)
    Incident.objects.filter(pk=incident.pk).update(opened_at=F("opened_at") - by)
    Page.objects.filter(incident=incident).update(
        raised_at=F("raised_at") - by, escalating_since=F("escalating_since") - by
    )
    Work.objects.update(not_before=F("not_before") - by)


@pytest.fixture
def world_(project):
    """A held run on node-00 and node-01, without a paging file."""
    return held(project)
