"""`make audit` says what is known, and says so when nothing could be asked."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = f"attrs==25.1.0 --hash=sha256:{'0' * 64}\nidna==3.10 --hash=sha256:{'0' * 64}\n"
BUG = {
    "id": "GHSA-test",
    "modified": "2026-01-01T00:00:00Z",
    "affected": [
        {
            "package": {"name": "idna", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.11"}]}],
        }
    ],
}


@pytest.fixture
def osv() -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """An advisory service on loopback; the dict says what it knows by package."""
    known: dict[str, list[Any]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bugs = known.get(asked["package"]["name"], [])
            body = json.dumps({"vulns": bugs} if bugs else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/query", known
    server.shutdown()
    server.server_close()


def audit(tmp_path: Path, url: str) -> subprocess.CompletedProcess[str]:
    lock = tmp_path / "lock.txt"
    lock.write_text(LOCK)
    return subprocess.run(
        [str(ROOT / "scripts" / "audit.sh"), "-s", "osv", "--osv-url", url],
        env={**os.environ, "LOCKS": str(lock)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_it_names_what_is_known_and_passes_when_nothing_is(tmp_path, osv):
    url, known = osv
    clean = audit(tmp_path, url)
    assert clean.returncode == 0, clean.stderr
    assert "2 packages, 0 known vulnerabilities" in clean.stdout
    known["idna"] = [BUG]
    bad = audit(tmp_path, url)
    assert bad.returncode == 1
    assert "idna 3.10: GHSA-test, fixed in 3.11" in bad.stdout


def test_it_never_calls_it_clean_when_nobody_could_be_asked(tmp_path):
    answer = audit(tmp_path, "http://127.0.0.1:9/query")
    assert answer.returncode == 2
    assert "could not be asked; nothing is known" in answer.stderr
