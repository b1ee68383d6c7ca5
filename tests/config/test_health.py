"""The probes: what they say, how long they take, what they keep to themselves."""

import socket
import time

import pytest
from django.conf import settings
from django.db import connections
from django.test import Client
from kombu.exceptions import OperationalError

from config import health


@pytest.fixture(autouse=True)
def _ask_afresh(monkeypatch):
    monkeypatch.setattr(health, "_asked_at", float("-inf"))
    monkeypatch.setattr(health, "_reasons", {})


@pytest.fixture
def mute_server():
    """A server that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        yield server.getsockname()[1]


def test_live_needs_nothing_not_even_a_known_host():
    response = Client().get("/healthz", headers={"host": "10.1.2.3"})
    assert (response.status_code, response.content) == (200, b"ok\n")


@pytest.mark.django_db
def test_ready_names_every_part():
    response = Client().get("/readyz")
    assert response.content == b"database: ready\nbroker: ready\nvault: ready\n"
    assert response.status_code == 200


@pytest.mark.django_db
def test_a_broker_that_accepts_and_never_answers_is_unready_within_half_a_second(mute_server, settings):
    settings.BROKER_URL = f"redis://:secret@127.0.0.1:{mute_server}/0"
    began = time.monotonic()
    reason = health.why_not_broker()
    assert time.monotonic() - began <= 0.5
    assert reason is not None
    response = Client().get("/readyz")
    assert response.status_code == 503
    assert response.content == b"database: ready\nbroker: unready\nvault: ready\n"


@pytest.mark.django_db
def test_a_broker_that_refuses_is_unready(settings):
    settings.BROKER_URL = "redis://127.0.0.1:9/0"
    assert b"broker: unready" in Client().get("/readyz").content


@pytest.mark.django_db
def test_a_database_that_never_answers_is_unready_within_its_patience(mute_server, monkeypatch):
    entry = connections.settings["default"]
    monkeypatch.setitem(entry, "HOST", "127.0.0.1")
    monkeypatch.setitem(entry, "PORT", str(mute_server))
    began = time.monotonic()
    assert health.why_not_database() is not None
    assert time.monotonic() - began < 4


@pytest.mark.django_db
def test_a_vault_that_is_gone_is_unready(tmp_path, settings):
    (tmp_path / "file").touch()
    settings.VAULT_URL = f"file://{tmp_path}/file/vault"
    response = Client().get("/readyz")
    assert response.status_code == 503
    assert b"vault: unready" in response.content
    assert str(tmp_path).encode() not in response.content


@pytest.mark.django_db
def test_servers_are_asked_at_most_once_a_second(monkeypatch):
    asked = []
    monkeypatch.setitem(health._PARTS, "broker", lambda: asked.append(1))
    for _ in range(20):
        Client().get("/readyz")
    assert len(asked) == 1


def test_probes_are_read_only():
    assert Client().post("/healthz").status_code == 405


def test_pages_carry_the_policy_that_lets_nothing_else_in():
    response = Client().get("/api/v1/docs")
    policy = dict(
        directive.strip().split(" ", 1)
        for directive in response.headers["Content-Security-Policy"].split(";")
    )
    assert policy["script-src"] == "'self'"
    assert policy["style-src"] == "'self' 'unsafe-inline'"
    assert policy["default-src"] == "'none'"
    assert "unsafe-eval" not in str(policy)
    assert "http" not in str(policy)


def test_the_schedule_rings_only_for_tasks_that_exist():
    from config.celery import app

    app.loader.import_default_modules()
    assert settings.CELERY_BEAT_SCHEDULE
    for entry in settings.CELERY_BEAT_SCHEDULE.values():
        assert entry["task"] in app.tasks


def test_a_bell_never_waits_for_a_broker_that_does_not_answer(mute_server):
    """The promise of `config.settings`: publishing gives up within the socket timeouts, without a retry."""
    from celery import Celery

    app = Celery("t", set_as_current=False)
    app.config_from_object("django.conf:settings", namespace="CELERY")
    app.conf.update(broker_url=f"redis://127.0.0.1:{mute_server}/0")
    began = time.monotonic()
    with pytest.raises(OperationalError, match="Timeout reading"):
        app.send_task("t.nothing")
    assert time.monotonic() - began < 2
