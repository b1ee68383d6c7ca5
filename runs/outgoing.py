"""One HTTP request to an address that an operator named: no redirects, a deadline, a small answer.

The deadline holds for the whole exchange, so that an answer that comes a byte at a time ends as well; a
redirect is an answer like any other, since what is sent may be signed or secret.
"""

import base64
import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

MOST_BYTES = 64 << 10


class NotSent(Exception):
    """Nobody answered, or not in time, or not HTTP. The message names no address and no secret."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers by lower-case name, and at most `MOST_BYTES` of the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def send(
    method: str,
    url: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
) -> Answer:
    """Send one request and return the answer, whatever its status.

    Args:
        url: `http(s)://[USER:PASSWORD@]HOST[:PORT][/PATH]`.

    Raises:
        NotSent: there was none.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise NotSent("the address cannot be read") from error
    if parts.scheme not in {"http", "https"} or not host:
        raise NotSent("the address is not http(s)://HOST")
    sent = {"user-agent": "andon", **(headers or {})}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        sent["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode('ascii')}"
    connection = (
        http.client.HTTPSConnection(host, port, timeout=timeout_s, context=ssl.create_default_context())
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=timeout_s)
    )
    late = threading.Event()
    timer = threading.Timer(timeout_s, _cut, [connection, late])
    timer.daemon = True
    timer.start()
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request(method, path, body=body, headers=sent)
        # Kept: with `Connection: close` the connection forgets it, and the timer has nothing to cut.
        held = connection.sock
        response = connection.getresponse()
        connection.sock = held
        content = response.read(MOST_BYTES)
        if late.is_set():
            raise TimeoutError
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, named, content)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise NotSent(f"no whole answer within {timeout_s:g} s") from error
        raise NotSent(f"{type(error).__name__}: {error}"[:200]) from error
    finally:
        timer.cancel()
        connection.close()


def _cut(connection: http.client.HTTPConnection, late: threading.Event) -> None:
    late.set()
    sock = connection.sock
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it ended by itself meanwhile
