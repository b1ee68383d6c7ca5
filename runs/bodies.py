"""Reading request bodies under a cap, so that a sender always gets its answer."""

from django.http import HttpRequest, UnreadablePostError

from runs.problems import Problem

MORE = 1 << 20  # how much beyond the cap is drained before a 413, so that the sender reads it
_CHUNK = 1 << 16


def read_body(request: HttpRequest, cap_bytes: int) -> bytes:
    """Return the body as sent.

    Raises:
        Problem: 413 above the cap, after draining the cap and one MiB more; 400 when it was cut.
    """
    declared = _content_length(request)
    if declared is not None and declared > cap_bytes:
        _drain(request, min(declared, cap_bytes + MORE))
        raise _too_large(cap_bytes)
    if declared is None and "chunked" in request.META.get("HTTP_TRANSFER_ENCODING", "").lower():
        return _read_chunked(request, cap_bytes)
    try:
        body = request.read(declared or 0) if declared else b""
        while declared and len(body) < declared:
            more = request.read(declared - len(body))
            if not more:
                raise Problem(
                    400, "body-cut", f"The body ended after {len(body)} of {declared} bytes.", field="body"
                )
            body += more
    except UnreadablePostError as error:
        raise Problem(400, "body-cut", "The body ended before Content-Length bytes.", field="body") from error
    return bytes(body)


def _content_length(request: HttpRequest) -> int | None:
    text = request.META.get("CONTENT_LENGTH") or ""
    # Longer numbers are beyond any cap; int() of thousands of digits would be work for a stranger.
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text) if len(text) < 19 else 1 << 62


def _drain(request: HttpRequest, length: int) -> None:
    try:
        while length > 0:
            got = request.read(min(length, _CHUNK))
            if not got:
                return
            length -= len(got)
    except (UnreadablePostError, OSError):
        return  # the sender gave up: there is nobody left to answer


def _read_chunked(request: HttpRequest, cap_bytes: int) -> bytes:
    # Django reads nothing without Content-Length; the server has taken the chunks apart already.
    stream = request.environ["wsgi.input"]  # type: ignore[attr-defined]
    parts: list[bytes] = []
    total = 0
    while total <= cap_bytes + MORE:
        part = stream.read(_CHUNK)
        if not part:
            break
        total += len(part)
        if total <= cap_bytes:
            parts.append(part)
    if total > cap_bytes:
        raise _too_large(cap_bytes)
    return b"".join(parts)


def _too_large(cap_bytes: int) -> Problem:
    return Problem(413, "too-large", f"The body is above {cap_bytes} bytes: send it in parts.", field="body")
