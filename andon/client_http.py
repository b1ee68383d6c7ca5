"""One signed HTTP connection to an Andon server, and what its answers mean. Standard library only."""

import contextlib
import email.utils
import http.client
import random
import secrets
import socket
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from andon.signing import sign_get, sign_webhook
from andon.wire_times import parse_time
from andon.wire_version import HEADER, VERSION

MAX_ANSWER_BYTES = 16 * 1024 * 1024
TIMESTAMP_PROBLEM = "timestamp-out-of-tolerance"


class Unreachable(Exception):
    """No answer: connection refused, cut, timed out, or not HTTP."""


class AnswerError(Exception):
    """The server answered with a problem. `problem` is its RFC 9457 body (at least type, status, detail)."""

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(f"{problem.get('status')} {problem.get('type')}: {problem.get('detail')}")
        self.problem = problem
        self.status: int = problem["status"]
        self.type: str = problem["type"]


class Answer(msgspec.Struct):
    """Status, decoded body (an empty object when it was not one) and the pause the server asked for."""

    status: int
    document: dict[str, Any]
    retry_after_s: float | None = None

    @property
    def ok(self) -> bool:
        """2xx: the server has it."""
        return 200 <= self.status < 300

    @property
    def problem_type(self) -> str:
        """The last part of the problem's type, which may be a whole address."""
        return str(self.document.get("type", "")).rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]

    @property
    def permanent(self) -> bool:
        """Whether the same post will be refused again for what it is.

        Not 401, 403 and 404: a secret that is being rotated, a proxy, a run that is not made yet.
        """
        return self.status in (400, 405, 409, 410, 413, 415, 422)

    def problem(self) -> dict[str, Any]:
        """Return the problem with type, status and detail always there."""
        return {
            **self.document,
            "type": self.problem_type or "about:blank",
            "status": self.status,
            "detail": str(self.document.get("detail", "") or f"HTTP {self.status}"),
        }


class Clock:
    """The server's clock seen from here, learnt from a refused timestamp. Never touches event times."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now_s(self) -> float:
        """Return the time to sign with."""
        return time.time() + self.offset_s

    def learn(self, answer: Answer) -> bool:
        """Take the server's time from a 401 for the timestamp; return whether there was one."""
        if answer.status != 401 or answer.problem_type != TIMESTAMP_PROBLEM:
            return False
        try:
            server_ns, _ = parse_time(answer.document.get("server_time"))
        except ValueError:
            return False
        self.offset_s = server_ns / 1e9 - time.time()
        return True


