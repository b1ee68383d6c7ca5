"""How a held training job waits: no collective pending, from the host, until a permit or the deadline.

Rank 0 writes the hold file first, so that whatever happens to the process afterwards the directory
stays held. Then every rank polls the job's key-value store (torch's TCPStore or FileStore, which
is not a collective) and rank 0 alone asks the server. Only *resume in place* ends the waiting
here: the permit is exchanged, verified offline and releases the hold file. Any other plan needs a
new launch, so the ranks leave with exit code 93, as they do at the deadline.
"""

import json
import time
from collections.abc import Callable, Collection
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from andon import hold
from andon.permit import Permit

if TYPE_CHECKING:
    from andon.monitor import Monitor

POLL_S = 0.2
GRACE_S = 60.0  # how long ranks wait past the deadline for rank 0's word before they leave by themselves


class Store(Protocol):
    """The part of torch.distributed's Store used here."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a key's value; waits for it."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are set; does not wait."""
        ...


class Server(Protocol):
    """The part of `andon.client.Client` that rank 0 of a held run uses."""

    @property
    def trusted(self) -> Collection[str] | None:
        """The keys that count now."""
        ...

    def wait_directive(self, after: int | None = None, wait_s: float = 30.0) -> dict[str, Any] | None:
        """Return a directive newer than `after`, or None when the wait ended or nobody answered."""
        ...

    def resume(self, incident: str, attempt: int, webhook_id: str | None = None) -> dict[str, Any]:
        """Exchange an approval for the permit."""
        ...


