"""`andon.checkpoints.delete` against the real server, and against servers that are broken."""

import json
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from andon import checkpoints
from andon.checkpoints import Positions
from andon.client import Client
from andon.signing import new_secret
from evidence.gates import unprotected, uses_gate
from evidence.models import DeletionAllow, Item
from runs.models import Run, RunSecret
from tests.evidence import world

POSITIONS = Positions(loader_position=8, consumed_samples=8, optimizer_step=1, schedule_position=1)


def written(root: Path, step: int = 900) -> Path:
    directory = checkpoints.directory_of(root, step)
    checkpoints.write_arrays(directory, "weights.npz", {"w": np.ones(3, np.float32)})
    parts = {"weights": ["weights.npz"]}
    checkpoints.commit(directory, run="r", attempt=1, step=step, positions=POSITIONS, parts=parts)
    return directory


def kept(directory: Path, client: Client) -> str:
    """Ask for the deletion, be refused, and find the checkpoint whole; returns the reason."""
    deleted, why = checkpoints.delete(directory, client)
    assert not deleted
    assert why.startswith("kept: ")
    checkpoints.verify(directory)
    return why


@pytest.mark.django_db(transaction=True)
class TestRealServer:
    @pytest.fixture
    def run(self) -> Run:
        return world.make_run()

    @pytest.fixture
    def secret(self, run: Run) -> str:
        return str(RunSecret.objects.create(run=run, secret=new_secret()).secret)

    @pytest.fixture
    def client(self, live_server: Any, run: Run, secret: str, tmp_path: Path) -> Iterator[Client]:
        with Client(live_server.url, run.slug, secret, spool_dir=tmp_path / "spool") as client:
            yield client

    def test_what_no_dossier_holds_is_deleted_and_counts_as_gone(
        self, run: Run, client: Client, tmp_path: Path
    ) -> None:
        directory = written(tmp_path)
        assert not uses_gate(run.pk)
        assert checkpoints.delete(directory, client) == (True, "allowed by the deletion gate")
        assert not directory.exists()
        assert DeletionAllow.objects.filter(run=run, uri=directory.as_uri()).exists()
        assert uses_gate(run.pk)

    def test_what_a_dossier_holds_is_kept_by_any_name(self, run: Run, client: Client, tmp_path: Path) -> None:
        directory = written(tmp_path)
        world.commit(run, 900, directory.as_uri(), [])
        world.open_dossier(run)
        assert kept(directory, client) == "kept: held as evidence: incident 7"
        (tmp_path / "latest").symlink_to(directory)
        assert "held as evidence" in kept(tmp_path / "latest", client)

    def test_a_wrong_secret_keeps(self, live_server: Any, run: Run, tmp_path: Path) -> None:
        with Client(live_server.url, run.slug, new_secret(), spool_dir=tmp_path / "spool") as client:
            assert "no answer" in kept(written(tmp_path), client)
        assert not DeletionAllow.objects.exists()

    def test_a_clock_that_is_wrong_by_a_day_signs_by_the_servers(
        self, client: Client, tmp_path: Path
    ) -> None:
        client.clock.offset_s = 86_400.0
        assert checkpoints.delete(written(tmp_path), client)[0]


class Broken(socketserver.StreamRequestHandler):
    """Answers a post with whatever it was given, or hangs."""

    answer: bytes | None = b""

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.rfile.readline() or b"\r\n\r\n"
        length = next(
            (
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-l")
            ),
            0,
        )
        asked = self.rfile.read(length)
        if self.answer is None:
            time.sleep(1.0)
            return
        self.wfile.write(self.answer.replace(b"URI", json.loads(asked)["uris"][0].encode()))


def http(status: str, body: bytes) -> bytes:
    # URI in the body is replaced by what was asked: the length is left out, the end is the end.
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n%s" % (
        status.encode(),
        body,
    )


