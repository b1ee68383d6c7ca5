"""The `andon` command."""

import subprocess
import sys

import pytest

from andon import __version__
from andon.cli import COMMANDS, main


def test_it_says_its_version(capsys):
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["permit"], ["permit", "verify"], ["--nonsense"]])
def test_wrong_use_is_2_and_says_what_is_right(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: andon" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_its_own_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert f"usage: andon {name}" in capsys.readouterr().out


def test_only_the_part_that_is_used_is_imported():
    code = (
        "import sys; from andon.cli import main; main(['--version'])\n"
        "heavy = {'numpy', 'cryptography', 'andon.permit', 'andon.replay', 'pyarrow'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_early_is_no_traceback():
    line = f"{sys.executable} -m andon.cli --help | head -c 1"
    shown = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0
    assert "Traceback" not in shown.stderr
