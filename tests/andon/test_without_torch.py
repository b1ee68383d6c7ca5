"""`pip install andon` in an image without torch: only what is about torch asks for it."""

import ast
import importlib.util
import pkgutil
import sys
from pathlib import Path

import pytest

import andon

ROOT = Path(andon.__file__).parent

# What trains, or looks at what trains. Everything else must import, and run, without it.
TORCH = {
    "andon.halt_snapshot",
    "andon.local_gradients",
    "andon.local_norms",
    "andon.monitor",
    "andon.monitor_agreement",
    "andon.monitor_reduce",
    "andon.monitor_rerun",
    "andon.monitor_rows",
    "andon.monitor_scaler",
    "andon.replicas",
    "andon.restore_check",
    "andon.set_aside",
    "andon.step_times",
    "andon.tensor_checksum",
    "andon.twin",
    "andon.watch",
    "andon.watch_launch",
}
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(ROOT)], "andon."))


def imported(module: str) -> set[str]:
    """Return what a module imports when it is imported itself."""
    path = ROOT.parent / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("module", [name for name in MODULES if name not in TORCH])
def test_it_imports_nothing_that_needs_torch(module):
    asked = {name for name in imported(module) if name.split(".")[0] == "torch" or name in TORCH}
    assert asked == set()


def test_the_modules_named_here_exist():
    assert set(MODULES) >= TORCH


def test_what_needs_it_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    for name in TORCH:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        importlib.import_module("andon.watch")
