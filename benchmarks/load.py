"""A load generator in a process of its own: prepared requests over kept connections.

Requests are complete bytes, signed before the clock starts, so that the client's own work is small. It
still shares the machine's cores with the server, as a trainer on the same host would.
"""

import heapq
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context


@dataclass(frozen=True)
class Answered:
    """What came back: one entry per request, in the order of answers.

    `latency_s` counts from the moment a request was due (open loop) or sent (closed loop), so waiting
    in a queue of our own counts as well.
    """

    wall_s: float
    latency_s: list[float]
    status: dict[int, int]
    holds: int
    offered_s: float  # from the first to the last request being due


@dataclass
class _Connection:
    sock: socket.socket
    due_at: float = 0.0
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    buffer: bytearray | None = None


def fire(
    port: int, requests: Sequence[bytes], connections: int, arrivals_s: Sequence[float] | None = None
) -> Answered:
    """Send `requests` over `connections` from another process and return what was answered.

    Args:
        arrivals_s: when each request is due, seconds after the start, ascending. None: closed loop,
            every connection sends its next request as soon as it has an answer.
    """
    context = get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_fire, (port, list(requests), connections, arrivals_s))


def _fire(port: int, requests: list[bytes], connections: int, arrivals_s: Sequence[float] | None) -> Answered:
    selector = selectors.DefaultSelector()
    idle: list[_Connection] = []
    for _ in range(connections):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        idle.append(_Connection(sock))
    latencies: list[float] = []
    status: dict[int, int] = {}
    holds = 0
    begun = time.perf_counter()
    due = [begun + at for at in arrivals_s] if arrivals_s is not None else None
    heapq.heapify(due or [])
    n = sent = 0
    while n < len(requests):
        now = time.perf_counter()
        while idle and sent < len(requests) and (due is None or due[sent] <= now):
            one = idle.pop()
            one.due_at = now if due is None else due[sent]
            one.out, one.buffer = memoryview(requests[sent]), bytearray()
            sent += 1
            _write(one)
            selector.register(one.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if one.out else 0), one)
        wait_s = None
        if due is not None and idle and sent < len(requests):
            wait_s = max(0.0, due[sent] - time.perf_counter())
        for key, mask in selector.select(wait_s):
            one = key.data
            if mask & selectors.EVENT_WRITE and one.out:
                _write(one)
                if not one.out:
                    selector.modify(one.sock, selectors.EVENT_READ, one)
            if not mask & selectors.EVENT_READ:
                continue
            part = one.sock.recv(1 << 16)
            if not part:
                raise ConnectionError(f"the server closed a connection after {n} answers")
            one.buffer += part
            if (code := _complete(one.buffer)) is None:
                continue
            latencies.append(time.perf_counter() - one.due_at)
            status[code] = status.get(code, 0) + 1
            holds += b'"kind": "hold"' in one.buffer
            n += 1
            selector.unregister(one.sock)
            idle.append(one)
    wall_s = time.perf_counter() - begun
    for one in idle:
        one.sock.close()
    return Answered(wall_s, latencies, status, holds, arrivals_s[-1] if arrivals_s else wall_s)


def _write(one: _Connection) -> None:
    try:
        one.out = one.out[one.sock.send(one.out) :]
    except BlockingIOError:
        return


def _complete(buffer: bytearray) -> int | None:
    head = buffer.find(b"\r\n\r\n")
    if head < 0:
        return None
    lower = bytes(buffer[:head]).lower()
    at = lower.find(b"content-length:")
    length = int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    return int(buffer[9:12]) if len(buffer) >= head + 4 + length else None


def request(path: str, body: bytes, content_type: str, headers: dict[str, str] | None = None) -> bytes:
    """Return the bytes of one POST."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        f"content-type: {content_type}",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
