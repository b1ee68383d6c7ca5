"""The held run of the pages' tests, with all that people did."""

import pytest

from runs import identity
from tests.pages.conftest import full, incident, source_root  # noqa: F401


@pytest.fixture(autouse=True)
def _nothing_from_another_test():
    """Secrets of runs that were rolled back: a process keeps those for seconds."""
    identity.forget()
