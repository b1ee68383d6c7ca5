"""What an agent says to the server: signed requests of one run, one connection per thread."""

import threading
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from andon.client_http import AnswerError, Clock, Connection, new_id


class Server:
    """Signed calls below `/api/v1/runs/{run}`. Safe to use from several threads."""

    def __init__(self, url: str, run: str, secret: str, node: str, *, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self.node = node
        self._base = f"/api/v1/runs/{quote(run, safe='')}"
        self._secret = secret
        self._timeout_s = timeout_s
        self._clock = Clock()
        self._mine = threading.local()
        self._connection()  # a wrong address or secret is said now

    def _connection(self) -> Connection:
        found: Connection | None = getattr(self._mine, "connection", None)
        if found is None:
            found = Connection(self.url, self._secret, self._clock, timeout_s=self._timeout_s)
            self._mine.connection = found
        return found

    def wanted(self) -> dict[str, Any]:
        """Return what is wanted of this node. Raises AnswerError, Unreachable, as all calls here."""
        answer = self._connection().get(f"{self._base}/wanted?{urlencode({'node': self.node})}")
        if not answer.ok:
            raise AnswerError(answer.problem())
        return answer.document

    def post(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """Post a document about a task; what is asked and reported may be repeated without harm."""
        body = msgspec.json.encode({"node": self.node, **document})
        answer = self._connection().post(self._base + path, body, "application/json", new_id())
        if not answer.ok:
            raise AnswerError(answer.problem())
        return answer.document

    def decline(self, task: str, why: str, says: str) -> None:
        """Say that this node cannot do a task."""
        self.post(f"/wanted/{task}/decline", {"why": why, "says": says[:900]})