class Connection:
    """A keep-alive connection that signs what it sends. For one thread at a time.

    Args:
        url: the server's address, with a path when it lives below one.
        secret: the run's `whsec_…`.
        clock: shared by the connections of one client.
    """

    def __init__(
        self, url: str, secret: str, clock: Clock, *, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: {url!r} is not an http or https address")
        sign_webhook(secret, "check", 0, b"")  # a wrong secret is said now, not in a thread later
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._secret = secret
        self._clock = clock
        self._timeout_s = timeout_s
        self._tls = tls
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """Make a request that waits in another thread fail now."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def get(self, path: str, *, timeout_s: float | None = None) -> Answer:
        """Send a signed GET. Raises Unreachable."""
        return self._signed(_Request("GET", self._prefix + path, new_id(), timeout_s=timeout_s))

    def post(
        self, path: str, body: bytes, content_type: str, webhook_id: str, *, encoding: str = ""
    ) -> Answer:
        """Send a signed POST; the id stays the same whenever the same body is sent again.

        Raises:
            Unreachable: there was no answer; whether the server has it is not known.
        """
        headers = {"content-type": content_type}
        if encoding:
            headers["content-encoding"] = encoding
        return self._signed(_Request("POST", self._prefix + path, webhook_id, body=body, headers=headers))

    def _signed(self, request: "_Request") -> Answer:
        answer = self._send(request)
        if self._clock.learn(answer):  # once: a second refusal is not about our clock
            answer = self._send(request)
        return answer

    def _send(self, request: "_Request") -> Answer:
        headers = self._headers(request)
        reused = self._connection is not None
        try:
            return self._exchange(request, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            # A kept connection may have been closed by the other side meanwhile; the id makes asking
            # again safe. A timeout on it is a timeout.
            if not reused or isinstance(error, TimeoutError):
                raise Unreachable(_reason(error)) from error
        try:
            return self._exchange(request, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(_reason(error)) from error

    def _headers(self, request: "_Request") -> dict[str, str]:
        timestamp_s = int(self._clock.now_s())
        signature = (
            sign_get(self._secret, request.webhook_id, timestamp_s, request.method, request.target)
            if request.body is None
            else sign_webhook(self._secret, request.webhook_id, timestamp_s, request.body)
        )
        headers = {
            **request.headers,
            "accept": "application/json",
            "user-agent": "andon-client",
            HEADER: VERSION,
            "webhook-id": request.webhook_id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": signature,
        }
        if self._clock.offset_s:
            headers["andon-clock-offset-ms"] = str(round(self._clock.offset_s * 1000))
        return headers

    def _exchange(self, request: "_Request", headers: dict[str, str]) -> Answer:
        wait_s = request.timeout_s or self._timeout_s
        if self._connection is None:
            connection = (
                http.client.HTTPSConnection(self._host, self._port, timeout=wait_s, context=self._tls)
                if self._secure
                else http.client.HTTPConnection(self._host, self._port, timeout=wait_s)
            )
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = connection
        connection = self._connection
        connection.sock.settimeout(wait_s)
        connection.request(request.method, request.target, body=request.body, headers=headers)
        response = connection.getresponse()
        raw = response.read(MAX_ANSWER_BYTES + 1)
        if len(raw) > MAX_ANSWER_BYTES:
            raise http.client.HTTPException("the answer is too large")
        if response.will_close:
            self.close()
        try:
            document = msgspec.json.decode(raw) if raw else {}
        except (msgspec.DecodeError, RecursionError):
            document = {}
        if not isinstance(document, dict):
            document = {}
        return Answer(response.status, document, _retry_after(response.getheader("retry-after")))


class _Request(msgspec.Struct):
    method: str
    target: str  # path and query as they stand in the request line, which is what a GET signs
    webhook_id: str
    body: bytes | None = None
    headers: dict[str, str] = {}
    timeout_s: float | None = None


def new_id() -> str:
    """Return a webhook-id that no other post has."""
    return f"msg_{secrets.token_hex(16)}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _retry_after(value: str | None) -> float | None:
    """Read Retry-After, seconds or an HTTP date; at most an hour, since a slip must not silence a run."""
    if value is None:
        return None
    seconds: float
    if value.strip().isascii() and value.strip().isdigit():
        seconds = float(value)
    else:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(seconds, 0.0), 3600.0)


class Backoff:
    """How long to leave the server alone after failures: doubling from 0.5 s to a minute, with jitter.

    The specification's own schedule reaches hours; a run that is being watched cannot wait that long
    to learn that it is held.
    """

    def __init__(self, first_s: float = 0.5, most_s: float = 60.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._failures = 0
        self.until_s = 0.0  # time.monotonic()

    def failed(self, retry_after_s: float | None) -> None:
        """Count a failure; the server's own wish is the least that is waited."""
        pause_s = min(self._first_s * 2 ** min(self._failures, 20), self._most_s)
        pause_s *= random.uniform(0.5, 1.0)  # noqa: S311  (spreads clients, guards nothing)
        self._failures += 1
        self.until_s = time.monotonic() + max(pause_s, retry_after_s or 0.0)

    def worked(self) -> None:
        """Start over."""
        self._failures = 0
        self.until_s = 0.0

    @property
    def waiting(self) -> bool:
        """Whether the pause is still on."""
        return time.monotonic() < self.until_s
