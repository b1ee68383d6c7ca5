"""One part of a file on its way: a signed URL, a region of the file, and a cap on the rate."""

import contextlib
import http.client
import threading
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from andon.agent.pace import Pace

_BLOCK_BYTES = 256 << 10
_TIMEOUT_S = 120.0


class PutFailed(Exception):
    """The part is not there. `status` is 0 when there was no answer."""

    def __init__(self, status: int, says: str) -> None:
        super().__init__(f"{status}: {says}" if status else says)
        self.status = status


class Putter:
    """PUTs parts over kept connections, one per thread and host."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._mine = threading.local()

    def put(self, url: str, headers: dict[str, str], file: Path, start: int, length: int) -> None:
        """Send `length` bytes of a file from offset `start`.

        Raises:
            PutFailed: refused, or no answer.
            OSError: the file cannot be read.
        """
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection = self._connection(parts.scheme, parts.netloc)
        with file.open("rb") as stream:
            stream.seek(start)
            region = _Region(stream, length, self.pace)
            try:
                connection.request(
                    "PUT", target, body=region, headers={**headers, "Content-Length": str(length)}
                )
                response = connection.getresponse()
                says = response.read(2000)
                if response.will_close:
                    connection.close()
            except (OSError, http.client.HTTPException) as error:
                self._forget(parts.netloc)
                if region.failed is not None:
                    raise region.failed from error
                raise PutFailed(0, f"{parts.netloc}: {type(error).__name__}: {error}") from error
        if response.status // 100 != 2:
            # What is left of our body would be read as the next request.
            self._forget(parts.netloc)
            raise PutFailed(response.status, says.decode("utf-8", "replace")[:500])

    def _connection(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        known: dict[str, http.client.HTTPConnection] = getattr(self._mine, "known", {})
        self._mine.known = known
        if netloc not in known:
            kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
            if scheme not in kinds:
                raise PutFailed(0, f"{scheme}://{netloc}: not an address that parts can be sent to")
            known[netloc] = kinds[scheme](netloc, timeout=_TIMEOUT_S, blocksize=_BLOCK_BYTES)
        return known[netloc]

    def _forget(self, netloc: str) -> None:
        connection = self._mine.known.pop(netloc, None)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()


class _Region:
    """A region of a file as http.client reads it; an unreadable disk is told apart from a dead peer."""

    def __init__(self, stream: IO[bytes], length: int, pace: Pace) -> None:
        self._stream = stream
        self._left = length
        self._pace = pace
        self.failed: OSError | None = None

    def read(self, count: int = -1) -> bytes:
        size = self._left if count < 0 else min(count, self._left)
        if size == 0:
            return b""
        try:
            data = self._stream.read(size)
            if not data:
                raise OSError(f"{self._stream.name}: is shorter than it was")
        except OSError as error:
            self.failed = error
            raise
        self._left -= len(data)
        self._pace.take(len(data))
        return data
