"""What agents may not say: each is refused with a problem, and nothing is falsely held or stored."""

import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from django.test import Client
from django.utils import timezone

from andon.signing import new_secret, sign_get, sign_webhook
from evidence.models import Agent, AgentTask, Dossier, StoredObject
from runs import wanted as wanted_counts
from runs.models import Checkpoint, Run, RunSecret
from runs.work import run_due
from tests.agents.beside import contain
from tests.evidence import world

pytestmark = pytest.mark.django_db(transaction=True)

SHA = "ab" * 32


class Voice:
    """Signed requests of one node's agent, as raw as a test wants them."""

    def __init__(self, run: Run, node: str = "n1") -> None:
        self.run, self.node, self.secret = run, node, new_secret()
        RunSecret.objects.create(run=run, secret=self.secret)
        self.client = Client()
        self.count = 0

    def _headers(self, signature: str, id_: str, at_s: int) -> dict[str, str]:
        return {"webhook-id": id_, "webhook-timestamp": str(at_s), "webhook-signature": signature}

    def post(self, path: str, body: Any) -> Any:
        self.count += 1
        raw = body if isinstance(body, bytes) else json.dumps({"node": self.node, **body}).encode()
        id_, at_s = f"a-{self.node}-{self.count}", int(time.time())
        headers = self._headers(sign_webhook(self.secret, id_, at_s, raw), id_, at_s)
        where = f"/api/v1/runs/{self.run.slug}{path}"
        return self.client.post(where, raw, content_type="application/json", headers=headers)

    def get_wanted(self, **query: str) -> Any:
        where = f"/api/v1/runs/{self.run.slug}/wanted?{urlencode(query or {'node': self.node})}"
        at_s = int(time.time())
        headers = self._headers(sign_get(self.secret, "g-1", at_s, "GET", where), "g-1", at_s)
        return self.client.get(where, headers=headers)

    def wanted(self) -> list[dict[str, Any]]:
        return self.get_wanted().json()["items"]

    def put(self, url: str, body: bytes) -> Any:
        return self.client.generic("PUT", url, body, content_type="application/octet-stream")


@pytest.fixture
def held_back(vault_dir: Path) -> Dossier:
    """A dossier whose last good checkpoint (three shards and commit.json) lies on node n1's disk."""
    wanted_counts.forget()
    run = world.make_run()
    body = b"x" * 3000
    table = [
        {"path": f"shard-{n}.bin", "bytes": 3000, "sha256": hashlib.sha256(body).hexdigest()}
        for n in range(3)
    ]
    world.commit(run, 900, "file:///scratch/step-900", table, read_back=True)
    dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
    run_due()
    return dossier


