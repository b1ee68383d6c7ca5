"""Whoever changes a bag is found out: any byte, any row, any object, any key."""

import base64
import hashlib
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from django.conf import LazySettings
from django.core.management import call_command

from andon import bag_format as form
from andon import chain
from andon.bag_trees import Unreadable, ZipTree
from andon.bag_verify import verify
from andon.bag_writing import keys_file
from andon.cli import main
from andon.signing import SigningKey, seal_envelope
from evidence.custody import verify_custody
from evidence.exporting import export_bag
from evidence.models import Dossier, Seal
from runs.keys import server_key
from tests.evidence import world
from tests.evidence.bags import MemoryTree, check, command, files_of, resigned

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def small(sources: Path, vault_dir: Path, tmp_path: Path) -> Path:
    """A whole bag of at most 16 KiB: one item, one seal."""
    opened = world.open_dossier(world.make_run(), rules=world.policy("topology"))
    world.work(opened)
    export_bag(opened, tmp_path / "small")
    export_bag(opened, tmp_path / "small.zip")
    files = files_of(tmp_path / "small")
    assert sum(map(len, files.values())) <= 16_384
    assert {name.split("/")[0] for name in files} == {
        *("andon", "data", "bag-info.txt", "bagit.txt", "manifest-sha256.txt", "tagmanifest-sha256.txt")
    }
    assert check(tmp_path / "small").problems == []
    return tmp_path / "small"


def test_every_flipped_byte_is_caught(small: Path) -> None:
    files = files_of(small)
    for name, raw in files.items():
        for at in range(len(raw)):
            damaged = raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :]
            assert verify(MemoryTree(files | {name: damaged})).problems, f"{name} byte {at}"


def test_every_flipped_byte_of_an_archive_is_caught(small: Path) -> None:
    raw = small.with_suffix(".zip").read_bytes()
    assert verify(ZipTree(io.BytesIO(raw), len(raw))).problems == []
    for at in range(len(raw)):
        damaged = raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :]
        try:
            problems = verify(ZipTree(io.BytesIO(damaged), len(damaged))).problems
        except ValueError as error:
            problems = [str(error)]
        assert problems, f"byte {at}"


