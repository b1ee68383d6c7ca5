"""A small listener that speaks the wire over a real socket: it stores what a trainer posts and answers
with a signed directive, so that what runs beside a trainer can be tested without the server."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from andon.directive import Directive
from andon.permit import Checkpoint, Permit, Positions, SkipWindow, issue
from andon.signing import SigningKey, new_secret, verify_webhook
from andon.wire import Event, Frame, decode_events, decode_frame, decompress, format_time


class Listener:
    """Answers `/api/v1/runs/{run}/…`.

    `hold_when(event)` decides for each event whether the directive turns to hold.
    """

    def __init__(self, tmp_path: Path, run="test-run", hold_when=lambda event: False, hold_s=600.0):
        self.run, self.secret = run, new_secret()
        self.key = SigningKey.load_or_create(tmp_path / "listener.key")
        self.trusted = [self.key.key_id]
        self.hold_when, self.hold_s = hold_when, hold_s
        self.events: list[tuple[str, Event]] = []
        self.frames: list[Frame] = []
        self.allow_deletion = False
        self.may_go = lambda uri: self.allow_deletion  # a test may ask for more
        self.asked: list[str] = []  # URIs whose deletion was asked for
        self.volatile = lambda: []  # what vanishes and is not safe yet, by the server
        self.asked_volatile = 0
        self.granted: dict | None = None  # the permit that /resume gives
        self.directive = Directive(kind="continue", seq=1, run=run, attempt=1)
        self._lock = threading.Lock()
        self._seen: dict[str, bytes] = {}  # webhook-id → body: a repeat counts once, and is the same post
        listener = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                if self.path.endswith("/volatile"):
                    listener.asked_volatile += 1
                    return self._answer(200, {"items": listener.volatile()})
                query = parse_qs(urlsplit(self.path).query)
                after, wait_s = int(query["after"][0]), min(float(query["wait"][0]), 2.0)
                end = time.monotonic() + wait_s
                while listener.directive.seq == after and time.monotonic() < end:
                    time.sleep(0.02)
                self._answer(200, {"directive": listener.directive.sign(listener.key)})

            def do_POST(self):
                raw = self.rfile.read(int(self.headers["content-length"]))
                verify_webhook(
                    [listener.secret],
                    self.headers["webhook-id"],
                    self.headers["webhook-timestamp"],
                    self.headers["webhook-signature"],
                    raw,
                    time.time(),
                )
                body = decompress(raw, self.headers.get("content-encoding"), 2**25)
                kind = self.headers.get("content-type", "")
                if self.path.endswith("/deletions"):
                    uris = json.loads(body)["uris"]
                    listener.asked += uris
                    items = [{"uri": uri, "allow": listener.may_go(uri)} for uri in uris]
                    return self._answer(200, {"items": items})
                if self.path.endswith("/resume"):
                    return self._answer(200, {"permit": listener.granted})
                with listener._lock:
                    duplicate = listener._is_repeat(self.headers["webhook-id"], body)
                    if duplicate:
                        taken = 0
                    elif self.path.endswith("/frames"):
                        listener.frames.append(decode_frame(body, kind))
                        taken = 1
                    else:
                        decoded = decode_events(body, kind)
                        assert not decoded.refused, decoded.refused
                        taken = len(decoded.events)
                        for _, event in decoded.events:
                            listener._take(event)
                signed = listener.directive.sign(listener.key)
                counts = {"accepted": taken, "refused": [], "duplicate": duplicate}
                return self._answer(202, {**counts, "directive": signed, "wanted": 0})

            def _answer(self, status, document):
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def _is_repeat(self, webhook_id, body):
        known = webhook_id in self._seen
        assert self._seen.setdefault(webhook_id, body) == body, f"{webhook_id}: another body under one id"
        return known

    def _take(self, event):
        self.events.append((event.type, event))
        if self.directive.kind == "continue" and self.hold_when(event):
            now_ns = time.time_ns()
            self.directive = Directive(
                kind="hold",
                seq=self.directive.seq + 1,
                run=self.run,
                attempt=self.directive.attempt,
                deadline=format_time(now_ns + int(self.hold_s * 1e9)),
                incident="2041",
                since=format_time(now_ns),
            )

    def of(self, kind):
        """Return the events of one type, in order of arrival."""
        return [event for name, event in self.events if name == kind]

    def permit(self, *, checkpoint, positions, skip, attempt=2, run=None, kind="rollback_and_skip"):
        """Return a signed permit: `checkpoint` is (step, uri, digest), `skip` (from, to)."""
        now_ns = time.time_ns()
        return issue(
            Permit(
                permit="P-1",
                run=run or self.run,
                attempt=attempt,
                incident="2041",
                approval="A-1",
                approval_digest="0" * 64,
                plan=kind,
                checkpoint=Checkpoint(*checkpoint) if checkpoint else None,
                positions=Positions(**positions),
                skip=SkipWindow(*skip) if skip else None,
                issued_at=format_time(now_ns),
                expires_at=format_time(now_ns + 3600 * 10**9),
            ),
            self.key,
        )

    def go_on(self, attempt=2):
        """Turn the directive back to continue for the next attempt, as the server does at its launch."""
        self.directive = Directive(kind="continue", seq=self.directive.seq + 1, run=self.run, attempt=attempt)

    def resume_in_place(self, attempt=2):
        """Grant a resume from memory to ranks that wait."""
        self.granted = self.permit(
            checkpoint=None, positions={}, skip=None, attempt=attempt, kind="resume_in_place"
        )
        self.let_go()

    def let_go(self):
        """Say that what was held may go on by the permit that is granted."""
        held = self.directive
        self.directive = Directive(
            kind="resume",
            seq=held.seq + 1,
            run=self.run,
            attempt=held.attempt,
            incident=held.incident,
            since=held.since,
            plan={"kind": "resume_in_place"},
            permit="P-1",
        )

    def close(self):
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
