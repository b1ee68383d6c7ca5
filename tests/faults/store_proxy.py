"""A proxy in front of an S3 store that makes it fail in the ways stores and networks do."""

import contextlib
import http.client
import socket
import struct
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

PATIENCE_S = 60.0
_BUSY = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>'
)
# What belongs to one connection and not to the message.
_HOPS = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}


class How(StrEnum):
    """What happens to a request."""

    BUSY = "503"
    RESET = "the connection is reset before the store sees it"
    STALL = "it waits in front of the store, and then never gets there"
    DELAY = "it waits in front of the store, and then goes there"
    NO_ANSWER = "the store does it, and the answer never arrives"
    FLIP = "one bit of its body is flipped on the way to the store"
    FLIP_ANSWER = "one bit of the answer's body is flipped on the way back"


@dataclass
class Fault:
    """Strikes requests whose line ("PUT /bucket/key?query") holds all of `words`.

    The first `skip` of them pass, the next `times` are struck. `met` is set when one is; what waits goes
    on when `go` is.
    """

    how: How
    words: tuple[str, ...]
    skip: int = 0
    times: int = 1
    least_bytes: int = 0  # of the body it is sent with
    struck: int = 0
    met: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def strikes(self, line: str, size: int) -> bool:
        """Count a request, and return whether it is struck."""
        if size < self.least_bytes or not all(word in line for word in self.words):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.struck >= self.times:
            return False
        self.struck += 1
        return True


class StoreProxy:
    """Forwards requests to the store on `port` of this machine, but for those that a fault strikes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.faults: list[Fault] = []
        self.waiting = 0  # requests that a fault keeps from going on
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def fail(self, how: How, *words: str, **more: int) -> Fault:
        """Have requests fail from now on; returns what tells when one did."""
        fault = Fault(how, words, **more)
        with self.lock:
            self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Forward everything again, and let go what waits."""
        with self.lock:
            for fault in self.faults:
                fault.go.set()
            self.faults.clear()

    def close(self) -> None:
        """Stop listening."""
        self.heal()
        self._server.shutdown()
        self._server.server_close()

    def fault_of(self, line: str, size: int) -> Fault | None:
        """Return the fault that strikes a request."""
        with self.lock:
            return next((fault for fault in self.faults if fault.strikes(line, size)), None)

    def wait(self, fault: Fault) -> None:
        """Keep a request until the fault lets it go."""
        with self.lock:
            self.waiting += 1
        fault.met.set()
        fault.go.wait(PATIENCE_S)
        with self.lock:
            self.waiting -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    proxy: StoreProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream: http.client.HTTPConnection | None = None

    def log_message(self, *_: Any) -> None:
        pass

    def finish(self) -> None:
        if self.upstream is not None:
            self.upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def pass_on(self) -> None:
        proxy = cast(_Server, self.server).proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = proxy.fault_of(f"{self.command} {self.path}", len(body))
        how = fault.how if fault is not None else None
        if fault is not None and how not in {How.STALL, How.DELAY, How.NO_ANSWER}:
            fault.met.set()
        if how == How.BUSY:
            self._answer(503, "Service Unavailable", [("Content-Type", "application/xml")], _BUSY)
            return
        if how == How.RESET:
            self._reset()
            return
        if fault is not None and how in {How.STALL, How.DELAY}:
            proxy.wait(fault)
            if how == How.STALL:
                self._reset()
                return
        response, answer = self._forward(proxy.port, _flipped(body) if how == How.FLIP else body)
        if fault is not None and how == How.NO_ANSWER:
            proxy.wait(fault)
            self._reset()
            return
        if how == How.FLIP_ANSWER:
            answer = _flipped(answer)
        self._answer(response.status, response.reason, response.getheaders(), answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815

    def _forward(self, port: int, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOPS:
                self.upstream.putheader(name, value)
        if body or self.command in {"PUT", "POST"}:
            self.upstream.putheader("Content-Length", str(len(body)))
        self.upstream.endheaders(body or None)
        response = self.upstream.getresponse()
        return response, response.read()

    def _answer(self, status: int, reason: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status, reason)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in _HOPS:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # http.server shuts a connection down politely; detached, closing it resets.
            socket.socket(fileno=self.connection.detach()).close()


def _flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
