"""Real ends of channels on this machine: an HTTP receiver that keeps what it got, and an Alertmanager."""

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from config.embedded import processes
from config.embedded.valkey import free_port


@dataclass
class Got:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiver:
    """Answers every request with `status` (or what `answer` returns) and keeps it."""

    port: int = 0
    status: int = 200
    answer: bytes = b"ok"
    headers: dict[str, str] = field(default_factory=dict)
    got: list[Got] = field(default_factory=list)
    before: Callable[[], None] | None = None  # called before the answer, in the server's thread

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@contextmanager
def receiver(**how: Any) -> Iterator[Receiver]:
    """Serve on a free port of the loopback."""
    keeps = Receiver(**how)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            named = {name.lower(): value for name, value in self.headers.items()}
            keeps.got.append(Got(self.command, self.path, named, self.rfile.read(length)))
            if keeps.before is not None:
                keeps.before()
            self.send_response(keeps.status)
            for name, value in keeps.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(keeps.answer)))
            self.end_headers()
            self.wfile.write(keeps.answer)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    keeps.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield keeps
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def alertmanager(directory: Path, webhook_url: str, password: str = "") -> Iterator[str]:
    """Run Debian's Alertmanager; it notifies `webhook_url` at once, and of everything."""
    port = free_port()
    bearer = f"\n        http_config: {{authorization: {{credentials: {password}}}}}" if password else ""
    (directory / "alertmanager.yml").write_text(
        "route: {receiver: hook, group_by: [group], group_wait: 0s, group_interval: 1s}\n"
        f"receivers:\n  - name: hook\n    webhook_configs:\n      - url: {webhook_url}\n"
        f"        send_resolved: true{bearer}\n",
        "utf-8",
    )
    log = (directory / "alertmanager.log").open("ab")
    process = processes.spawn(
        [
            "prometheus-alertmanager",
            f"--config.file={directory / 'alertmanager.yml'}",
            f"--storage.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        ],
        output=log,
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=1):
                    break
            except OSError:
                assert process.poll() is None, (directory / "alertmanager.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        processes.stop(process, signal.SIGKILL, 5)
        log.close()


def alerts(url: str) -> list[dict[str, Any]]:
    """Return what an Alertmanager has."""
    with urllib.request.urlopen(f"{url}/api/v2/alerts", timeout=5) as answer:
        return json.load(answer)


def until(what: str, found: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Wait for something of another process to become true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")
