"""A vault and a place for checkpoints, both real."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings
from django.utils import timezone

from evidence.models import Dossier
from evidence.proof.exporting import export_bag
from evidence.signals import vault_alarm
from tests.evidence import world
from tests.servers import S3


@pytest.fixture
def sources(tmp_path: Path, settings: LazySettings) -> Path:
    """A directory this server may read evidence from."""
    root = tmp_path / "scratch"
    root.mkdir()
    settings.SOURCE_ROOTS = [root]
    return root


@pytest.fixture
def vault_dir(tmp_path: Path, settings: LazySettings) -> Path:
    """A directory vault."""
    settings.VAULT_URL = f"file://{tmp_path}/vault"
    settings.DATA_DIR = tmp_path / "data"
    return tmp_path / "vault"


def s3_url(endpoint: S3, bucket: str) -> str:
    host = endpoint.url.removeprefix("http://")
    return f"s3+http://{endpoint.access_key}:{endpoint.secret_key}@{host}/{bucket}"


@pytest.fixture
def vault_s3(s3_endpoint: S3, s3_bucket: str, tmp_path: Path, settings: LazySettings) -> str:
    """A vault in a fresh bucket with Object Lock; the bucket's name."""
    settings.VAULT_URL = s3_url(s3_endpoint, s3_bucket)
    settings.DATA_DIR = tmp_path / "data"
    return s3_bucket


class Clock:
    """How far ahead of the real time Django's is."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def pass_days(self, days: float) -> None:
        self.ahead += timedelta(days=days)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Lets days pass for whatever asks Django for the time; stores keep the real one."""
    made = Clock()
    real = timezone.now
    monkeypatch.setattr(timezone, "now", lambda: real() + made.ahead)
    return made


@pytest.fixture
def dossier(sources: Path, vault_dir: Path) -> Dossier:
    """A small sealed dossier: two items, two seals, a few hundred bytes."""
    run = world.make_run()
    world.post(run, "step", 1000, data={"loss": None, "skipped": True}, flags={"data.loss": "nan"})
    opened = world.open_dossier(run, rules=world.policy("event_log", "topology"))
    world.work(opened)
    assert opened.seals.count() == 2
    return opened


@pytest.fixture
def bag(dossier: Dossier, tmp_path: Path) -> Path:
    """Its bag, as a directory."""
    path = tmp_path / "bag"
    export_bag(dossier, path)
    return path


@pytest.fixture
def alarms() -> Iterator[list[tuple[str, str]]]:
    """What people are told about the vault: (what, says) of each alarm."""
    heard: list[tuple[str, str]] = []

    def hear(what: str, says: str, **_: Any) -> None:
        heard.append((what, says))

    vault_alarm.connect(hear)
    yield heard
    vault_alarm.disconnect(hear)