class Holder:
    """Holds one rank.

    Arguments:
        directory: where the checkpoints and the hold file lie.
        store: shared by all ranks of the attempt.
        server: rank 0's client; None on other ranks, or when there is no server.
        trusted: fingerprints of the server's keys, pinned at launch.
        say: prints one line for a person.
    """

    def __init__(
        self,
        monitor: "Monitor",
        directory: Path,
        store: Store,
        *,
        server: Server | None,
        trusted: Collection[str] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        self.monitor = monitor
        self.place = monitor.place
        self.directory = directory
        self.store = store
        self.server = server
        self.trusted = frozenset(trusted)
        self.say = say
        self.deadline_s = monitor.policy.hold.deadline_s

    def hold(self, step: int, *, own_decision: str | None = None) -> int:
        """Hold all ranks at the end of `step`. Call on every rank in the same step, no collective pending.

        Returns when a permit lets the ranks go on in place: the number of the attempt that begins
        with it, on every rank; the monitor then posts under it. Else raises SystemExit(93).

        Arguments:
            own_decision: the trainer's reason when it halts by itself, without a directive.
        """
        key = f"andon/{self.place.attempt}/{step}"
        self.monitor.flush()  # what the last steps saw, while the ranks are still in step
        directive: dict[str, Any] = {}
        if self.place.rank == 0:
            directive = self._directive(own_decision)
            hold.write(self.directory, directive)
            self.store.set(f"{key}/directive", json.dumps(directive))
            self._acknowledge(directive, step, "received", [0])
        elif self.place.leads:
            directive = json.loads(self.store.get(f"{key}/directive"))
        self.store.set(f"{key}/held/{self.place.rank}", "1")
        if self.place.leads:
            self._wait_for([f"{key}/held/{rank}" for rank in self.place.node_ranks], GRACE_S)
            self._acknowledge(directive, step, "held", list(self.place.node_ranks))
            self.monitor.heartbeat("held", step)
        if self.place.rank == 0:
            permit = self._wait_for_permit(directive, step, key)
            attempt = permit.attempt
        else:
            permit, attempt = None, self._wait_for_rank_0(directive, step, key)
        self.monitor.begin_attempt(attempt)
        self.place = self.monitor.place
        if permit is not None:
            data = {"permit": permit.permit, "world_size": self.place.world_size, "in_place": True}
            self.monitor.post([{"type": "attempt.launched", "step": step, "data": data}])
        return attempt

    def _directive(self, own_decision: str | None) -> dict[str, Any]:
        sender = self.monitor.sender
        seen = sender.directive if sender is not None else None
        if seen is not None and seen.get("kind") == "hold":
            return seen
        return {
            "schema": "andon.directive/1",
            "kind": "hold",
            "seq": int(seen["seq"]) if seen else 0,
            "run": self.place.run,
            "attempt": self.place.attempt,
            "mode": "exit",  # by its own decision it never waits for a server
            "incident": None,
            "reason": own_decision or "held by the trainer",
        }

    def _acknowledge(self, directive: dict[str, Any], step: int, state: str, ranks: list[int]) -> None:
        data = {"seq": directive.get("seq"), "step": step, "state": state, "ranks": ranks}
        self.monitor.post([{"type": "directive.ack", "step": step, "ranks": ranks, "data": data}])

    def _deadline(self, directive: dict[str, Any]) -> float:
        """Return the moment to leave, on this process's monotonic clock."""
        if directive.get("mode") == "exit":
            return time.monotonic()
        try:
            left_s = datetime.fromisoformat(str(directive["deadline"])).timestamp() - time.time()
        except (KeyError, ValueError):
            left_s = self.deadline_s
        # A server clock far off must neither throw the ranks out at once nor keep them for days.
        return time.monotonic() + min(max(left_s, 0.0), 24 * 3600.0)

    def _wait_for_permit(self, directive: dict[str, Any], step: int, key: str) -> Permit:
        if self.monitor.outbox is not None:
            self.monitor.outbox.drain(10.0)
        incident = directive.get("incident") or "not known yet"
        self.say(f"held at the end of step {step}: {self.place.world_size} ranks wait (incident {incident})")
        deadline = self._deadline(directive)
        seq = int(directive.get("seq") or 0)
        asked: dict[str, Any] | None = None  # approved, but other ranks have not said yet that they stopped
        while (left_s := deadline - time.monotonic()) > 0:
            wait_s = min(self.monitor.heartbeat_s, left_s)
            newer = self._ask(seq, wait_s)
            self.monitor.heartbeat("held", step)
            if newer is not None:
                seq, asked = int(newer["seq"]), None
            newer = newer or asked
            if newer is None or newer.get("kind") not in ("resume", "rollback"):
                continue
            plan = newer.get("plan") or {}
            if newer["kind"] == "resume" and plan.get("kind") == "resume_in_place":
                permit = self._exchange(newer)
                if permit is not None:
                    self.store.set(f"{key}/end", str(permit.attempt))
                    self.say(f"resumed in place by permit {permit.permit}")
                    return permit
                asked = newer
            else:
                self.say(
                    "the approved plan goes back to a checkpoint: leaving for a new launch with the permit"
                )
                break
        self._leave(directive, step, key)

    def _ask(self, seq: int, wait_s: float) -> dict[str, Any] | None:
        if self.server is None:
            time.sleep(wait_s)
            return None
        began = time.monotonic()
        try:
            newer = self.server.wait_directive(seq, wait_s)
        except Exception as error:  # a server that is gone changes nothing: held stays held
            self.say(f"no answer from the server ({error}); still held")
            newer = None
        if newer is None or int(newer.get("seq", -1)) <= seq:
            # An answer that came at once must not become a busy loop.
            time.sleep(max(0.0, min(1.0, wait_s) - (time.monotonic() - began)))
            return None
        return newer

    def _exchange(self, directive: dict[str, Any]) -> Permit | None:
        assert self.server is not None
        incident = str(directive.get("incident"))
        try:
            document = self.server.resume(
                incident,
                self.place.attempt + 1,
                f"resume-{self.place.run}-{self.place.attempt}-{directive['seq']}",
            )
            return hold.release(
                self.directory,
                document,
                # The client follows handovers of the server's key; without a pinned key it follows nobody.
                trusted=self.trusted and (self.server.trusted or self.trusted),
                at=time.time(),
                run=self.place.run,
            )
        except Exception as error:  # no permit, or one that does not verify: held stays held
            self.say(f"not resumed: {error}")
            return None

    def _wait_for_rank_0(self, directive: dict[str, Any], step: int, key: str) -> int:
        give_up = time.monotonic() + self.deadline_s + GRACE_S
        if self.place.leads:
            give_up = self._deadline(directive) + GRACE_S
        heartbeat_at = time.monotonic()
        while time.monotonic() < give_up:
            if self.store.check([f"{key}/end"]):
                word = self.store.get(f"{key}/end").decode()
                if word != "exit":
                    return int(word)
                break
            if self.place.leads and time.monotonic() - heartbeat_at >= self.monitor.heartbeat_s:
                heartbeat_at = time.monotonic()
                self.monitor.heartbeat("held", step)
            time.sleep(POLL_S)
        self._leave(directive, step, key)

    def _leave(self, directive: dict[str, Any], step: int, key: str) -> NoReturn:
        if self.place.rank == 0:
            self.monitor.before_leaving()  # a launcher ends this process when the others have left
            self.store.set(f"{key}/end", "exit")
        if self.place.leads:
            self._acknowledge(directive, step, "exited", list(self.place.node_ranks))
            self.monitor.close()
        if self.place.rank == 0:
            self.say(f"leaving with exit code {hold.EXIT_HELD}; {hold.FILE_NAME} keeps this directory held")
            # The store may live in rank 0's process: the others must have read the word first.
            self._wait_for([f"{key}/gone/{rank}" for rank in range(1, self.place.world_size)], 10.0)
        else:
            self.store.set(f"{key}/gone/{self.place.rank}", "1")
        raise SystemExit(hold.EXIT_HELD)

    def _wait_for(self, keys: list[str], timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while keys and not self.store.check(keys):
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S / 4)
        return True
