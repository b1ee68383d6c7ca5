"""`pip install andon` in an image without torch: only what is about torch asks for it."""

import ast
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import andon

ROOT = Path(andon.__file__).parent

# What trains, or looks at what trains. Everything else must import, and run, without it.
TORCH = {
    "andon.halt_snapshot",
    "andon.integrations.huggingface",
    "andon.integrations.lightning",
    "andon.integrations.lightning_checkpoints",
    "andon.integrations.lineage",
    "andon.integrations.ordered",
    "andon.integrations.outside_loop",
    "andon.integrations.resuming",
    "andon.local_gradients",
    "andon.local_norms",
    "andon.monitor",
    "andon.monitor_agreement",
    "andon.monitor_reduce",
    "andon.monitor_rerun",
    "andon.monitor_rows",
    "andon.monitor_scaler",
    "andon.probe",
    "andon.replicas",
    "andon.restore_check",
    "andon.saving",
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
    trainers = {"torch", "transformers", "lightning", "accelerate"}
    asked = {name for name in imported(module) if name.split(".")[0] in trainers or name in TORCH}
    assert asked == set()


def test_the_modules_named_here_exist():
    assert set(MODULES) >= TORCH


def test_what_needs_it_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    for name in TORCH:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        importlib.import_module("andon.watch")


def test_a_training_image_with_neither_torch_nor_the_server_tails_a_log(tmp_path):
    """None in sys.modules is what an import meets where a package is not installed."""
    absent = ["django", "celery", "ninja", "boto3", "torch", "transformers", "lightning", "pyarrow", "pandas"]
    log = tmp_path / "train.log"
    log.write_text("iteration: 5, loss: 2.5\n")
    code = (
        f"import sys; sys.modules |= dict.fromkeys({absent!r})\n"
        "from andon.cli import COMMANDS, main\n"
        "assert all(main([name, '--help']) == 0 for name in COMMANDS)\n"
        "print('TAIL', flush=True)\n"
        f"raise SystemExit(main(['tail', {str(log)!r}, '--once', '--print']))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    assert '"loss": 2.5' in shown.stdout.partition("TAIL\n")[2]
