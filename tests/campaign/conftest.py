"""Tests that train need torch; where it is not installed they are named as not run."""

import importlib.util

import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None


def pytest_configure(config):
    config.addinivalue_line("markers", "torch: trains for real; runs where torch is installed")


def pytest_collection_modifyitems(items):
    if not HAS_TORCH:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="torch is not installed here: nothing was trained"))
