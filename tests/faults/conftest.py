"""One house for the tests that leave it whole; those that kill it build their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import house as houses
from tests.faults.house import House, Poster


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
