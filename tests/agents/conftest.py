"""Nodes whose disks the server cannot read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import LazySettings

from runs import identity
from tests.agents.beside import Node
from tests.evidence import world
from tests.evidence.conftest import clock, s3_url
from tests.servers import S3

__all__ = ["clock"]  # a fixture of the vault's tests


@pytest.fixture
def vault_dir(tmp_path: Path, settings: LazySettings) -> Path:
    """A directory vault."""
    settings.VAULT_URL = f"file://{tmp_path}/vault"
    settings.DATA_DIR = tmp_path / "data"
    settings.SOURCE_ROOTS = []
    return tmp_path / "vault"


@pytest.fixture
def vault_s3(s3_endpoint: S3, s3_bucket: str, tmp_path: Path, settings: LazySettings) -> str:
    """A vault in a fresh bucket with Object Lock."""
    settings.VAULT_URL = s3_url(s3_endpoint, s3_bucket)
    settings.DATA_DIR = tmp_path / "data"
    settings.SOURCE_ROOTS = []
    return s3_bucket


@pytest.fixture
def node(live_server: Any, tmp_path: Path) -> Iterator[Node]:
    """Node n1 of a fresh run, with a server that answers it."""
    identity.forget()
    made = Node(live_server.url, world.make_run(), tmp_path / "node" / "disk", tmp_path / "node" / "state")
    yield made
    made.kill()
