"""Exported bags: a good one verifies here and by the Library of Congress's tool; any other fails."""

import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import bagit
import pytest
from django.core.management import CommandError, call_command

from andon.bag_verify import verify
from andon.bag_writing import BagWriter, open_sink
from evidence.models import CustodyRow, Dossier
from evidence.proof.exporting import export_bag
from evidence.signals import bag_exporting
from runs.keys import server_key
from tests.evidence import world
from tests.evidence.bags import ROOT, MemoryTree, check, command, files_of

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_good_bag_verifies_and_is_pinned_by_its_key(bag: Path) -> None:
    assert check(bag).problems == []
    done = command(bag, "--key", server_key().key_id)
    assert done.returncode == 0, done.stdout
    assert server_key().key_id in done.stdout
    done = command(bag)
    assert (done.returncode, "not pinned" in done.stdout) == (3, True)


def test_another_tool_validates_a_good_bag(bag: Path) -> None:
    assert bagit.Bag(str(bag)).validate()


def test_another_key_than_the_pinned_one_fails(bag: Path) -> None:
    assert command(bag, "--key", "0" * 64).returncode == 1
    assert command(bag, "--key", "nonsense").returncode == 2


def test_what_is_no_bag_is_unreadable(tmp_path: Path) -> None:
    assert command(tmp_path / "absent").returncode == 2
    assert command(tmp_path).returncode == 2
    (tmp_path / "text").write_text("hello")
    assert command(tmp_path / "text").returncode == 2


def test_an_extra_and_a_missing_file_fail(bag: Path) -> None:
    files = files_of(bag)
    for name in files:
        assert verify(MemoryTree({one: raw for one, raw in files.items() if one != name})).problems, name
    for name in ("extra.txt", "data/extra.txt", "andon/extra.json", "fetch.txt"):
        assert verify(MemoryTree(files | {name: b""})).problems, name
    (bag / "data" / "link").symlink_to("dossier.json")
    assert check(bag).problems
    (bag / "data" / "link").unlink()
    (bag / "data" / "empty").mkdir()
    assert check(bag).problems


def test_objects_that_are_not_inside_are_named_as_not_checked(dossier: Dossier, tmp_path: Path) -> None:
    path = tmp_path / "holey"
    export_bag(dossier, path, inline_bytes=0)
    report = check(path)
    assert report.problems == []
    assert len(report.not_checked) == 2
    assert "file://" in report.not_checked[0]
    done = command(path, "--key", server_key().key_id)
    assert (done.returncode, done.stdout.count("not checked")) == (0, 2)
    # Fetched, they are checked.
    for line in (path / "fetch.txt").read_text().splitlines():
        url, _, name = line.split(" ", 2)
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(url.removeprefix("file://"), path / name)
        (path / name).chmod(0o644)
    assert (check(path).problems, check(path).not_checked) == ([], [])
    (path / name).write_bytes(b"?" * (path / name).stat().st_size)
    assert check(path).problems


def test_other_apps_add_files_that_the_statement_names(dossier: Dossier, tmp_path: Path) -> None:
    def add(sender: object, dossier: Dossier, bag: BagWriter, **_: object) -> None:
        bag.add_payload("postmortem.md", [b"# What happened\n"])
        bag.add_tag("andon/ledger.ndjson", b"{}\n")

    bag_exporting.connect(add)
    try:
        call_command("export_bag", str(tmp_path / "more"), "--dossier", str(dossier.pk))
    finally:
        bag_exporting.disconnect(add)
    files = files_of(tmp_path / "more")
    assert check(tmp_path / "more").problems == []
    assert verify(MemoryTree(files | {"andon/ledger.ndjson": b"[]\n"})).problems
    assert verify(MemoryTree(files | {"data/postmortem.md": b"# Nothing happened\n"})).problems


def test_the_command_finds_an_incidents_dossier_and_refuses_to_overwrite(
    dossier: Dossier, tmp_path: Path
) -> None:
    call_command("export_bag", "7", str(tmp_path / "seven.zip"))
    assert check(tmp_path / "seven.zip").problems == []
    with pytest.raises(CommandError, match="exists already"):
        call_command("export_bag", "7", str(tmp_path / "seven.zip"))
    with pytest.raises(CommandError, match="no such incident"):
        call_command("export_bag", "8", str(tmp_path / "eight"))
    exports = CustodyRow.objects.filter(dossier=dossier, what="exported bag")
    assert exports.count() == 1  # nothing left the vault by the refused one


def test_the_verifier_needs_the_standard_library_and_cryptography_alone(bag: Path) -> None:
    code = (
        "import sys\n"
        "class Only:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        top = name.partition('.')[0]\n"
        "        allowed = sys.stdlib_module_names | {'andon', 'cryptography', '_cffi_backend', 'cffi'}\n"
        "        if top not in allowed:\n"
        "            raise ImportError(f'{name} is not there')\n"
        "sys.meta_path.insert(0, Only())\n"
        "def refuse(event, args):\n"
        "    if event.startswith(('socket.', 'sqlite3.', 'subprocess.')):\n"
        "        raise RuntimeError(event)\n"
        "sys.addaudithook(refuse)\n"
        "from andon.cli import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(bag), "--key", server_key().key_id],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize("name", ["big", "big.zip"])
def test_memory_does_not_grow_with_what_is_exported(
    name: str, sources: Path, vault_dir: Path, tmp_path: Path
) -> None:
    run = world.make_run()
    directory, table = world.write_checkpoint(sources, 900, size=24 << 20, files=2)
    world.commit(run, 900, directory.as_uri(), table)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    world.work(dossier)
    assert dossier.items.get().state == "sealed"
    tracemalloc.start()
    try:
        export_bag(dossier, tmp_path / name)
        assert check(tmp_path / name, server_key().key_id).problems == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20  # of 48 MiB that went through


def test_a_bag_that_failed_half_way_leaves_nothing(dossier: Dossier, tmp_path: Path, vault_dir: Path) -> None:
    stored = dossier.items.get(kind="event_log").stored_objects.get()
    file = vault_dir / "objects" / stored.key
    file.chmod(0o644)
    file.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="stored with"):
        export_bag(dossier, tmp_path / "half")
    assert not list(tmp_path.glob("*half*"))


def test_names_that_could_leave_the_bag_are_refused(tmp_path: Path) -> None:
    def nothing() -> Iterator[bytes]:
        yield b""

    with open_sink(tmp_path / "x") as sink:
        bag = BagWriter(sink)
        for name in ("../x", "/x", "a/../x", "a//x", "~x/..", "a\\b", ""):
            with pytest.raises(ValueError, match="path"):
                bag.add_payload(name, nothing())