YES = b'{"items": [{"uri": "URI", "allow": true}]}'


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(None, id="no answer in time"),
        pytest.param(b"", id="closed"),
        pytest.param(b"\x00\xff garbage\r\n\r\n", id="no HTTP"),
        pytest.param(http("500 Oops", YES), id="500"),
        pytest.param(http("503 Busy", YES), id="503"),
        pytest.param(http("302 Elsewhere", YES), id="302"),
        pytest.param(
            http("401 No", b'{"type": "timestamp-out-of-tolerance", "server_time": 1}'), id="signature time"
        ),
        pytest.param(http("200 OK", b""), id="empty"),
        pytest.param(http("200 OK", b"yes"), id="no JSON"),
        pytest.param(http("200 OK", YES[:-3]), id="cut"),
        pytest.param(http("200 OK", b"[]"), id="a list"),
        pytest.param(http("200 OK", b'{"items": {"URI": true}}'), id="items no list"),
        pytest.param(http("200 OK", b'{"items": ["URI", 7, null]}'), id="items no objects"),
        pytest.param(http("200 OK", b'{"items": [{"uri": ["URI"], "allow": true}]}'), id="uri no text"),
        pytest.param(http("200 OK", b'{"items": [{"uri": "URI0", "allow": true}]}'), id="another uri"),
        pytest.param(http("200 OK", b'{"items": [{"uri": "URI", "allow": "true"}]}'), id="text for a yes"),
        pytest.param(http("200 OK", b'{"items": [{"uri": "URI", "allow": 1}]}'), id="one for a yes"),
        pytest.param(http("200 OK", b'{"items": [{"uri": "URI", "allow": false}]}'), id="no"),
    ],
)
def test_anything_but_a_plain_yes_keeps(answer: bytes | None, tmp_path: Path) -> None:
    handler = type("Handler", (Broken,), {"answer": answer})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with Client(url, "r", new_secret(), spool_dir=tmp_path / "spool", timeout_s=0.3) as client:
            kept(written(tmp_path), client)
        server.shutdown()


def test_the_broken_server_can_say_yes(tmp_path: Path) -> None:
    """So that the test above fails for its reason, not for its server."""
    handler = type("Handler", (Broken,), {"answer": http("200 OK", YES)})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with Client(url, "r", new_secret(), spool_dir=tmp_path / "spool", timeout_s=5) as client:
            assert checkpoints.delete(written(tmp_path), client)[0]
        server.shutdown()


def test_an_answer_that_came_too_late_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Yes:
        def deletions(self, uris: list[str], /) -> list[dict[str, Any]]:
            return [{"uri": uris[0], "allow": True}]

    directory = written(tmp_path)
    monkeypatch.setattr(checkpoints, "ALLOW_S", -1.0)  # any time at all is too long
    assert checkpoints.delete(directory, Yes()) == (False, "kept: the answer came too late to count")
    assert directory.is_dir()
    monkeypatch.undo()
    assert checkpoints.delete(directory, Yes())[0]


@pytest.mark.parametrize(
    ("kind", "state", "how", "asks", "bare"),
    [
        ("last_good_checkpoint", "planned", None, False, True),
        ("last_good_checkpoint", "collecting", "none", False, True),
        ("last_good_checkpoint", "collecting", "none", True, False),
        ("last_good_checkpoint", "held", "links", False, False),
        ("checkpoint_ladder", "held", "legal_hold", False, False),
        ("last_good_checkpoint", "sealed", "none", False, False),
        ("topology", "planned", None, False, False),
    ],
)
def test_a_checkpoint_without_lock_and_gate_is_not_protected_until_copied(
    kind: str, state: str, how: str | None, asks: bool, bare: bool
) -> None:
    item = Item(kind=kind, state=state, protected_by={"how": how} if how else {})
    assert unprotected(item, asks=asks) == "", "no checkpoint is chosen yet"
    item.source = {"uri": "s3://ckpt/step-900"}
    assert unprotected(item, asks=asks) == ("not protected until copied" if bare else "")
