"""Exported bags: a good one verifies here and by the Library of Congress's tool; any other fails."""

import base64
import hashlib
import io
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import bagit
import pytest
from django.core.management import CommandError, call_command

from andon import bag_format as form
from andon import chain
from andon.bag_verify import Report, ZipTree, open_tree, verify
from andon.bag_writing import BagWriter, open_sink
from andon.signing import SigningKey, seal_envelope
from evidence.exporting import export_bag
from evidence.models import CustodyRow, Dossier
from evidence.signals import bag_exporting
from runs.keys import server_key
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)
ROOT = Path(__file__).resolve().parents[2]


class MemoryTree:
    """A bag held in memory, so that a thousand damaged ones cost no disk."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def names(self) -> list[str]:
        return list(self.files)

    def open(self, name: str) -> IO[bytes]:
        return io.BytesIO(self.files[name])


@pytest.fixture
def dossier(sources: Path, vault_dir: Path) -> Dossier:
    """A small sealed dossier: two items, a few hundred bytes."""
    run = world.make_run()
    world.post(run, "step", 1000, data={"loss": None, "skipped": True}, flags={"data.loss": "nan"})
    opened = world.open_dossier(run, rules=world.policy("event_log", "topology"))
    world.work(opened)
    assert opened.seals.count() == 2
    return opened


@pytest.fixture
def bag(dossier: Dossier, tmp_path: Path) -> Path:
    path = tmp_path / "bag"
    export_bag(dossier, path)
    return path


def files_of(bag: Path) -> dict[str, bytes]:
    return {path.relative_to(bag).as_posix(): path.read_bytes() for path in bag.rglob("*") if path.is_file()}


def check(bag: Path, key: str | None = None) -> Report:
    return verify(open_tree(bag), key)


def command(bag: Path, *more: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from andon.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, "verify", str(bag), *more],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


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


def test_every_flipped_byte_is_caught(bag: Path) -> None:
    files = files_of(bag)
    assert sum(map(len, files.values())) < 32_768
    for name, raw in files.items():
        for at in range(len(raw)):
            damaged = raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :]
            assert verify(MemoryTree(files | {name: damaged})).problems, f"{name} byte {at}"


def test_flipped_bytes_are_caught_by_the_command(bag: Path, tmp_path: Path) -> None:
    choose = random.Random(7)
    files = files_of(bag)
    for name in sorted(files):
        at = choose.randrange(len(files[name]))
        raw = bytearray(files[name])
        raw[at] ^= 1 << choose.randrange(8)
        (bag / name).write_bytes(raw)
        assert command(bag, "--key", server_key().key_id).returncode == 1, f"{name} byte {at}"
        (bag / name).write_bytes(files[name])


def test_every_flipped_byte_of_an_archive_is_caught(dossier: Dossier, tmp_path: Path) -> None:
    path = tmp_path / "bag.zip"
    export_bag(dossier, path)
    assert command(path, "--key", server_key().key_id).returncode == 0
    raw = path.read_bytes()
    for at in range(0, len(raw), 3):
        damaged = raw[:at] + bytes([raw[at] ^ 0x04]) + raw[at + 1 :]
        try:
            problems = verify(ZipTree(io.BytesIO(damaged), len(damaged))).problems
        except ValueError as error:
            problems = [str(error)]
        assert problems, f"byte {at}"


def resigned(files: dict[str, bytes], key: SigningKey) -> dict[str, bytes]:
    """Make everything that needs no secret consistent again, and sign the statement with `key`."""
    payload = {
        name: hashlib.sha256(raw).hexdigest() for name, raw in files.items() if name.startswith("data/")
    }
    files = files | {form.MANIFEST: form.render_manifest(payload)}
    envelope = json.loads(files[form.STATEMENT])
    statement = json.loads(base64.b64decode(envelope["payload"]))
    named = {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items() if name not in form.UNNAMED}
    statement["subject"] = [{"name": name, "digest": {"sha256": named[name]}} for name in sorted(named)]
    rows = [json.loads(line) for line in files[form.CUSTODY].splitlines()]
    statement["predicate"]["custody"] = {"seq": rows[-1]["seq"], "digest": rows[-1]["digest"]}
    envelope = seal_envelope(form.PAYLOAD_TYPE, chain.canonical(statement), key)
    files = files | {form.STATEMENT: chain.canonical(envelope) + b"\n"}
    tags = {
        name: hashlib.sha256(raw).hexdigest()
        for name, raw in files.items()
        if not name.startswith("data/") and name != form.TAG_MANIFEST
    }
    return files | {form.TAG_MANIFEST: form.render_manifest(tags)}


def without_row(files: dict[str, bytes]) -> dict[str, bytes]:
    lines = files[form.CUSTODY].splitlines(keepends=True)
    return files | {form.CUSTODY: b"".join(lines[:1] + lines[2:])}


def reordered_rows(files: dict[str, bytes]) -> dict[str, bytes]:
    lines = files[form.CUSTODY].splitlines(keepends=True)
    return files | {form.CUSTODY: b"".join([lines[0], lines[2], lines[1], *lines[3:]])}


def swapped_objects(files: dict[str, bytes]) -> dict[str, bytes]:
    one, two = [name for name in files if name.startswith("data/items/")][:2]
    return files | {one: files[two], two: files[one]}


def another_object(files: dict[str, bytes]) -> dict[str, bytes]:
    one = next(name for name in files if name.startswith("data/items/"))
    return files | {one: b"something else"}


def extra_item(files: dict[str, bytes]) -> dict[str, bytes]:
    return files | {"data/items/99-rank_logs/planted.log": b"planted"}


def without_seal(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: raw for name, raw in files.items() if name != "andon/seals/0002.json"}


@pytest.mark.parametrize(
    "tamper", [without_row, reordered_rows, swapped_objects, another_object, extra_item, without_seal]
)
def test_tampering_is_caught_even_by_whoever_holds_the_key_of_the_export(
    bag: Path, tamper: Callable[[dict[str, bytes]], dict[str, bytes]]
) -> None:
    files = files_of(bag)
    assert verify(MemoryTree(resigned(files, server_key()))).problems == [], "the control must be good"
    assert verify(MemoryTree(tamper(files))).problems
    # All digests made to fit again and signed afresh: chain and seals still contradict it.
    assert verify(MemoryTree(resigned(tamper(files), server_key()))).problems


def test_a_forged_key_is_caught(bag: Path) -> None:
    forged = resigned(files_of(bag), SigningKey.generate())
    assert verify(MemoryTree(forged)).problems  # the keys file does not hold it
    assert any("asked for" in one for one in verify(MemoryTree(forged), server_key().key_id).problems)


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
        "for name in ('django', 'msgspec', 'numpy', 'rfc8785', 'zstandard', 'boto3', 'pyarrow'):\n"
        "    sys.modules[name] = None\n"
        "from andon.cli import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(bag)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 3, done.stderr + done.stdout


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
