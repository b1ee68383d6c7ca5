"""The client: posts a run's events and frames, keeps what cannot be sent, follows the directive.

    from andon.client import Client
    client = Client("http://localhost:8000", "my-run", "whsec_…")
    client.send_events([{"type": "step", "step": 1, "data": {"loss": 2.3}}])

Made to sit inside a training loop: a call returns within `max_wait_s` whatever the server, the
network or the disk does. One thread writes posts to the spool, one sends them in order.
"""

import time
from typing import Any
from urllib.parse import urlencode

import msgspec
import numpy as np

from andon import wire_arrow  # noqa: F401  (loaded here, and not in the first post from a step)
from andon.client_http import Answer, AnswerError, Backoff, Unreachable, new_id
from andon.client_sender import Sender
from andon.masking import mask_value
from andon.spool_records import must_arrive
from andon.wire import MAX_FRAME_BYTES, Frame, encode_events, encode_frame

__all__ = ["AnswerError", "Client", "Unreachable"]

CHUNK_BYTES = 1024 * 1024  # well under the server's 4 MiB, and small enough to share a connection


class Client(Sender):
    """A signed sender for one run. Safe to call from several threads. Arguments: see `Sender`."""

    def send_events(self, events: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Post events (wire form, as dicts); returns the server's answer.

        Secrets in `data` (by name or by shape, andon/masking.py) are masked before anything is written or
        sent. An event that names no `time` gets now: one that waits in the spool must not look fresh when
        it arrives. None: the post waits in the spool, or the answer takes longer than `max_wait_s`.
        A problem the server answered with comes back as its dict (`type`, `status`, `detail`, …);
        such a post is not sent again.

        Raises:
            TypeError: an event cannot be written as JSON.
            ValueError: there is no event.
            RuntimeError: the client is closed.
        """
        now_ns = time.time_ns()
        defaults = {"time": now_ns, "node": self.node, "attempt": self.attempt}
        given = {name: value for name, value in defaults.items() if value is not None}
        tickets = [
            self.enqueue("/events", body, "application/json", events=len(part), kept=must_arrive(part))
            for body, part in _chunks([_masked({**given, **event}) for event in events])
        ]
        return _merged(self.wait_for(tickets))

    def send_frame(self, frame: Frame) -> dict[str, Any] | None:
        """Post one frame; answers as `send_events`. Rows without `time_ns` get now.

        Raises:
            ValueError: the frame is larger than the server takes.
            RuntimeError: the client is closed.
        """
        changes: dict[str, Any] = {}
        if frame.time_ns is None:
            changes["time_ns"] = np.full(frame.rows, time.time_ns(), np.int64)
        if frame.node is None and self.node is not None:
            changes["node"] = self.node
        body, content_type = encode_frame(msgspec.structs.replace(frame, **changes))
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"the frame has {len(body)} bytes, the server takes {MAX_FRAME_BYTES}; split it")
        return _merged(self.wait_for([self.enqueue("/frames", body, content_type)]))

    # --- asking -----------------------------------------------------------------------------------

    @property
    def directive(self) -> dict[str, Any] | None:
        """The newest directive that counts (andon/directive.py), None before the first."""
        return self._follower.document

    def wait_directive(self, after: int | None = None, wait_s: float = 30.0) -> dict[str, Any] | None:
        """Wait until the directive's `seq` is not `after` (default: the newest seen) or time is up.

        Blocks its caller, so it is for supervisors and the rank 0 of a held run. Returns the newest
        directive known then. An unreachable server is waited for, within `wait_s`.
        """
        known = self._follower.seq if after is None else after
        end_s = time.monotonic() + wait_s
        backoff = Backoff(most_s=5.0)
        connection = self._open()
        try:
            while True:
                left_s = end_s - time.monotonic()
                ask_s = max(0, min(30, int(left_s)))
                query = urlencode({"after": known, "wait": ask_s})
                pause_s = 0.0
                try:
                    answer = connection.get(f"{self._base}/directive?{query}", timeout_s=ask_s + 10.0)
                except Unreachable as error:
                    self.last_error = f"no answer: {error}"
                    backoff.failed(None)
                else:
                    if answer.ok:
                        backoff.worked()
                        document = answer.document.get("directive", answer.document)
                        self._learn_keys(connection, document)
                        with self._lock:
                            self._follower.offer(document)
                    elif answer.permanent or answer.status in (401, 403, 404):
                        raise AnswerError(answer.problem())
                    else:
                        backoff.failed(None)
                    pause_s = answer.retry_after_s or 0.0
                if self._follower.seq > known or time.monotonic() >= end_s:
                    return self._follower.document
                pause_s = max(pause_s, backoff.until_s - time.monotonic(), 0.05)
                time.sleep(min(pause_s, max(0.0, end_s - time.monotonic())))
        finally:
            connection.close()

    def resume(
        self, incident: str, attempt: int, webhook_id: str | None = None, *, supervisor: str = ""
    ) -> dict[str, Any]:
        """Exchange an approval for the permit document; the same `webhook_id` gets the same permit.

        A supervisor that names itself may come back for the next attempt, if the machines ended this one.
        Verify it (`andon.permit.verify`, `andon.hold.release`) before believing it.

        Raises:
            AnswerError: `type` is not-contained (ask again), not-approved, changed-since-approval,
                already-exchanged, expired, …
            Unreachable: no answer; asking again with the same id is safe.
        """
        body = {"incident": incident, "attempt": attempt} | ({"supervisor": supervisor} if supervisor else {})
        answer = self._ask("/resume", body, webhook_id)
        permit = answer.document.get("permit")
        if not isinstance(permit, dict):
            raise AnswerError({"type": "no-permit", "status": answer.status, "detail": "the answer has none"})
        return permit

    def deletions(self, uris: list[str]) -> list[dict[str, Any]]:
        """Ask which URIs may be deleted; one item per URI, in order. No answer means no."""
        try:
            items = self._ask("/deletions", {"uris": uris}, None).document.get("items")
        except (Unreachable, AnswerError) as error:
            return [_denied(uri, f"no answer: {error}") for uri in uris]
        answers: dict[Any, dict[str, Any]] = {}
        for item in items if isinstance(items, list) else []:
            if isinstance(item, dict):
                answers[item.get("uri")] = {**item, "allow": item.get("allow") is True}
        return [answers.get(uri, _denied(uri, "the answer does not name it")) for uri in uris]

    def wanted(self, node: str | None = None) -> list[dict[str, Any]]:
        """Return the evidence this node should upload. Raises AnswerError, Unreachable."""
        return self._items(f"{self._base}/wanted?{urlencode({'node': node or self.node or ''})}")

    def volatile(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """Return what of the run's open evidence vanishes with its processes and is not safe yet.

        For whoever must kill: each is `{"kind", "name", "state", "says"}`. Raises AnswerError, Unreachable.
        """
        return self._items(f"{self._base}/volatile", timeout_s=timeout_s)

    def _items(self, path: str, **how: Any) -> list[dict[str, Any]]:
        connection = self._open()
        try:
            answer = connection.get(path, **how)
        finally:
            connection.close()
        if not answer.ok:
            raise AnswerError(answer.problem())
        items = answer.document.get("items")
        return items if isinstance(items, list) else []

    def _ask(self, path: str, document: dict[str, Any], webhook_id: str | None) -> Answer:
        connection = self._open()
        try:
            answer = connection.post(
                self._base + path, msgspec.json.encode(document), "application/json", webhook_id or new_id()
            )
        finally:
            connection.close()
        if not answer.ok:
            raise AnswerError(answer.problem())
        return answer


# A thousand ids and numbers each step, and no text.
_NOT_MASKED = {"batch.seen", "loader.position"}


def _masked(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event without secrets: they are masked here, on the node, before any byte leaves it."""
    if not event.get("data") or event.get("type") in _NOT_MASKED:
        return event
    return {**event, "data": mask_value(event["data"])}


def _chunks(events: list[dict[str, Any]]) -> list[tuple[bytes, list[dict[str, Any]]]]:
    body = encode_events(events)
    if len(body) <= CHUNK_BYTES or len(events) == 1:
        return [(body, events)]
    half = len(events) // 2
    return _chunks(events[:half]) + _chunks(events[half:])


def _merged(answers: list[tuple[int, dict[str, Any]]] | None) -> dict[str, Any] | None:
    """Return one answer for a list that was posted in pieces of so many events.

    Counts are added, and the index of a refused event is its place in the whole list. When a piece
    was refused as a whole, its problem is the answer.
    """
    if answers is None:
        return None
    if len(answers) == 1:
        return answers[0][1]
    problem = next((answer for _, answer in answers if "accepted" not in answer), None)
    if problem is not None:
        return problem
    merged = dict(answers[-1][1])
    merged["accepted"] = sum(answer["accepted"] for _, answer in answers)
    merged["refused"], before = [], 0
    for count, answer in answers:
        for row in answer.get("refused", ()):
            merged["refused"].append({**row, "index": row["index"] + before})
        before += count
    return merged


def _denied(uri: str, reason: str) -> dict[str, Any]:
    return {"uri": uri, "allow": False, "until": None, "dossier": None, "reason": reason}
