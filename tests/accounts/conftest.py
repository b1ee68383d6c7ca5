"""People with the ways to sign in that the tests need."""

import re

import pytest
from django.core.cache import cache
from django.test import Client

from runs import identity
from tests.pages.conftest import incident, source_root  # noqa: F401  (a held run)


@pytest.fixture(autouse=True)
def _nothing_from_another_test():
    """Counters of failures, and secrets of runs that were rolled back: a process keeps those for seconds."""
    cache.clear()
    identity.forget()


def text_of(response):
    """Return a page's words: no tags, folded blanks."""
    html = re.sub(r"<(script|style|title)\b.*?</\1>", " ", response.content.decode(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html).replace("&#x27;", "'").replace("&amp;", "&"))


def signed_in(name, password=None):
    """Return a browser in which a person signed in by their password, as a person does."""
    client = Client()
    answer = client.post("/sign-in", {"username": name, "password": password or f"{name}-password"})
    assert answer.status_code == 302, text_of(answer)
    return client
