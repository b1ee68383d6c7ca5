"""`andon replay`: post a recording through the real client, as the training would have.

Times are moved to now, since a server rightly takes an event of last month for backfill; the
original stays in `data.original_time` (frames: column `original_time_ns`). Files that posts point
to are written under a directory first, and announced by file:// URIs. A hold is obeyed as a
trainer obeys it: finish the step, acknowledge, write the hold file, wait. Only a permit that says
exactly what the recorded next attempt did lets that attempt be played.
"""

import argparse
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from andon import checkpoints, hold
from andon.client import Client
from andon.permit import Permit
from andon.recording import URI_BASE, Post, Recording, RecordingError
from andon.replay_files import RunFiles
from andon.wire import Frame, format_time

HEARTBEAT_S = 5.0
DRAIN_S = 600.0  # how long a played attempt waits for a server that is away
LATE_S = 1.0  # a server slower than the recording moves the replay's clock instead of making times old


class ReplayRefused(ValueError):
    """The permit does not say what the recorded next attempt did; the text lists every difference."""


class Replay:
    """Plays one recording into one run.

    Args:
        url, run, secret: the server and the run's signing secret.
        directory: becomes the run directory: `checkpoints/`, `logs/`, `artifacts/`, spools.
        speed: 2 plays twice as fast as it happened.
        trusted: fingerprints of the server's keys; with them unsigned directives are ignored.
        stop: ends playing early when set.

    Attributes:
        checkpoint_dir: where `andon-hold.json` lies while held.
        step: the newest step played.
        attempt: the attempt number being posted.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        url: str,
        run: str,
        secret: str,
        directory: Path,
        speed: float = 1.0,
        trusted: Collection[str] | None = None,
        say: Callable[[str], None] = print,
        stop: threading.Event | None = None,
    ) -> None:
        if not speed > 0:
            raise ValueError(f"speed: {speed} must be above 0")
        self.recording = recording
        self.run = run
        self.directory = directory.resolve()
        self.checkpoint_dir = self.directory / "checkpoints"
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        self.speed = speed
        self.say = say
        self.stop = stop or threading.Event()
        self.step = 0
        self.attempt = 1
        nodes = recording.description.nodes
        self._ranks = {node.node: list(node.ranks) for node in nodes}
        self._first_node = recording.description.node_of(0)
        self.clients = {
            node.node: Client(
                url,
                run,
                secret,
                node=node.node,
                trusted=trusted,
                spool_dir=self.directory / "spool" / node.node,
            )
            for node in nodes
        }
        self._heartbeats: threading.Thread | None = None
        self._released = threading.Event()
        self._held: dict[str, Any] | None = None
        self.files = RunFiles(recording, self.directory)

    # --- what a supervisor calls

    @property
    def client(self) -> Client:
        """Rank 0's client, the only one that reads directives."""
        return self.clients[self._first_node]

    def play_until_held(self, attempt: int = 1) -> dict[str, Any] | None:
        """Play an attempt. Returns the hold directive when it was held, None when it came to its end.

        Raises:
            hold.Held: the directory is held: training there needs `continue_with`.
        """
        hold.check(self.checkpoint_dir)
        return self._play(attempt, number=attempt, permit=None)

    def continue_with(self, permit: Permit) -> dict[str, Any] | None:
        """Play the recorded next attempt under a permit that was verified and has released the hold.

        Returns as `play_until_held`.

        Raises:
            ReplayRefused: checkpoint, positions, skip window or anything else differs from what was
                recorded, or the checkpoint on disk is not whole.
            hold.Held: the hold was not released (`andon.hold.release`).
        """
        try:
            self.compare(permit)
        except ReplayRefused:
            if self._held is not None:
                hold.write(self.checkpoint_dir, self._held)  # it was released for nothing: held stays held
            raise
        hold.check(self.checkpoint_dir)
        self._stop_heartbeats()
        continuation = self.recording.description.continuation
        assert continuation is not None
        self.say(
            f"going on from the checkpoint of step {continuation.checkpoint_step}, attempt {permit.attempt}, "
            f"loader at sample {continuation.first_position:,}, permit {permit.permit}"
        )
        return self._play(continuation.attempt, number=permit.attempt, permit=permit.permit)

    def close(self) -> None:
        """Stop the heartbeats, send what waits, close the clients."""
        self.stop.set()
        self._stop_heartbeats()
        for client in self.clients.values():
            client.close()

    # --- playing

    def _play(self, recorded: int, *, number: int, permit: str | None) -> dict[str, Any] | None:
        posts = list(self.recording.posts(recorded))
        if not posts:
            raise RecordingError(f"{self.recording.path}: holds no attempt {recorded}")
        self.attempt = number
        self.files.begin(recorded)
        first_s = posts[0].t_s
        origin_ns = _earliest_ns(posts[0]) or 0
        self._began_s, self._origin_ns = time.time(), origin_ns
        directive: dict[str, Any] | None = None
        held_after: int | None = None
        for post in posts:
            if held_after is None:
                if not self._wait_until((post.t_s - first_s) / self.speed):
                    return None
                self.files.grow_logs(post.t_s)
            if not self._send(post, until_step=held_after, permit=permit) or held_after is not None:
                continue
            if post.node == self._first_node and (directive := self._told_to_hold()) is not None:
                # All ranks stop at the end of this step: what it still has to say is said, no more.
                held_after = self.step
        self._drain()
        if directive is None and (directive := self._told_to_hold()) is None:
            return None
        self._hold(directive)
        return directive

    def _drain(self) -> None:
        """Wait until every post was answered: an answer still to come may be the hold."""
        deadline_s = time.monotonic() + DRAIN_S
        said = False
        for client in self.clients.values():
            while not client.flush(1.0) and not self.stop.is_set() and time.monotonic() < deadline_s:
                if not said:
                    self.say("the server does not answer; waiting until it has all posts")
                said = True

    def _wait_until(self, offset_s: float) -> bool:
        left_s = self._began_s + offset_s - time.time()
        if left_s > 0:
            return not self.stop.wait(left_s)
        if left_s < -LATE_S:
            self._began_s -= left_s
        return not self.stop.is_set()

    def _now_ns(self, recorded_ns: int) -> int:
        """Return the moment of this replay that answers to a recorded one; never in the future."""
        moved_s = (recorded_ns - self._origin_ns) / 1e9 / self.speed
        return min(int((self._began_s + moved_s) * 1e9), time.time_ns())

    def _send(self, post: Post, *, until_step: int | None, permit: str | None) -> bool:
        """Send a post, or what of it belongs to steps up to `until_step`; return whether there was any."""
        client = self.clients[post.node]
        if post.kind == "frame":
            frame = self._frame(post.frame(), until_step)
            if frame is None:
                return False
            self.step = max(self.step, int(frame.step.max()))
            client.send_frame(frame)
            return True
        events = [
            self._event(event, permit)
            for event in post.events
            if until_step is None or (event.get("step") is not None and event["step"] <= until_step)
        ]
        if until_step is not None:
            events = [event for event in events if event["type"] not in ("attempt.exited", "heartbeat")]
        if not events:
            return False
        self.step = max([self.step, *(event["step"] for event in events if event.get("step") is not None)])
        client.send_events(events)
        return True

    def _event(self, event: dict[str, Any], permit: str | None) -> dict[str, Any]:
        """Return the event as of now, its files on disk and its URIs pointing to them."""
        data = dict(self.files.rebased(event.get("data") or {}))
        uri = (event.get("data") or {}).get("uri")
        if isinstance(uri, str) and uri.startswith(URI_BASE):
            self.files.materialise(uri.removeprefix(URI_BASE), whole=event["type"] == "checkpoint.committed")
        sent = {**event, "attempt": self.attempt, "data": data}
        if event.get("time") is not None:
            data["original_time"] = format_time(event["time"])
            sent["time"] = self._now_ns(event["time"])
        if event["type"] == "attempt.launched" and permit is not None:
            data["permit"] = permit
        return sent

    def _frame(self, frame: Frame, until_step: int | None) -> Frame | None:
        keep = np.ones(frame.rows, np.bool_) if until_step is None else frame.step <= until_step
        if not keep.any():
            return None
        rows = np.flatnonzero(keep)
        metrics = {name: values[rows] for name, values in frame.metrics.items()}
        time_ns = None
        if frame.time_ns is not None:
            metrics["original_time_ns"] = frame.time_ns[rows]
            time_ns = np.array([self._now_ns(int(moment)) for moment in frame.time_ns[rows]], np.int64)
        return msgspec.structs.replace(
            frame,
            attempt=self.attempt,
            step=frame.step[rows],
            lane=[frame.lane[row] for row in rows] if isinstance(frame.lane, list) else frame.lane[rows],
            time_ns=time_ns,
            micro_batch=None if frame.micro_batch is None else frame.micro_batch[rows],
            rank=None if frame.rank is None else frame.rank[rows],
            metrics=metrics,
            missing={name: mask[rows] for name, mask in frame.missing.items()},
        )

    # --- being held

    def _told_to_hold(self) -> dict[str, Any] | None:
        directive = self.client.directive
        if directive and directive.get("kind") == "hold" and directive.get("attempt") in (None, self.attempt):
            return directive
        return None

    def _hold(self, directive: dict[str, Any]) -> None:
        self._acknowledge(self._first_node, directive, "received", [0])
        hold.write(self.checkpoint_dir, directive)
        self._held = directive
        for node, ranks in self._ranks.items():
            self._acknowledge(node, directive, "held", ranks)
        self._heartbeat()
        self._released.clear()
        self._heartbeats = threading.Thread(target=self._keep_alive, name="andon-replay-held", daemon=True)
        self._heartbeats.start()
        self.say(
            f"held at the end of step {self.step}: {self.recording.description.world_size} ranks wait "
            f"for a permit (incident {directive.get('incident') or 'not known yet'})"
        )

    def _acknowledge(self, node: str, directive: dict[str, Any], state: str, ranks: list[int]) -> None:
        data = {"seq": directive.get("seq"), "step": self.step, "state": state, "ranks": ranks}
        event = {
            "type": "directive.ack",
            "step": self.step,
            "ranks": ranks,
            "attempt": self.attempt,
            "data": data,
        }
        self.clients[node].send_events([event])

    def _heartbeat(self) -> None:
        for node, ranks in self._ranks.items():
            event = {"type": "heartbeat", "step": self.step, "ranks": ranks, "attempt": self.attempt}
            self.clients[node].send_events([event | {"data": {"state": "held"}}])

    def _keep_alive(self) -> None:
        while not self._released.wait(HEARTBEAT_S) and not self.stop.is_set():
            try:
                self._heartbeat()
            except RuntimeError:  # the client was closed while this thread woke
                return

    def _stop_heartbeats(self) -> None:
        self._released.set()
        if self._heartbeats is not None:
            self._heartbeats.join()
            self._heartbeats = None

    def leave(self, directive: dict[str, Any]) -> int:
        """Say that all ranks left while held; return exit code 93."""
        self._stop_heartbeats()
        for node, ranks in self._ranks.items():
            self._acknowledge(node, directive, "exited", ranks)
        return hold.EXIT_HELD

    # --- the permit

    def compare(self, permit: Permit) -> None:
        """Raise ReplayRefused unless the permit says what the recorded next attempt did. Best asked
        before the permit releases the hold."""
        known = self.recording.description.continuation
        if known is None:
            raise ReplayRefused(f"{self.recording.path}: holds no next attempt to play")
        wrong: list[str] = []

        def same(what: str, approved: object, recorded: object) -> None:
            if approved != recorded:
                wrong.append(f"{what}: the permit says {approved}, the recorded attempt {recorded}")

        same("run", permit.run, self.run)
        skip = (permit.skip.from_, permit.skip.to) if permit.skip else None
        same("skip window", skip, (known.skip.start, known.skip.stop) if known.skip else None)
        if permit.checkpoint is None:
            wrong.append("checkpoint: the permit names none, the recorded attempt began from one")
        else:
            same("checkpoint step", permit.checkpoint.step, known.checkpoint_step)
            if permit.checkpoint.digest:
                same("checkpoint digest", permit.checkpoint.digest, known.digest)
        for name, value in known.positions.items():
            approved = getattr(permit.positions, name)
            if approved is not None:
                same(name, approved, value)
        if permit.changes:
            wrong.append(f"changes: {', '.join(change.what for change in permit.changes)} were not recorded")
        if permit.exclusions.ranks or set(permit.exclusions.nodes) & set(self._ranks):
            wrong.append("exclusions: the recorded attempt ran on all its nodes")
        if permit.attempt <= self.attempt:
            wrong.append(f"attempt: {permit.attempt} is not after attempt {self.attempt}")
        if wrong:
            raise ReplayRefused("a recording can only go on as it was recorded; " + "; ".join(wrong))
        directory = checkpoints.directory_of(self.checkpoint_dir / "attempt-1", known.checkpoint_step)
        try:
            checkpoints.verify(directory)
        except checkpoints.CheckpointError as error:
            raise ReplayRefused(f"the checkpoint cannot be used: {error}") from error


def _earliest_ns(post: Post) -> int | None:
    if post.kind == "frame":
        times = post.frame().time_ns
        return None if times is None else int(times.min())
    return min((event["time"] for event in post.events if event.get("time") is not None), default=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `FILE --url U --run R --secret S …`."""
    from andon import replay_command

    replay_command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Replay as the command line asks; see `andon.replay_command`."""
    from andon import replay_command

    return replay_command.run(args)
