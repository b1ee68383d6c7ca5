"""Posts are answered before the middleware for people, and in the same way as through the API."""

from typing import Any

import pytest
from django.conf import settings
from django.test import Client

from tests.runs.conftest import Trainer, rank_frame

pytestmark = pytest.mark.django_db
STEP = {"type": "step", "step": 7, "data": {"loss": 2.5}}


def through_the_api(settings: Any) -> None:
    settings.MIDDLEWARE = [name for name in settings.MIDDLEWARE if name != "runs.shortcut.answer_posts"]


@pytest.mark.parametrize("body", [b'{"type": "step", "step": 7}', b"{", b"", b'{"type": "step", "step": -1}'])
def test_both_ways_answer_alike(trainer: Trainer, settings: Any, body: bytes) -> None:
    short = trainer.post(body)
    through_the_api(settings)
    trainer.client = Client(headers={"host": "localhost"})
    long = trainer.post(body)
    assert (short.status_code, short["Content-Type"]) == (long.status_code, long["Content-Type"])
    assert short.json() == long.json()


def test_frames_too(trainer: Trainer, settings: Any) -> None:
    frame = rank_frame(steps=range(1), ranks=range(2))
    short = trainer.frame(frame)
    through_the_api(settings)
    trainer.client = Client(headers={"host": "localhost"})
    assert trainer.frame(frame).json() == short.json()


def test_a_post_carries_no_page_headers_and_its_length(trainer: Trainer) -> None:
    answer = trainer.events(STEP)
    assert answer["Content-Length"] == str(len(answer.content))
    assert "Content-Security-Policy" not in answer
    assert not answer.cookies


@pytest.mark.parametrize("method", ["get", "put", "delete"])
def test_other_methods_are_405(trainer: Trainer, method: str) -> None:
    assert getattr(trainer.client, method)(f"/api/v1/runs/{trainer.run.slug}/events").status_code == 405


def test_it_stands_before_all_that_is_for_people() -> None:
    assert settings.MIDDLEWARE.index("runs.shortcut.answer_posts") == 1


def test_a_host_that_is_not_ours_is_400_and_not_500(trainer: Trainer) -> None:
    client = Client(headers={"host": "elsewhere.example"}, raise_request_exception=False)
    for path in (f"/api/v1/runs/{trainer.run.slug}/directive", "/runs"):
        assert client.get(path).status_code == 400
