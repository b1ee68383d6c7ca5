"""One house for the tests that leave it whole; those that kill it build their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import LazySettings

from tests.faults import house as houses
from tests.faults.house import House, Poster
from tests.faults.shop import Shop
from tests.servers import S3


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A running server. Every test takes a run of its own and puts back what it broke."""
    built = houses.start(tmp_path_factory.mktemp("house") / "var")
    yield built
    built.up.end()
    left = built.up.processes()
    built.up.kill_whatever_is_left()
    assert left == {}


@pytest.fixture
def poster(house: House) -> Poster:
    """A trainer of a fresh run."""
    return house.new_run()


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., House]]:
    """Build a house of this test's own: `build(NAME=value)` adds to its environment."""
    built: list[House] = []

    def one(**more: str) -> House:
        built.append(houses.start(tmp_path / f"var{len(built)}", **more))
        return built[-1]

    yield one
    for each in built:
        each.up.kill_whatever_is_left()


@pytest.fixture(scope="session")
def _shop(s3_endpoint: S3, tmp_path_factory: pytest.TempPathFactory, django_db_setup: None) -> Iterator[Shop]:
    # After `django_db_setup`: workers must be gone when the database is dropped.
    built = Shop(s3_endpoint, tmp_path_factory.mktemp("shop"))
    yield built
    built.close()


@pytest.fixture
def shop(_shop: Shop, transactional_db: None, settings: LazySettings) -> Iterator[Shop]:
    """A vault in a store that fails when told to, and workers to kill; one is left to the next test."""
    _shop.open(settings)
    yield _shop
    _shop.rest()
