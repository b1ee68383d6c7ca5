"""The supervisor: one job, attempt after attempt, and none without leave.

A held directory trains only by a permit that verifies here, with the server or without. A failure that holds
nothing is started again from the newest verified checkpoint, within a budget. The server has the first word
on which of the two it was: while it does not answer after a failure, nothing is started.
"""

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from andon import checkpoint_states, hold, permit, stacks
from andon.client import AnswerError, Client, Unreachable
from andon.supervise import volatile
from andon.supervise.launch import Launch
from andon.supervise.record import Record
from andon.supervise.runfile import RunFile

POLL_S = 0.2
WAIT_S = 20.0  # of one question for the directive
AGAIN_S = 2.0
TERM_CODE = 143


class Supervisor:
    """Runs a job until it ends well, may not go on, or is told to stop.

    Args:
        client: signed sender of the run, with the pinned keys.
        say: prints one line for a person.
    """

    def __init__(self, file: RunFile, client: Client, say: Callable[[str], None] = print) -> None:
        self.file, self.client, self.say = file, client, say
        self.directory = Path(file.directory)
        self.name = f"andon supervise on {file.node}"
        self._stop, self._now = threading.Event(), threading.Event()
        self._stop_at: float | None = None
        self._said = ""
        self._orders = _Orders(client)

    def stop(self) -> None:
        """End the job once what vanishes with it is safe; called twice: end it now."""
        if self._stop.is_set():
            self._now.set()
        self._stop_at = self._stop_at or time.monotonic()
        self._stop.set()

    def run(self) -> int:
        """Supervise; returns the exit code: the job's own, 93 while it is held, 143 when told to stop."""
        self._orders.start()
        try:
            return self._run()
        finally:
            self._orders.close()

    def _run(self) -> int:
        self.directory.mkdir(parents=True, exist_ok=True)
        record = Record(self.directory)
        granted, failed = self._leave_to_begin(record)
        begun = False
        while granted is not None or failed is None:
            attempt = int(granted["attempt"]) if granted else record.attempt + 1
            record.launched(attempt, by_itself=begun and granted is None)
            begun = True
            code = self._one_launch(attempt, granted)
            if self._stop.is_set():
                return TERM_CODE if code else 0
            if code == 0 and not self._is_held():
                return 0
            granted, failed = self._leave_to_go_on(record, attempt, code)
        return failed

    # --- leave to train

    def _leave_to_begin(self, record: Record) -> tuple[dict[str, Any] | None, int | None]:
        """Return a permit where one is needed, and the exit code when it may not begin."""
        if record.trouble:
            self.say(record.trouble)
            return None, 2
        if not self._is_held():
            return None, None
        held = self._held()
        attempt = max(record.attempt, int(held.get("attempt") or 0))
        self.say(f"{self.directory} is held since attempt {attempt}: waiting for a permit")
        return self._wait_for_permit(attempt)

    def _leave_to_go_on(
        self, record: Record, attempt: int, code: int
    ) -> tuple[dict[str, Any] | None, int | None]:
        """Return as above after a launch that left with `code`."""
        kind = self._word_after_failure()
        if self._stop.is_set():
            return None, TERM_CODE
        if code == hold.EXIT_HELD or kind != "continue" or self._is_held():
            self.say(f"attempt {attempt} left with {code}: held, waiting for a permit")
            return self._wait_for_permit(attempt)
        used = len(record.today())
        if used >= self.file.restarts_per_day:
            self.say(f"attempt {attempt} left with {code}: {used} restarts in 24 h, a person has to look")
            return None, code
        self.say(f"attempt {attempt} left with {code}; nothing holds it: starting it again")
        return None, None

    def _word_after_failure(self) -> str:
        """Return the directive's kind once the server had time to judge; it is waited for."""
        settled_at = time.monotonic() + self.file.settle_s
        kind, heard = "", False
        while not self._stop.is_set() and (time.monotonic() < settled_at or not heard):
            if self._is_held():
                return "hold"
            try:
                self.client.volatile(timeout_s=5.0)  # answers only while the server lives and knows this run
            except (AnswerError, Unreachable) as error:
                self._say_once(f"no answer from the server ({error}); nothing is started until it says so")
                self._stop.wait(AGAIN_S)
                continue
            found = self.client.directive
            heard = found is not None
            kind = str(found["kind"]) if found is not None else kind
            if kind in {"hold", "resume", "rollback"}:
                return kind
            self._stop.wait(min(1.0, max(0.05, settled_at - time.monotonic())))
        return kind

    def _wait_for_permit(self, attempt: int) -> tuple[dict[str, Any] | None, int | None]:
        """Wait for an approval, take its permit and verify it offline; only stopping ends the wait."""
        while not self._stop.is_set():
            directive = self.client.directive or {}
            if directive.get("kind") not in {"resume", "rollback"}:
                self._stop.wait(POLL_S)
                continue
            try:
                return self._take_permit(directive, attempt), None
            except (Unreachable, AnswerError, permit.PermitError) as error:
                self._say_once(f"still held: {error}")
                self._stop.wait(AGAIN_S)
        return None, hold.EXIT_HELD

    def _take_permit(self, directive: dict[str, Any], attempt: int) -> dict[str, Any]:
        # One id however often it is asked: a lost answer costs nothing.
        id_ = f"supervise-{self.file.run}-{attempt}-{directive['seq']}"
        document = self.client.resume(str(directive["incident"]), attempt + 1, id_, supervisor=self.name)
        trusted = self.client.trusted or self.file.keys
        granted = permit.verify(document, trusted=trusted, at=time.time(), run=self.file.run)
        self.say(f"permit {granted.permit} verified: attempt {granted.attempt}")
        return document

    def _held(self) -> dict[str, Any]:
        try:
            return hold.read(self.directory) or {}
        except hold.Held as error:
            self.say(str(error))
            return {}

    def _is_held(self) -> bool:
        return (self.directory / hold.FILE_NAME).exists()

    # --- one launch

    def _one_launch(self, attempt: int, granted: dict[str, Any] | None) -> int:
        launch = Launch(self.file.command, self._environment(attempt, granted), self.file.run)
        self.say(f"attempt {attempt} started, pid {launch.process.pid}")
        while (code := launch.code()) is None and not self._stop.is_set():
            if why := self._overdue(self.client.directive, attempt):
                code = self._kill(launch, attempt, why)
                break
            self._stop.wait(POLL_S)
        if code is None:
            code = self._kill(launch, attempt, "the supervisor was told to stop")
        data = {"exit_code": code, "by": self.name}
        self._post({"type": "attempt.exited", "attempt": attempt, "data": data})
        return code

    def _environment(self, attempt: int, granted: dict[str, Any] | None) -> dict[str, str]:
        made = {
            "ANDON_RUN": self.file.run,
            "ANDON_URL": self.file.url,
            "ANDON_RUN_SECRET": self.file.secret,
            "ANDON_KEY": ",".join(self.file.keys),
            "ANDON_ATTEMPT": str(attempt),
            stacks.ENVIRONMENT: str(self.directory / f"attempt-{attempt}" / "stacks"),
            **self.file.environment,
        }
        if granted is not None:
            path = self.directory / f"andon-permit-{attempt}.json"
            path.write_text(json.dumps(granted), "utf-8")
            return made | {"ANDON_PERMIT": str(path)}  # names the checkpoint itself
        newest = checkpoint_states.newest_verified(self.directory)
        return made | ({"ANDON_CHECKPOINT": str(newest)} if newest else {})

    def _overdue(self, directive: dict[str, Any] | None, attempt: int) -> str:
        """Return why the ranks must be ended, "" while they need not: held, and past the time to leave."""
        if directive is None or directive.get("kind") != "hold" or directive.get("attempt") != attempt:
            return ""
        try:
            at = datetime.fromisoformat(str(directive.get("deadline"))).timestamp()
        except ValueError:
            return ""  # without a deadline they wait as long as people need
        late_s = time.time() - at
        return f"held, and still there {late_s:.0f} s past the deadline" * (late_s > self.file.leave_grace_s)

    def _kill(self, launch: Launch, attempt: int, why: str) -> int:
        """End a launch, after what vanishes with it was waited for; post what was not got."""
        limit_s = self.file.volatile_wait_s
        if self._stop_at is not None and self.file.ends_after_s is not None:
            left_s = self._stop_at + self.file.ends_after_s - time.monotonic() - self.file.kill_after_s
            limit_s = max(0.0, min(limit_s, left_s))  # whoever kills us then leaves no time for a save
        directive = self.client.directive or {}
        report = volatile.collect(
            ranks=launch.ranks(),
            held=directive.get("kind") == "hold" or self._is_held(),
            directory=self.directory,
            since=launch.began,
            environment=launch.environment,
            server=self.client,
            node=self.file.node,
            limit_s=limit_s,
            cut=self._now.is_set,
        )
        self.say(f"ending attempt {attempt}: {why}; waited {report.waited_s:.0f} s")
        for what, reason in report.not_got:
            self.say(f"  not got: {what}: {reason}")
        data = {"reason": why, "by": self.name, "limit_s": limit_s, **report.document()}
        self._post({"type": "stop.requested", "attempt": attempt, "data": data})
        return launch.end(self.file.kill_after_s)

    def _say_once(self, text: str) -> None:
        """Say what would be said again every two seconds."""
        if text != self._said:
            self._said = text
            self.say(text)

    def _post(self, event: dict[str, Any]) -> None:
        self.client.send_events([event])  # into the spool when nobody answers


class _Orders:
    """Follows the directive in a thread of its own: a question to the server may take half a minute."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="andon-orders", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                self._client.wait_directive(None, WAIT_S)
            except (AnswerError, Unreachable, RuntimeError):
                self._closed.wait(AGAIN_S)
