"""The client against a small real HTTP server that checks signatures with the reference library."""

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from andon import keys
from andon.client import AnswerError, Client, Unreachable
from andon.client_http import Backoff
from andon.directive import Directive
from andon.signing import SigningKey, new_secret, verify_get
from andon.wire import ARROW_TYPE, Frame, decode_events, decode_frame
from tests import secrets

KEY = SigningKey.generate()
SECRET = new_secret()
STEP = {"type": "step", "step": 1, "data": {"loss": 2.3}}


def directive(seq: int, kind: str = "continue", run: str = "my-run", **fields) -> dict:
    return Directive(kind=kind, seq=seq, run=run, attempt=fields.pop("attempt", 1), **fields).sign(KEY)


class Peer:
    """What a server does as far as a client can see: verifies, remembers ids, answers as told.

    `answers` is a queue of (status, document, headers) used up before the usual 202.
    """

    def __init__(self, port: int = 0):
        self.posts: list[dict] = []
        self.requests = 0
        self.connections = 0
        self.answers: list[tuple[int, dict, dict]] = []
        self.directive: dict | None = None
        self.clock_ahead_s = 0.0
        self.delay_s = 0.0
        self.lock = threading.Lock()
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self):
                super().setup()
                peer.connections += 1

            def log_message(self, *_):
                pass

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                peer.requests += 1
                with peer.lock:
                    status, document, headers = peer.answer(self.path, dict(self.headers.items()), body)
                time.sleep(peer.delay_s)
                if peer.delay_s:
                    return  # the sender has gone
                self.reply(status, document, headers)

            def do_GET(self):
                peer.requests += 1
                with peer.lock:
                    status, document, headers = peer.answer_get(self.path, self.headers)
                self.reply(status, document, headers)

            def reply(self, status, document, headers):
                raw = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path, headers, body):
        headers = {name.lower(): value for name, value in headers.items()}
        try:
            shifted = {**headers, "webhook-timestamp": headers["webhook-timestamp"]}
            self.verify(shifted, body)
        except WebhookVerificationError as error:
            return 401, {"type": "signature", "status": 401, "detail": str(error)}, {}
        if abs(time.time() + self.clock_ahead_s - int(headers["webhook-timestamp"])) > 300:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.clock_ahead_s))
            problem = {
                "type": "https://x/problems/timestamp-out-of-tolerance",
                "status": 401,
                "server_time": now,
            }
            return 401, problem, {}
        if self.answers:
            return self.answers.pop(0)
        plain = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        duplicate = any(post["id"] == headers["webhook-id"] for post in self.posts)
        if not duplicate:
            self.posts.append({"id": headers["webhook-id"], "path": path, "headers": headers, "body": plain})
        count = len(decode_events(plain, "application/json").events) if path.endswith("/events") else 1
        answer = {"accepted": count, "refused": [], "duplicate": duplicate, "wanted": 0}
        return 202, {**answer, "directive": self.directive}, {}

    def verify(self, headers, body):
        """The signature alone: the library also judges the time, which is tested apart."""
        hook = Webhook(SECRET)
        stamp = headers["webhook-timestamp"]
        expected = hook.sign(
            headers["webhook-id"], datetime.fromtimestamp(int(stamp), UTC), body.decode("latin-1")
        )
        if body.isascii() and expected != headers["webhook-signature"]:
            raise WebhookVerificationError("no match")

    def answer_get(self, path, headers):
        names = ("webhook-id", "webhook-timestamp", "webhook-signature")
        verify_get([SECRET], *(headers[name] for name in names), "GET", path, time.time())
        if self.answers:
            return self.answers.pop(0)
        return 200, self.directive or {}, {}

    def events(self) -> list:
        found = []
        for post in self.posts:
            if post["path"].endswith("/events"):
                found += [event for _, event in decode_events(post["body"], "application/json").events]
        return found

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture
def connect(tmp_path, monkeypatch):
    clients = []
    monkeypatch.setattr(Backoff.__init__, "__defaults__", (0.05, 0.2))

    def make(url, **options) -> Client:
        defaults = {"spool_dir": tmp_path / "spool", "max_wait_s": 3.0, "timeout_s": 3.0}
        clients.append(Client(url, "my-run", SECRET, **{**defaults, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close(timeout_s=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class TestSending:
    def test_an_event_is_posted_signed_and_answered(self, peer, connect):
        peer.directive = directive(1)
        client = connect(peer.url, node="n1", attempt=1)
        before_ns = time.time_ns()
        answer = client.send_events([STEP])
        assert answer["accepted"] == 1
        (post,) = peer.posts
        assert post["path"] == "/api/v1/runs/my-run/events"
        (event,) = peer.events()
        assert (event.step, event.data, event.node, event.attempt) == (1, {"loss": 2.3}, "n1", 1)
        assert before_ns <= event.occurred_ns <= time.time_ns()
        assert client.directive == peer.directive

    def test_three_lines_post_a_first_event(self, peer, tmp_path):
        code = (
            "import sys; from andon.client import Client\n"
            f"c = Client({peer.url!r}, 'my-run', {SECRET!r})\n"
            "c.send_events([{'type':'step','step':1,'data':{'loss':2.3}}])"
        )
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
        assert [event.step for event in peer.events()] == [1]

    def test_what_the_caller_gave_is_left_alone(self, peer, connect):
        event = {"type": "step", "step": 1, "time": "2026-01-02T03:04:05Z"}
        connect(peer.url).send_events([event])
        assert event == {"type": "step", "step": 1, "time": "2026-01-02T03:04:05Z"}
        assert peer.events()[0].occurred_ns == 1_767_323_045 * 10**9

    def test_a_nan_arrives_as_a_nan(self, peer, connect):
        connect(peer.url).send_events([{"type": "step", "step": 1, "data": {"loss": float("nan")}}])
        assert peer.events()[0].flags["data.loss"] == "nan"

    def test_a_frame_is_posted(self, peer, connect):
        frame = Frame(
            stream="rank",
            attempt=1,
            step=np.zeros(3, np.int64),
            lane=np.arange(3, dtype=np.int32),
            metrics={"loss": np.array([1.0, np.nan, 2.0])},
        )
        assert connect(peer.url, node="n1").send_frame(frame)["accepted"] == 1
        (post,) = peer.posts
        assert post["headers"]["content-type"] == ARROW_TYPE
        read = decode_frame(post["body"], ARROW_TYPE)
        assert read.nonfinite("loss").tolist() == [False, True, False]
        assert read.node == "n1"
        assert abs(read.time_ns[0] - time.time_ns()) < 60e9

    def test_without_pyarrow_a_frame_goes_as_json(self, peer, connect, monkeypatch):
        monkeypatch.setattr("andon.wire_arrow.pyarrow", None)
        frame = Frame(
            stream="rank",
            attempt=1,
            step=np.zeros(3, np.int64),
            lane=np.arange(3, dtype=np.int32),
            metrics={"loss": np.array([1.0, np.nan, 2.0])},
        )
        assert connect(peer.url).send_frame(frame)["accepted"] == 1
        (post,) = peer.posts
        assert post["headers"]["content-type"] == "application/json"
        assert decode_frame(post["body"], "application/json").nonfinite("loss").tolist() == [
            False,
            True,
            False,
        ]

    def test_one_connection_is_kept(self, peer, connect):
        client = connect(peer.url)
        for step in range(20):
            assert client.send_events([{**STEP, "step": step}])
        assert peer.connections == 1

    def test_large_bodies_are_compressed_and_long_lists_are_split(self, peer, connect):
        client = connect(peer.url, max_wait_s=10.0)
        events = [{"type": "step", "step": n, "data": {"note": "x" * 500}} for n in range(5000)]
        answer = client.send_events(events)
        assert answer["accepted"] == 5000
        assert len(peer.posts) > 1
        assert all(post["headers"]["content-encoding"] == "gzip" for post in peer.posts)
        assert [event.step for event in peer.events()] == list(range(5000))

    def test_refusals_of_a_split_list_count_from_its_start(self, peer, connect):
        peer.answers = [(202, {"accepted": 0, "refused": [{"index": 3, "field": "a", "detail": ""}]}, {})] * 8
        events = [{"type": "step", "step": n, "data": {"note": "x" * 1000}} for n in range(4000)]
        rows = connect(peer.url, max_wait_s=10.0).send_events(events)["refused"]
        assert [row["index"] for row in rows] == [3 + 500 * piece for piece in range(8)]

    def test_a_refused_post_comes_back_as_its_problem_and_is_not_sent_again(self, peer, connect):
        peer.answers = [(422, {"type": "unprocessable", "status": 422, "detail": "bad", "field": "step"}, {})]
        client = connect(peer.url)
        answer = client.send_events([STEP])
        assert (answer["status"], answer["field"]) == (422, "step")
        assert client.send_events([STEP])["accepted"] == 1
        assert len(peer.posts) == 1
        assert client.status()["rejected"] == 1

    def test_wrong_arguments_are_said_at_once(self, connect, peer):
        with pytest.raises(ValueError, match="url"):
            connect("localhost:8000")
        client = connect(peer.url)
        with pytest.raises(ValueError, match="no event"):
            client.send_events([])
        with pytest.raises(TypeError):
            client.send_events([{"type": object()}])
        client.close()
        with pytest.raises(RuntimeError):
            client.send_events([STEP])


class TestRetrying:
    def test_a_server_that_comes_later_gets_everything_in_order(self, connect):
        port = free_port()
        client = connect(f"http://127.0.0.1:{port}", max_wait_s=0.2)
        for step in range(30):
            assert client.send_events([{**STEP, "step": step}]) is None
        assert client.status()["pending"] == 30
        peer = Peer(port)
        try:
            assert client.flush(10)
            assert [event.step for event in peer.events()] == list(range(30))
        finally:
            peer.close()

    @pytest.mark.parametrize("status", [500, 502, 503, 429, 401, 404, 301])
    def test_a_failure_is_tried_again_with_the_same_id(self, peer, connect, status):
        ids = []
        original = peer.answer

        def noting(path, headers, body):
            ids.append(headers.get("webhook-id"))
            return original(path, headers, body)

        peer.answer = noting
        peer.answers = [(status, {"detail": "no"}, {})] * 2
        client = connect(peer.url)
        client.send_events([STEP])
        assert client.flush(10)
        assert len(ids) == 3
        assert len(set(ids)) == 1
        assert len(peer.posts) == 1

    def test_retry_after_is_honoured(self, peer, connect):
        peer.answers = [(429, {"detail": "slow down"}, {"Retry-After": "1"})]
        client = connect(peer.url)
        begin = time.monotonic()
        client.send_events([STEP])
        assert client.flush(10)
        assert time.monotonic() - begin >= 1.0
        assert peer.requests == 2

    def test_a_kept_connection_that_the_server_closed_costs_nothing(self, peer, connect):
        client = connect(peer.url)
        assert client.send_events([STEP])
        client._connection.interrupt()
        assert client.send_events([STEP])["accepted"] == 1
        assert client.status()["failures"] == 0

    def test_an_answer_lost_on_the_way_is_a_duplicate_and_nothing_more(self, peer, connect):
        client = connect(peer.url, timeout_s=0.3)
        peer.delay_s = 0.6
        assert client.send_events([STEP]) is None
        peer.delay_s = 0.0
        assert client.flush(10)
        assert len(peer.posts) == 1
        assert client.status()["duplicates"] == 1

    def test_posts_too_old_are_given_up_and_told(self, connect):
        port = free_port()
        client = connect(f"http://127.0.0.1:{port}", max_wait_s=0.1, max_age_s=0.5)
        client.send_events([STEP, STEP])
        time.sleep(0.6)
        peer = Peer(port)
        try:
            client.send_events([{**STEP, "step": 2}])
            assert client.flush(10)
            told = [event for event in peer.events() if event.type == "gap"]
            assert [e.data["posts"] for e in told] == [1]
            assert (told[0].data["events"], told[0].data["reasons"]) == (2, {"too old": 1})
            assert [event.step for event in peer.events() if event.type == "step"] == [2]
        finally:
            peer.close()


class TestDurability:
    def test_what_was_accepted_survives_kill_9_and_is_sent_by_the_next_process(self, connect, tmp_path):
        port = free_port()
        code = (
            "import os, sys; from andon.client import Client\n"
            f"c = Client(sys.argv[1], 'my-run', {SECRET!r}, spool_dir=sys.argv[2], max_wait_s=2.0)\n"
            "for step in range(50): c.send_events([{'type': 'step', 'step': step}])\n"
            "os.kill(os.getpid(), 9)"
        )
        url, spool = f"http://127.0.0.1:{port}", tmp_path / "spool"
        dead = subprocess.run([sys.executable, "-c", code, url, str(spool)], timeout=60, check=False)
        assert dead.returncode == -9
        peer = Peer(port)
        try:
            client = connect(url, spool_dir=spool)
            assert client.flush(20)
            assert [event.step for event in peer.events()] == list(range(50))
        finally:
            peer.close()

    def test_a_spool_that_cannot_be_written_is_said_and_posts_still_arrive(self, peer, connect, tmp_path):
        (tmp_path / "file").write_text("")
        client = connect(peer.url, spool_dir=tmp_path / "file")
        assert client.status()["disk_error"]
        assert client.send_events([STEP])["accepted"] == 1


class TestNeverInTheWay:
    def test_a_server_that_never_answers_costs_one_wait_and_then_almost_nothing(self, connect):
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(16)
            client = connect(f"http://127.0.0.1:{silent.getsockname()[1]}", max_wait_s=0.3, timeout_s=5.0)
            took = []
            for _ in range(20):
                begin = time.monotonic()
                assert client.send_events([STEP]) is None
                took.append(time.monotonic() - begin)
            assert max(took) < 0.6
            assert sum(took[2:]) < 1.0

    def test_a_dead_server_costs_almost_nothing(self, connect):
        client = connect(f"http://127.0.0.1:{free_port()}", max_wait_s=0.5)
        client.send_events([STEP])
        begin = time.monotonic()
        for _ in range(20):
            client.send_events([STEP])
        assert time.monotonic() - begin < 2.0

    def test_a_disk_that_hangs_does_not_hang_the_caller(self, peer, connect):
        client = connect(peer.url, max_wait_s=0.2)
        client._spool_lock.acquire()  # as a write that does not return would
        try:
            begin = time.monotonic()
            for _ in range(3):
                assert client.send_events([STEP]) is None
            assert time.monotonic() - begin < 1.5
        finally:
            client._spool_lock.release()
        assert client.flush(10)
        assert len(peer.events()) == 3

    def test_many_threads_may_send(self, peer, connect):
        client = connect(peer.url)

        def send(base):
            for n in range(25):
                client.send_events([{**STEP, "step": base + n}])

        threads = [threading.Thread(target=send, args=(100 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.flush(10)
        steps = [event.step for event in peer.events()]
        assert sorted(steps) == sorted(100 * n + m for n in range(4) for m in range(25))
        for n in range(4):
            assert [s for s in steps if s // 100 == n] == [100 * n + m for m in range(25)]


class TestClock:
    @pytest.mark.parametrize("ahead_s", [-7200, -600, 600, 86400])
    def test_the_servers_time_is_learnt_and_event_times_stay(self, peer, connect, ahead_s):
        peer.clock_ahead_s = ahead_s
        client = connect(peer.url)
        assert client.send_events([STEP])["accepted"] == 1
        assert client.send_events([STEP])["accepted"] == 1
        assert peer.requests == 3
        offset_ms = int(peer.posts[0]["headers"]["andon-clock-offset-ms"])
        assert abs(offset_ms - ahead_s * 1000) < 2000
        assert abs(peer.events()[0].occurred_ns - time.time_ns()) < 60e9

    def test_without_a_refusal_no_offset_is_sent(self, peer, connect):
        connect(peer.url).send_events([STEP])
        assert "andon-clock-offset-ms" not in peer.posts[0]["headers"]


class TestDirective:
    def send(self, peer, client, document):
        peer.directive = document
        assert client.send_events([STEP])
        return client.directive

    def test_the_newest_counts_and_what_is_not_newer_does_not(self, peer, connect):
        client = connect(peer.url, trusted=[KEY.key_id])
        hold = directive(5, "hold")
        assert self.send(peer, client, hold) == hold
        for other in (directive(4), directive(5, "continue"), directive(9, run="other"), None, {"seq": 99}):
            assert self.send(peer, client, other) == hold
        assert self.send(peer, client, directive(6, "resume"))["kind"] == "resume"

    def test_of_another_attempt_it_does_not_count(self, peer, connect):
        client = connect(peer.url, attempt=2)
        assert self.send(peer, client, directive(5, "hold", attempt=1)) is None
        assert self.send(peer, client, directive(6, "hold", attempt=2))["seq"] == 6

    def test_with_pinned_keys_only_a_signed_one_counts(self, peer, connect):
        client = connect(peer.url, trusted=[KEY.key_id])
        unsigned = {k: v for k, v in directive(5).items() if k not in ("signature", "key_id", "public_key")}
        stranger = Directive(kind="continue", seq=6, run="my-run", attempt=1).sign(SigningKey.generate())
        for document in (unsigned, stranger, {**directive(7), "kind": "resume"}):
            assert self.send(peer, client, document) is None
        assert client.status()["directives_ignored"] == 3

    @pytest.fixture
    def new(self, peer):
        """A key that KEY handed over to, which the peer publishes."""
        new, at = SigningKey.generate(), "2026-01-01T00:00:00Z"
        published = keys.document([keys.PublicKey(new.key_id, "", at, handover=keys.handover(KEY, new, at))])
        original = peer.answer_get
        peer.answer_get = lambda path, headers: (
            (200, published, {}) if path == keys.PATH else original(path, headers)
        )
        return new

    def test_a_key_that_the_pinned_one_handed_over_to_is_learnt(self, peer, connect, new):
        client = connect(peer.url, trusted=[KEY.key_id])
        hold = Directive(kind="hold", seq=5, run="my-run", attempt=1).sign(new)
        assert self.send(peer, client, hold) == hold
        assert set(client.trusted) == {KEY.key_id, new.key_id}

    def test_asking_for_keys_makes_no_stranger_trusted(self, peer, connect, new):
        client = connect(peer.url, trusted=[KEY.key_id])
        stranger = Directive(kind="continue", seq=6, run="my-run", attempt=1).sign(SigningKey.generate())
        assert self.send(peer, client, stranger) is None

    def test_waiting_learns_a_new_key_too(self, peer, connect, new):
        peer.directive = Directive(kind="resume", seq=2, run="my-run", attempt=1).sign(new)
        assert connect(peer.url, trusted=[KEY.key_id]).wait_directive(wait_s=5)["kind"] == "resume"

    def test_waiting_returns_as_soon_as_it_changes(self, peer, connect):
        client = connect(peer.url)
        self.send(peer, client, directive(1, "hold"))
        threading.Timer(0.3, lambda: setattr(peer, "directive", directive(2, "resume"))).start()
        begin = time.monotonic()
        assert client.wait_directive(wait_s=5)["kind"] == "resume"
        assert time.monotonic() - begin < 3

    def test_waiting_ends_with_the_known_one(self, peer, connect):
        client = connect(peer.url)
        hold = self.send(peer, client, directive(1, "hold"))
        assert client.wait_directive(wait_s=0.2) == hold

    def test_waiting_outlasts_a_server_that_is_down(self, connect):
        assert connect(f"http://127.0.0.1:{free_port()}").wait_directive(wait_s=0.3) is None

    def test_a_refused_question_is_an_error(self, peer, connect):
        peer.answers = [(404, {"type": "unknown-run", "detail": "no such run"}, {})]
        with pytest.raises(AnswerError, match="unknown-run"):
            connect(peer.url).wait_directive(wait_s=1)


def test_secrets_are_masked_before_they_leave_the_node(peer, connect, tmp_path, monkeypatch):
    monkeypatch.setattr("andon.client_sender.GZIP_FROM_BYTES", 1 << 30)  # what waits on the disk is read here
    launch, launched = secrets.launch()
    client = connect(peer.url)
    client.send_events([{"type": "attempt.launched", "data": {**launch, "world_size": 8}}])
    client.send_events([{"type": "log", "data": {"text": case.text}} for case in secrets.texts()])
    assert client.flush()
    # Nor does one wait on the disk while the server is away.
    away = connect(f"http://127.0.0.1:{free_port()}", spool_dir=tmp_path / "waiting")
    away.send_events([{"type": "attempt.launched", "data": launch}])
    away.close()
    sent = b"".join(post["body"] for post in peer.posts)
    spooled = b"".join(path.read_bytes() for path in (tmp_path / "waiting").rglob("*") if path.is_file())
    for where, raw in (("sent", sent), ("spooled", spooled)):
        text = raw.decode("utf-8", "replace")
        for case in (launched, *secrets.texts()):
            left = [
                one for one in case.secrets if len(one) > 6 and (one in text or json.dumps(one)[1:-1] in text)
            ]
            assert left == [], (where, case.name)
    assert b'"world_size":8' in sent
    assert b"tokens_per_batch" in spooled
    assert b"5e8a6c0f3e3b0f5d6e6f5d3e3a2b1c0d9e8f7a6b5c4d3e2f1a0b9c8d7e6f5a4b" in sent


class TestAsking:
    def test_resume_returns_the_permit_under_the_given_id(self, peer, connect):
        peer.answers = [(200, {"permit": {"permit": "pm_1"}}, {})]
        ids = []
        original = peer.answer
        peer.answer = lambda path, headers, body: (
            ids.append((path, headers["webhook-id"], json.loads(body))) or original(path, headers, body)
        )
        assert connect(peer.url).resume("2041", 4, "resume-1") == {"permit": "pm_1"}
        assert ids == [("/api/v1/runs/my-run/resume", "resume-1", {"incident": "2041", "attempt": 4})]

    @pytest.mark.parametrize(
        ("status", "kind"), [(409, "not-approved"), (409, "already-exchanged"), (410, "expired")]
    )
    def test_a_refused_resume_says_which_kind(self, peer, connect, status, kind):
        peer.answers = [(status, {"type": f"https://andon/problems/{kind}", "detail": "no"}, {})]
        with pytest.raises(AnswerError) as raised:
            connect(peer.url).resume("2041", 4)
        assert (raised.value.status, raised.value.type) == (status, kind)

    def test_resume_with_nobody_there_is_unreachable(self, connect):
        with pytest.raises(Unreachable):
            connect(f"http://127.0.0.1:{free_port()}").resume("2041", 4)

    def test_deletions_are_allowed_only_by_a_plain_yes(self, peer, connect):
        peer.answers = [(200, {"items": [{"uri": "a", "allow": True}, {"uri": "b", "allow": "yes"}, 7]}, {})]
        items = connect(peer.url).deletions(["a", "b", "c"])
        assert [(item["uri"], item["allow"]) for item in items] == [("a", True), ("b", False), ("c", False)]

    def test_no_answer_means_no(self, peer, connect):
        assert not connect(f"http://127.0.0.1:{free_port()}").deletions(["a"])[0]["allow"]
        peer.answers = [(503, {}, {})]
        assert not connect(peer.url).deletions(["a"])[0]["allow"]
