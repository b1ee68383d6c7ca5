"""Bags as the tests of proof handle them: in memory, changed, signed anew, and shown to the command."""

import base64
import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import IO

from andon import bag_format as form
from andon import chain
from andon.bag_trees import open_tree
from andon.bag_verify import Report, verify
from andon.signing import SigningKey, seal_envelope

ROOT = Path(__file__).resolve().parents[2]


class MemoryTree:
    """A bag held in memory, so that a thousand damaged ones cost no disk."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def names(self) -> list[str]:
        return list(self.files)

    def open(self, name: str) -> IO[bytes]:
        return io.BytesIO(self.files[name])


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
