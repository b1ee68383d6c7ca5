"""What README and docs tell people to type is typed here: the blocks are read from the pages and run."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from config.embedded.valkey import free_port
from demo.server import Server
from demo.supervisor import pin_keys
from tests.config.up import prepare

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)
TABLE = "step,loss\n" + "".join(f"{step},2.5\n" for step in range(1, 9)) + "9,NaN\n"


# What cannot run here, and why; anything else that a page tells people to type is run.
NOT_HERE = {
    "make ": "sets up and starts the whole; the targets are looked up instead",
    "manage.py up": "runs all along, as this test's server",
    "andon permit verify": "needs a permit, which two people grant: tests/e2e",
    "andon replay": "waits ten minutes for a permit: tests/andon/test_replay.py, tests/e2e",
    "demo.record": "trains for minutes, with torch",
    "demo.incidents": "starts a server of its own and runs all along: tests/demo",
}


def commands(page: Path) -> list[tuple[str, str]]:
    """Return what `page` says to type, in its order: fences, indented lines, commands in backticks."""
    text = page.read_text("utf-8")
    found = [(match.start(), match[1], match[2]) for match in FENCE.finditer(text)]
    rest = FENCE.sub(lambda match: " " * len(match[0]), text)
    for pattern in (
        r"^    ((?:make|\.venv/bin/)\S*.*)$",
        r"`((?:andon|(?:\.venv/bin/)?python manage\.py|python -m) [^`]+)`",
    ):
        found += [(match.start(), "sh", match[1]) for match in re.finditer(pattern, rest, re.M)]
    return [
        (language, block)
        for _, language, block in sorted(found)
        if not any(part in block for part in NOT_HERE)
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server of its own, and a directory that looks like the checkout to a command."""
    patch = pytest.MonkeyPatch()
    for name in list(os.environ):
        if name.startswith(("ANDON_", "DJANGO_", "TEST_SESSION_")):
            patch.delenv(name)
    data, here = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("checkout")
    for name in ("manage.py", "andon"):
        (here / name).symlink_to(ROOT / name)
    (here / ".venv").symlink_to(Path(sys.prefix))
    (here / "loss.csv").write_text(TABLE, "utf-8")
    server = Server(data, free_port(), [data])
    prepare(data)
    try:
        server.start()
        yield SimpleNamespace(
            server=server, here=here, secret="", key=pin_keys(server.url)[0], bin=Path(sys.prefix) / "bin"
        )
    finally:
        server.stop()
        patch.undo()


def typed(site: SimpleNamespace, language: str, block: str) -> subprocess.CompletedProcess[str]:
    """Run a block as it stands, with the reader's own secret, address and fingerprint filled in."""
    for placeholder, value in {
        "whsec_…": site.secret,
        "http://localhost:8000": site.server.url,
        "FINGERPRINT": site.key,
        "INCIDENT": "1",
        "NAME": "noor",
    }.items():
        block = block.replace(placeholder, value)
    shell = ["bash", "-euo", "pipefail", "-c", block]
    return subprocess.run(
        [sys.executable, "-c", block] if language == "python" else shell,
        cwd=site.here,
        env={
            **site.server.environment,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{site.bin}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_every_block_of_readme_and_docs_does_what_it_says(site: SimpleNamespace):
    for program in ("curl", "openssl", "od"):
        if shutil.which(program) is None:
            pytest.skip(f"not run: needs {program}")
    said: dict[str, str] = {}
    for page in PAGES:
        for language, block in commands(page):
            done = typed(site, language, block)
            # A table with a NaN is a halt, which `andon detect` tells by exit code 1.
            wanted = 1 if "andon detect" in block else 0
            assert done.returncode == wanted, f"{page.name}:\n{block}\n{done.stdout}{done.stderr}"
            if "create_run" in block:
                site.secret = json.loads(done.stdout.splitlines()[-1])["secret"]
            said[block] = done.stdout

    def answer_to(part: str) -> str:
        return next(text for block, text in said.items() if part in block)

    assert "'kind': 'continue'" in answer_to("send_events")
    posted = json.loads(answer_to("curl -s"))
    assert (posted["accepted"], posted["directive"]["kind"]) == (1, "hold")
    assert '"severity": "halt"' in answer_to("andon detect")
    assert json.loads(answer_to("create_person"))["roles"] == ["responder"]
    assert json.loads(answer_to("vault_probe"))["schema"] == "andon.store-probe/1"
    assert answer_to("andon verify")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_is_named_exists(page: Path):
    named = re.findall(
        r"`((?:andon|runs|evidence|incidents|config|demo|tests)/[\w/]+(?:\.py|/))`", page.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_make_knows_every_target_that_the_readme_names():
    named = set(re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text("utf-8")))
    known = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert {"demo", "test", "bench", "screens"} <= named <= known
