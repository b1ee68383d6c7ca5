"""A failing run as the pages see it: posted through the receiver, opened and frozen by the real code."""

from types import SimpleNamespace

import pytest

from runs.models import Membership, Role
from tests.pages import seed


@pytest.fixture
def source_root(settings, tmp_path):
    """A directory from which the server may read checkpoints, and a vault of its own."""
    settings.SOURCE_ROOTS = [tmp_path / "sources"]
    settings.VAULT_URL = f"file://{tmp_path}/vault"
    return tmp_path / "sources"


@pytest.fixture
def incident(project, alice, bob, source_root):
    """A held 16-rank run whose rank 13 went nonfinite; alice approves, bob responds."""
    from incidents.models import Incident

    Membership.objects.filter(person=bob).update(roles=[Role.RESPONDER])
    run, secret, step = seed.failing_run(
        "gpt-16", ranks=16, steps=150, root=source_root, bad_rank=13, saved=(60, 120)
    )
    found = Incident.objects.get(run=run)
    return SimpleNamespace(id=found.pk, row=found, run=run, secret=secret, step=step)
