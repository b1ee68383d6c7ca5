"""A whole server of real processes, raw signed posts to it, and a look into its database from outside."""

import http.client
import json
import os
import secrets
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from andon.signing import sign_get, sign_webhook
from demo.people import Person
from tests.config.up import Up, parent_of, prepare

PATIENCE_S = 30.0
RUNS_AT_ONCE = 40


@dataclass
class Reply:
    """An HTTP answer: status, content type and the decoded JSON (or text)."""

    status: int
    content_type: str
    document: Any
    took_s: float = 0.0

    @property
    def directive(self) -> dict[str, Any]:
        return self.document["directive"]


@dataclass
class Poster:
    """Posts to one run over its own connections, signed as the wire page says."""

    port: int
    run: str
    secret: str

    def headers(
        self, body: bytes, webhook_id: str | None = None, at_s: int | None = None, **more: str
    ) -> dict[str, str]:
        webhook_id = webhook_id or f"msg_{secrets.token_hex(12)}"
        at_s = int(time.time()) if at_s is None else at_s
        return {
            "content-type": "application/json",
            "webhook-id": webhook_id,
            "webhook-timestamp": str(at_s),
            "webhook-signature": sign_webhook(self.secret, webhook_id, at_s, body),
            **{name.replace("_", "-"): value for name, value in more.items()},
        }

    def post(
        self,
        body: bytes,
        path: str = "events",
        *,
        run: str | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = PATIENCE_S,
        **how: Any,
    ) -> Reply:
        return exchange(
            self.port,
            "POST",
            f"/api/v1/runs/{run or self.run}/{path}",
            body=body,
            headers=headers if headers is not None else self.headers(body, **how),
            timeout_s=timeout_s,
        )

    def events(self, *events: dict[str, Any], **how: Any) -> Reply:
        """Post events as an array; NaN goes out as the bare token that trainers write."""
        return self.post(json.dumps(list(events)).encode(), **how)

    def step(self, step: int, *, rank: int | None = None, **data: Any) -> Reply:
        place = {} if rank is None else {"rank": rank}
        return self.events({"type": "step", "step": step, **place, "data": data})

    def directive(self) -> dict[str, Any]:
        path = f"/api/v1/runs/{self.run}/directive?after=0&wait=0"
        webhook_id, at_s = f"get_{secrets.token_hex(8)}", int(time.time())
        headers = {
            "webhook-id": webhook_id,
            "webhook-timestamp": str(at_s),
            "webhook-signature": sign_get(self.secret, webhook_id, at_s, "GET", path),
        }
        document = exchange(self.port, "GET", path, headers=headers).document
        return document.get("directive", document)


def exchange(
    port: int,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> Reply:
    """Send one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    began = time.monotonic()
    try:
        connection.request(method, path, body=body, headers={"host": "localhost", **(headers or {})})
        response = connection.getresponse()
        return reply_of(response, began)
    finally:
        connection.close()


def reply_of(response: http.client.HTTPResponse, began: float) -> Reply:
    """Read a response to its end."""
    raw = response.read()
    kind = response.headers.get_content_type()
    document = json.loads(raw) if raw and kind.endswith("json") else raw.decode(errors="replace")
    return Reply(response.status, kind, document, time.monotonic() - began)


@dataclass
class House:
    """`manage.py up` with people, runs, and its database seen from outside."""

    up: Up
    passwords: dict[str, str] = field(default_factory=dict)
    spare: list[Poster] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.up.port

    def manage(self, *arguments: str) -> str:
        done = self.up.manage(*arguments)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def manage_json(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.manage(*arguments).strip().splitlines()[-1])

    def new_run(self) -> Poster:
        """Return a poster for a run that nobody used yet; a command takes seconds, so it makes many."""
        if not self.spare:
            script = (
                "import json, secrets\nfrom runs.actions import create_run\n"
                f"made = [create_run(name='run-' + secrets.token_hex(4)) for _ in range({RUNS_AT_ONCE})]\n"
                "print(json.dumps([[one.run.slug, one.secret] for one in made]))"
            )
            made = json.loads(self.manage("shell", "-v0", "-c", script).strip().splitlines()[-1])
            self.spare = [Poster(self.port, name, secret) for name, secret in made]
        return self.spare.pop()

    def person(self, name: str, *roles: str) -> Person:
        """Make a person once, and return a browser in which that person is signed in."""
        if name not in self.passwords:
            wanted = [word for role in roles for word in ("--role", role)]
            self.passwords[name] = str(self.manage_json("create_person", name, *wanted)["password"])
        person = Person(self.up.url, name, self.passwords[name])
        person.sign_in()
        return person

    def database_url(self) -> str:
        """Return the owner's URL, as the running server announced it."""
        announced = json.loads((self.up.data_dir / "run" / "servers.json").read_text("utf-8"))
        return str(announced["ANDON_DATABASE_OWNER_URL"])

    def sql(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement as the owner, past every cache and model of ours."""
        with psycopg.connect(self.database_url(), autocommit=True) as connection:
            cursor = connection.execute(query.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def one(self, query: str, *values: Any) -> Any:
        """Return the single value of a query."""
        ((value,),) = self.sql(query, *values)
        return value

    def run_id(self, run: str) -> int:
        return int(self.one("SELECT id FROM runs_run WHERE slug = %s", run))

    def incidents(self, run: str) -> list[tuple[Any, ...]]:
        """Return (id, state, dossier id) of every incident of a run."""
        return self.sql(
            "SELECT i.id, i.state, i.dossier_id FROM incidents_incident i JOIN runs_run r ON r.id = i.run_id"
            " WHERE r.slug = %s",
            run,
        )

    def web_workers(self) -> list[int]:
        """Return the pids that answer requests."""
        server = self.up.pid_of("granian")
        return sorted(pid for pid in self.up.processes() if parent_of(pid) == server)


def kill(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, how)


def start(directory: Path, **more: str) -> House:
    """Start a house in `directory` and wait until it is ready."""
    if "ANDON_DATABASE_URL" not in more:
        prepare(directory)
    # Runs fail here on purpose, one after another: that is no reason to doubt the rule that holds them.
    return House(Up(directory, ANDON_BREAKER_RUNS="1000", **more).start().wait_ready())