def test_200_flipped_bytes_are_caught_by_the_command(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = server_key().key_id
    choose = random.Random(7)
    files = files_of(small)
    names = sorted(files)
    assert main(["verify", str(small), "--key", key]) == 0
    for number in range(200):
        anywhere = choose.choices(names, [len(files[name]) for name in names])[0]
        name = names[number] if number < len(names) else anywhere
        at = choose.randrange(len(files[name]))
        raw = bytearray(files[name])
        raw[at] ^= 1 << choose.randrange(8)
        (small / name).write_bytes(raw)
        if number % 5 == 0:  # the same in a process of its own
            assert command(small, "--key", key).returncode == 1, f"{name} byte {at}"
        assert main(["verify", str(small), "--key", key]) == 1, f"{name} byte {at}"
        assert "FAILED" in capsys.readouterr().out
        (small / name).write_bytes(files[name])
    assert main(["verify", str(small), "--key", key]) == 0


def test_any_cut_and_any_added_byte_is_caught(small: Path) -> None:
    files = files_of(small)
    for name, raw in files.items():
        for other in (
            raw[:-1],
            raw[1:],
            raw + b"\n",
            b"\n" + raw,
            raw + raw,
            b"",
            raw.replace(b"\n", b"\r\n"),
        ):
            if other != raw:
                assert verify(MemoryTree(files | {name: other})).problems, name


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


def test_a_bag_that_cannot_be_read_is_neither_good_nor_bad(small: Path) -> None:
    class Broken(MemoryTree):
        def open(self, name: str) -> IO[bytes]:
            if name == form.CUSTODY:
                raise OSError(5, "Input/output error", name)
            return super().open(name)

    with pytest.raises(Unreadable, match="Input/output error"):
        verify(Broken(files_of(small)))
    (small / "andon" / "custody.ndjson").unlink()
    (small / "andon" / "custody.ndjson").mkdir()
    assert main(["verify", str(small)]) == 1  # an empty directory is no file that could not be read


def test_a_forged_bag_is_consistent_at_most_and_never_pinned(dossier: Dossier, bag: Path) -> None:
    """Whoever writes a whole bag with a key of their own gets "not pinned", and with --key a failure."""
    forger, files = SigningKey.generate(), files_of(bag)
    rows = [json.loads(line) for line in files[form.CUSTODY].splitlines()]
    previous = ""
    sealed = {}
    for name in sorted(one for one in files if one.startswith(form.SEALS)):
        statement = json.loads(base64.b64decode(json.loads(files[name])["payload"]))
        statement["predicate"] |= {"previous": previous, "custody": None}
        payload = chain.canonical(statement)
        previous = hashlib.sha256(payload).hexdigest()
        sealed[statement["predicate"]["number"]] = previous
        files[name] = chain.canonical(seal_envelope(form.PAYLOAD_TYPE, payload, forger)) + b"\n"
    above = ""
    for row in rows:
        if row["what"] == "seal":
            row["object_sha256"] = sealed[row["data"]["seal"]]
            row["data"]["key_id"] = forger.key_id
        row["who"] = "somebody-else"
        row["previous"] = above
        above = row["digest"] = chain.row_digest(row)
    files[form.CUSTODY] = b"".join(chain.canonical(row) + b"\n" for row in rows)
    files[form.KEYS] = keys_file([forger.public_bytes])
    envelope = json.loads(files[form.STATEMENT])
    statement = json.loads(base64.b64decode(envelope["payload"]))
    statement["predicate"]["seal"] = previous
    files[form.STATEMENT] = (
        chain.canonical(seal_envelope(form.PAYLOAD_TYPE, chain.canonical(statement), forger)) + b"\n"
    )
    files = resigned(files, forger)
    assert verify(MemoryTree(files)).problems == []
    assert not verify(MemoryTree(files)).pinned
    problems = verify(MemoryTree(files), server_key().key_id).problems
    assert any("asked for" in one for one in problems)
    # A seal of the forger's among the server's own is caught without any key.
    mixed = resigned(
        files_of(bag) | {f"{form.SEALS}0001.json": files[f"{form.SEALS}0001.json"]}, server_key()
    )
    assert verify(MemoryTree(mixed)).problems


@pytest.mark.parametrize("words", [(), ("--stolen",)])
def test_after_the_key_was_rotated_old_seals_and_old_bags_verify(
    words: tuple[str, ...], dossier: Dossier, bag: Path, tmp_path: Path, settings: LazySettings
) -> None:
    old = server_key().key_id
    # On a key file of its own: the session's key stays as it is.
    settings.SIGNING_KEY_FILE = _copied(settings.SIGNING_KEY_FILE, tmp_path / "key.pem")
    assert server_key().key_id == old
    call_command("rotate_key", *words)
    new = server_key().key_id
    assert new != old
    assert verify_custody(dossier) == []
    export_bag(dossier, tmp_path / "after")
    assert command(bag, "--key", old).returncode == 0
    assert command(tmp_path / "after", "--key", new).returncode == 0
    assert command(tmp_path / "after", "--key", old).returncode == 1
    keys = json.loads((tmp_path / "after" / "andon" / "keys.json").read_text())["keys"]
    assert {row["key_id"] for row in keys} == {old, new}


def _copied(source: Path, target: Path) -> Path:
    target.write_bytes(Path(source).read_bytes())
    return target


def test_a_seal_by_a_key_that_is_not_the_servers_fails_here_and_in_a_bag(
    dossier: Dossier, tmp_path: Path
) -> None:
    last = Seal.objects.filter(dossier=dossier).order_by("number").last()
    statement = json.loads(base64.b64decode(last.envelope["payload"]))
    statement["predicate"] |= {"number": 3, "previous": last.digest}
    payload, forger = chain.canonical(statement), SigningKey.generate()
    Seal.objects.create(
        dossier=dossier,
        number=3,
        made_at=last.made_at,
        envelope=seal_envelope(form.PAYLOAD_TYPE, payload, forger),
        digest=hashlib.sha256(payload).hexdigest(),
        previous=last.digest,
        key_id=forger.key_id,
    )
    assert any("not a trusted key" in one for one in verify_custody(dossier))
    export_bag(dossier, tmp_path / "planted")
    problems = check(tmp_path / "planted", server_key().key_id).problems
    assert any("does not vouch for" in one for one in problems)