def report(task: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Return a whole and right hold report of a task."""
    files = [
        {
            "path": e["path"],
            "bytes": e.get("bytes", 10),
            "sha256": e.get("sha256", SHA),
            "inode": 7,
            "mtime_ns": 8,
        }
        for e in task["files"]
    ]
    tree = f"/scratch/.andon-holds/{task['tree']}"
    return {"id": task["id"], "how": "links", "tree": tree, "files": files, "last": True, **changed}


def is_problem(answer: Any, status: int, kind: str) -> bool:
    assert answer.status_code == status, answer.content
    assert answer.headers["Content-Type"] == "application/problem+json"
    return bool(answer.json()["type"] == f"/problems/{kind}")


class TestWanted:
    """GET wanted."""

    def test_it_tells_the_hold_with_its_files_and_posts_tell_the_count(self, held_back: Dossier) -> None:
        voice = Voice(held_back.run)
        (task,) = voice.wanted()
        assert (task["act"], task["kind"]) == ("hold", "last_good_checkpoint")
        assert task["paths"] == ["file:///scratch/step-900"]
        assert [e["path"] for e in task["files"]] == [
            "shard-0.bin",
            "shard-1.bin",
            "shard-2.bin",
            "commit.json",
        ]
        assert Agent.objects.get().node == "n1"
        assert voice.post("/events", {"type": "heartbeat"}).json()["wanted"] == 1

    def test_one_agent_at_a_time_holds_what_any_may(self, held_back: Dossier) -> None:
        first, second = Voice(held_back.run), Voice(held_back.run, "n2")
        assert len(first.wanted()) == 1
        assert second.wanted() == []
        assert len(first.wanted()) == 1  # asked again, after a restart
        # It has a part of the files only: the rest is everybody's.
        (task,) = first.wanted()
        part = report(task)
        part["files"] = part["files"][:2]
        told = {"id": task["id"], "state": "partly", "left": 2, "keep": True}
        assert first.post("/holds", part).json() == told
        (rest,) = second.wanted()
        assert [e["path"] for e in rest["files"]] == ["shard-2.bin", "commit.json"]
        assert first.wanted() == []
        assert second.post("/holds", report(rest)).json()["state"] == "held"
        run_due()
        item = held_back.items.get()
        assert item.held_at is not None
        assert item.protected_by["nodes"] == ["n1", "n2"]

    @pytest.mark.parametrize("node", ["", "x" * 201, "a\nb"])
    def test_a_node_without_a_name_is_refused(self, held_back: Dossier, node: str) -> None:
        assert is_problem(Voice(held_back.run).get_wanted(node=node), 422, "invalid")

    def test_it_is_signed(self, held_back: Dossier) -> None:
        voice = Voice(held_back.run)
        voice.secret = new_secret()
        assert is_problem(voice.get_wanted(), 401, "bad-signature")
        assert not Agent.objects.exists()


class TestHolds:
    """POST holds."""

    def test_the_same_report_twice_is_one_hold(self, held_back: Dossier) -> None:
        voice = Voice(held_back.run)
        (task,) = voice.wanted()
        for _ in range(2):
            assert voice.post("/holds", report(task)).json()["state"] == "held"
            run_due()
        assert held_back.custody.filter(what="held").count() == 1

    @pytest.mark.parametrize(
        ("change", "status", "kind"),
        [
            ({"path": "../../etc/passwd"}, 422, "invalid"),
            ({"path": "/etc/passwd"}, 422, "invalid"),
            ({"path": "other.bin"}, 422, "not-asked-for"),
            ({"bytes": 2999}, 409, "bytes-differ"),
            ({"sha256": SHA}, 409, "bytes-differ"),
            ({"sha256": "AB" * 32}, 422, "invalid"),
            ({"bytes": -1}, 422, "invalid"),
        ],
    )
    def test_a_file_that_is_not_as_committed_is_refused(
        self, held_back: Dossier, change: dict[str, Any], status: int, kind: str
    ) -> None:
        voice = Voice(held_back.run)
        (task,) = voice.wanted()
        body = report(task)
        body["files"][0] |= change
        answer = voice.post("/holds", body)
        assert is_problem(answer, status, kind)
        assert answer.json()["field"].startswith("files[0]")
        run_due()
        assert held_back.items.get().held_at is None
        assert AgentTask.objects.get().files == []

    def test_a_tree_that_is_not_the_items_and_a_word_nobody_knows_are_refused(
        self, held_back: Dossier
    ) -> None:
        voice = Voice(held_back.run)
        (task,) = voice.wanted()
        assert is_problem(voice.post("/holds", report(task, tree="/scratch/step-900")), 422, "invalid")
        assert is_problem(voice.post("/holds", report(task, how="trust me")), 422, "invalid")
        assert is_problem(voice.post("/holds", b"{"), 400, "undecodable")
        assert AgentTask.objects.get().done_at is None

    def test_another_run_and_another_node_may_not_speak_for_it(self, held_back: Dossier) -> None:
        (task,) = Voice(held_back.run).wanted()
        stranger = Voice(world.make_run("other"))
        assert stranger.wanted() == []
        assert is_problem(stranger.post("/holds", report(task)), 404, "unknown-task")
        AgentTask.objects.update(node="n1")
        assert is_problem(Voice(held_back.run, "n2").post("/holds", report(task)), 409, "wrong-node")
        assert AgentTask.objects.get().files == []

    def test_links_that_could_not_be_made_are_not_called_held(self, held_back: Dossier) -> None:
        voice = Voice(held_back.run)
        (task,) = voice.wanted()
        says = "not safe until copied: no hard links could be made beside it (Operation not permitted)"
        assert voice.post("/holds", report(task, how="none", tree="", says=says)).status_code == 200
        run_due()
        item = held_back.items.get()
        assert item.held_at is None
        assert item.protected_by["says"] == f"{says} (on n1)"

    def test_a_checkpoint_that_no_node_has_gives_way_to_the_one_before(self, vault_dir: Path) -> None:
        run = world.make_run()
        for step in (800, 900):
            world.commit(
                run, step, f"file:///scratch/step-{step}", [{"path": "a", "bytes": 1, "sha256": SHA}]
            )
        dossier = world.open_dossier(run, rules=world.policy("last_good_checkpoint"))
        run_due()
        for node in ("n0", "n1"):
            voice = Voice(run, node)
            (task,) = voice.wanted()
            told = {"why": "not-here", "says": "/scratch/step-900: none of its files is on this node"}
            assert voice.post(f"/wanted/{task['id']}/decline", told).status_code == 200
        world.work(dossier)
        assert Checkpoint.objects.get(step=900).state == "bad"
        assert dossier.items.get().source["step"] == 800


def upload(body: bytes, part_bytes: int = 8 << 20, **changed: Any) -> dict[str, Any]:
    pieces = [body[at : at + part_bytes] for at in range(0, len(body), part_bytes)]
    parts = [
        {
            "n": n,
            "bytes": len(piece),
            "sha256": hashlib.sha256(piece).hexdigest(),
            "md5": hashlib.md5(piece, usedforsecurity=False).hexdigest(),
        }
        for n, piece in enumerate(pieces, start=1)
    ]
    return {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest(), "parts": parts, **changed}


class TestUploads:
    """POST uploads, PUT parts, POST complete."""

    @pytest.fixture
    def offered(self, vault_dir: Path) -> Dossier:
        """A dossier that wants the log of rank 0 from node n1."""
        run = world.make_run()
        told = {"kind": "rank_log", "uri": "file:///var/log/rank0.log", "rank": 0, "node": "n1"}
        world.post(run, "artifact.available", data=told)
        contain(run)
        dossier = world.open_dossier(run, rules=world.policy("rank_logs"))
        world.age(dossier, 60)
        run_due()
        return dossier

    def test_two_agents_and_every_step_twice_make_one_object(self, offered: Dossier, vault_dir: Path) -> None:
        voice = Voice(offered.run)
        (task,) = voice.wanted()
        assert (task["act"], task["mask"], task["window"]) == ("upload", True, {"tail_bytes": 204800})
        body = b"step 1 loss 2.5\n" * 100
        again = Voice(offered.run)
        for one in (voice, again):
            answer = one.post("/uploads", {"item": task["id"], **upload(body)}).json()
            assert answer["id"] == task["id"]
        assert (answer["have"], [part["n"] for part in answer["parts"]]) == ([], [1])
        url = answer["parts"][0]["url"]
        for _ in range(2):
            assert voice.put(url, body).status_code == 204
        resumed = again.post("/uploads", {"item": task["id"], **upload(body)}).json()
        assert (resumed["have"], resumed["parts"]) == ([1], [])
        for one in (voice, again):
            done = one.post(f"/uploads/{task['id']}/complete", upload(body))
            assert (done.status_code, done.json()["state"]) == (202, "checking")
        world.work(offered)
        assert voice.post(f"/uploads/{task['id']}/complete", upload(body)).json()["state"] == "stored"
        stored = StoredObject.objects.get()
        assert (vault_dir / "objects" / stored.key).read_bytes() == body
        assert offered.items.get().state == "sealed"
        assert is_problem(voice.put(url, body), 409, "not-wanted")
        assert is_problem(voice.post(f"/uploads/{task['id']}/complete", upload(b"other")), 409, "other-bytes")

    def test_fewer_more_and_other_bytes_than_announced_are_refused(self, offered: Dossier) -> None:
        voice = Voice(offered.run)
        (task,) = voice.wanted()
        body = os.urandom(5000)
        answer = voice.post("/uploads", {"item": task["id"], **upload(body)}).json()
        url = answer["parts"][0]["url"]
        assert is_problem(voice.put(url, body + b"!"), 413, "wrong-size")
        assert is_problem(voice.put(url, body[:-1]), 422, "wrong-size")
        assert is_problem(voice.put(url, os.urandom(5000)), 422, "bytes-differ")
        missing = voice.post(f"/uploads/{task['id']}/complete", upload(body))
        assert is_problem(missing, 409, "parts-missing")
        assert missing.json()["missing"] == [1]
        short = upload(body, parts=[])
        assert is_problem(voice.post(f"/uploads/{task['id']}/complete", short), 422, "invalid")
        assert not StoredObject.objects.exists()
        assert AgentTask.objects.get().arrived_at is None

    def test_a_token_opens_one_part_of_one_upload_of_one_run(self, offered: Dossier) -> None:
        voice = Voice(offered.run)
        (task,) = voice.wanted()
        body = os.urandom(100)
        url = voice.post("/uploads", {"item": task["id"], **upload(body)}).json()["parts"][0]["url"]
        other = world.make_run("other")
        for wrong in (
            url[:-1] + ("a" if url[-1] != "a" else "b"),
            url.partition("?")[0],
            url.replace("/parts/1?", "/parts/2?"),
            url.replace(f"/uploads/{task['id']}/", "/uploads/999/"),
            url.replace(f"/runs/{offered.run.slug}/", f"/runs/{other.slug}/"),
        ):
            assert is_problem(voice.put(wrong, body), 403, "bad-token"), wrong
        # An upload that was begun again, with other bytes, does not take the parts of the one before.
        voice.post("/uploads", {"item": task["id"], **upload(os.urandom(100))})
        assert is_problem(voice.put(url, body), 403, "bad-token")

    def test_another_node_run_and_other_committed_bytes_are_refused(self, offered: Dossier) -> None:
        voice = Voice(offered.run)
        (task,) = voice.wanted()
        begin = {"item": task["id"], **upload(b"log")}
        assert is_problem(Voice(offered.run, "n2").post("/uploads", begin), 409, "wrong-node")
        assert is_problem(Voice(world.make_run("other")).post("/uploads", begin), 404, "unknown-task")
        assert is_problem(voice.post("/uploads", begin | {"item": "../1"}), 404, "unknown-task")
        AgentTask.objects.update(known=True, sha256=SHA, bytes_total=3)
        assert is_problem(voice.post("/uploads", begin), 409, "bytes-differ")
        assert AgentTask.objects.get().store_upload == ""

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"bytes": 10**9}, "bytes"),
            ({"sha256": "x"}, "sha256"),
            ({"parts": [{"n": 2, "bytes": 3, "sha256": SHA, "md5": "0" * 32}]}, "parts[0].n"),
            ({"parts": [{"n": 1, "bytes": 4, "sha256": SHA, "md5": "0" * 32}]}, "parts[0].bytes"),
            ({"parts": [{"n": 1, "bytes": 3, "sha256": SHA, "md5": "0"}]}, "parts[0].md5"),
        ],
    )
    def test_what_does_not_fit_names_the_field(
        self, offered: Dossier, change: dict[str, Any], field: str
    ) -> None:
        voice = Voice(offered.run)
        (task,) = voice.wanted()
        answer = voice.post("/uploads", {"item": task["id"], **upload(b"log"), **change})
        assert answer.status_code == 422, answer.content
        assert answer.json()["field"] == field

    def test_a_whole_that_is_not_what_was_announced_is_asked_for_again(self, offered: Dossier) -> None:
        voice = Voice(offered.run)
        (task,) = voice.wanted()
        body = os.urandom(5000)
        lie = upload(body, sha256=SHA)
        url = voice.post("/uploads", {"item": task["id"], **lie}).json()["parts"][0]["url"]
        assert voice.put(url, body).status_code == 204
        assert voice.post(f"/uploads/{task['id']}/complete", lie).status_code == 202
        run_due()
        assert not StoredObject.objects.exists()
        assert [one["id"] for one in voice.wanted()] == [task["id"]]
        assert "sent again" in AgentTask.objects.get().trouble

    def test_a_silent_nodes_files_may_come_from_another_only_when_their_digest_is_known(
        self, offered: Dossier
    ) -> None:
        Voice(offered.run).wanted()
        Agent.objects.update(seen_at=timezone.now() - timedelta(minutes=5))
        other = Voice(offered.run, "n2")
        assert other.wanted() == []
        AgentTask.objects.update(known=True, sha256=SHA, bytes_total=3)
        assert len(other.wanted()) == 1
