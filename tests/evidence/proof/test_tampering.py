"""Whoever changes a bag is found out: any byte, any row, any object, any key."""

import base64
import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from django.conf import LazySettings
from django.core.management import call_command

from andon import bag_format as form
from andon import chain, handovers
from andon.bag_trees import Unreadable, ZipTree
from andon.bag_verify import Report, verify
from andon.bag_writing import keys_file
from andon.cli import main
from andon.keys import given_up, handover
from andon.signing import SigningKey, seal_envelope, sign_document
from evidence.custody import verify_custody
from evidence.models import Dossier, Seal
from evidence.proof.exporting import export_bag
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
    # All that makes it an archive; of what lies inside, every byte of which is flipped above, some.
    with zipfile.ZipFile(small.with_suffix(".zip")) as archive:
        inside = {
            at
            for one in archive.infolist()
            for begin in [one.header_offset + 30 + len(one.filename.encode())]
            for at in range(begin, begin + one.compress_size)
        }
    assert len(inside) < len(raw)
    for at in range(len(raw)):
        if at in inside and at % 7:
            continue
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
    new = rotated(settings, tmp_path, *words)
    assert new.key_id != old
    assert verify_custody(dossier) == []
    export_bag(dossier, tmp_path / "after")
    assert command(bag, "--key", old).returncode == 0
    assert command(tmp_path / "after", "--key", new.key_id).returncode == 0
    # Whoever pinned the old key follows its handover. A stolen one names no successor.
    done = command(tmp_path / "after", "--key", old)
    assert (done.returncode, f"successor of {old}" in done.stdout) == ((1, False) if words else (0, True))
    keys = json.loads((tmp_path / "after" / "andon" / "keys.json").read_text())
    assert {row["key_id"] for row in keys["keys"]} == {old, new.key_id}
    assert [row[0]["from"] for row in keys["handovers"]] == [old]


def rotated(settings: LazySettings, directory: Path, *words: str) -> SigningKey:
    """Rotate the key, on a key file of the test's own: the session's key stays as it is."""
    settings.SIGNING_KEY_FILE = _copied(settings.SIGNING_KEY_FILE, directory / "key.pem")
    call_command("rotate_key", *words)
    return server_key()


def test_a_pinned_key_is_followed_over_several_handovers_and_by_no_forged_one(
    dossier: Dossier, tmp_path: Path, settings: LazySettings
) -> None:
    first, between = server_key(), rotated(settings, tmp_path)
    call_command("rotate_key")
    last = server_key()
    export_bag(dossier, tmp_path / "after")
    files = files_of(tmp_path / "after")
    for pinned in (first, between, last):
        report = verify(MemoryTree(files), pinned.key_id)
        assert (report.problems, report.pinned, report.key_id) == ([], True, last.key_id)
    document = json.loads(files[form.KEYS])
    forger, at = SigningKey.generate(), "2026-01-01T00:00:00Z"

    def forged(*told: list[dict[str, Any]]) -> Report:
        """Return what comes of the forger's own signature under these handovers."""
        vouched = [first.public_bytes, between.public_bytes, last.public_bytes, forger.public_bytes]
        changed = files | {form.KEYS: keys_file(vouched, told)}
        return verify(MemoryTree(resigned(changed, forger)), first.key_id)

    good = document["handovers"]
    assert not forged(*good).pinned, "the chain ends at another key"
    claim = {"schema": handovers.SCHEMA, "from": first.key_id, "to": forger.key_id, "at": at}
    alone = [sign_document(claim, forger)]
    for lie in (
        alone,  # signed by the new key only
        [*alone, *alone],
        [{**good[0][0], "to": forger.key_id}, *alone],  # the old key's signature under other words
        [good[0][0], *alone],  # of another handover
        handover(forger, last, at),  # to the pinned key's successor, from the forger
        handover(last, forger, at)[1:],
        given_up(first.key_id, forger, at),  # "the pinned key was stolen, I am the next"
        handover(SigningKey.generate(), forger, at),
    ):
        for told in ([lie], [*good, lie]):
            report = forged(*told)
            assert report.problems, lie
            assert not report.pinned, lie
    # A thief of the first key, after it was handed over: two successors contradict each other.
    report = forged(*good, handover(first, forger, at))
    assert any("asked for" in one for one in report.problems)
    # What a key signs long after it was handed over is not believed, also by whoever pinned that key.
    statement = json.loads(base64.b64decode(json.loads(files[form.STATEMENT])["payload"]))
    statement["predicate"]["exported_at"] = "2099-01-01T00:00:00.000000Z"
    late = seal_envelope(form.PAYLOAD_TYPE, chain.canonical(statement), between)
    report = verify(
        MemoryTree(resigned(files | {form.STATEMENT: chain.canonical(late)}, between)), between.key_id
    )
    assert [one for one in report.problems if "no longer in use" in one]


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
