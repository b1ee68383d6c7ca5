"""The page that needs no worker: when Andon's own sweep is missed, the web process pages by itself.

One watcher per machine, a thread of whichever web process holds a file's lock. While the sweep is missed
it does all paging work that is due, so an incident that opens now is paged too. With the database down it
sends straight from the operator's file. `manage.py deadman` is the same look for cron or a timer elsewhere.
"""

import fcntl
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

from django.conf import settings
from django.db import Error, connections
from django.utils import timezone

from incidents.paging import asking, channels, escalating, on_call, raising
from incidents.paging.ladder import ON_CALL, paging
from incidents.paging.models import Beat, Delivery, Page
from runs import formatting as words
from runs import work
from runs.models import Work

log = logging.getLogger(__name__)

SWEEP = "sweep"
OUTAGE = "database-silent.json"
SILENT = "the database does not answer"
LOOK_EVERY_S = 5.0
TITLE = "Andon's own sweep is missed"
_MOST_AT_ONCE = 200


def beat() -> None:
    """Leave the trace that a sweep ran; its page, if there is one, is over."""
    Beat.objects.update_or_create(name=SWEEP, defaults={"at": timezone.now()})
    raising.end_page(SWEEP, "The sweep runs again.")


def missed_for(now: datetime, since: datetime) -> timedelta | None:
    """Return for how long no sweep was seen, when that is too long; None while all is well.

    Args:
        since: what counts for a server that never swept: when the one who asks began to look.
    """
    last = Beat.objects.filter(name=SWEEP).values_list("at", flat=True).first() or since
    silent = now - last
    return silent if silent > timedelta(seconds=settings.SWEEP_MISSED_S) else None


def look(since: datetime) -> str:
    """Look once: page when the sweep is missed, and do what paging is due; returns what is wrong, or "".

    Raises:
        django.db.Error: the database does not answer.
    """
    now = timezone.now()
    silent = missed_for(now, since)
    if silent is None:
        return ""
    said = words.duration(silent.total_seconds())
    if not Page.objects.filter(key=SWEEP, ended_at=None).exists():
        raising.raise_page(
            key=SWEEP,
            kind=Page.Kind.SWEEP,
            title=TITLE,
            says=f"No sweep ran for {said}: no worker, no scheduler, or no broker. Posts are still taken and "
            "held runs stay held, but evidence is not collected and nothing resolves.",
            link="/system",
        )
    raising.sweep()
    do_paging_work()
    return f"no sweep for {said}"


def do_paging_work() -> int:
    """Do the paging work that is due right here; claims decide, should a worker live after all."""
    done = 0
    for _ in range(3):  # what a page asks for while it is worked on is due after this list was read
        due = Work.objects.filter(
            kind__in=[asking.KIND, escalating.DELIVER],
            state__in=[Work.State.DUE, Work.State.CLAIMED],
            not_before__lte=timezone.now(),
        )
        ids = list(due.order_by("not_before").values_list("pk", flat=True)[:_MOST_AT_ONCE])
        taken = sum(work.run_one(pk) for pk in ids)
        done += taken
        if not taken:
            break
    return done


# --- without a database


@dataclass
class Outage:
    """The database does not answer: since when, and what was sent of it.

    Kept in a file of this machine, so that a process that starts anew, or a command of cron, goes on with it:
    the same outage keeps its keys.
    """

    since: datetime
    file: Path | None = None
    sent: set[tuple[int, str]] = field(default_factory=set)
    retry_at: dict[str, datetime] = field(default_factory=dict)

    @classmethod
    def known(cls, file: Path) -> "Outage | None":
        """Return the outage that a file tells of, None when there is none."""
        try:
            told = json.loads(file.read_text("utf-8"))
            sent = {(int(turn), str(name)) for turn, name in told["sent"]}
            return cls(datetime.fromisoformat(told["since"]), file, sent)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.error("dead-man's look: %s cannot be read: %s", file.name, error)
            return None

    def keep(self) -> None:
        """Write the file, whole or not at all."""
        if self.file is None:
            return
        told = {"since": self.since.isoformat(), "sent": sorted(self.sent)}
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(told), "utf-8")
        new.replace(self.file)

    def tell(self, now: datetime) -> None:
        """Send what is due of the file's ladder, straight to its channels."""
        known = paging()
        waited = now - self.since - timedelta(seconds=settings.SWEEP_MISSED_S)
        if waited < timedelta(0):
            return
        holder = on_call.of_list(known.default.on_call, now)

        def resolve(name: str) -> list[str]:
            if name != ON_CALL:
                return [name]
            return known.of_person(holder.name) if holder is not None else []

        made = escalating.turns(known.default, resolve)
        repeated, _ = escalating.repetition(made, known.default, waited)
        for turn in [one for one in made if one.after <= waited] + ([repeated] if repeated else []):
            for name in turn.channels:
                if (turn.number, name) not in self.sent and self.retry_at.get(name, now) <= now:
                    self._send(turn.number, name, Delivery.What.RAISED, now)
        self.keep()

    def over(self, now: datetime) -> None:
        """Tell every channel that was told that the database answers again."""
        for name in dict.fromkeys(name for _, name in sorted(self.sent)):
            self._send(0, name, Delivery.What.RESOLVED, now)
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def _send(self, turn: int, name: str, what: str, now: datetime) -> None:
        channel = paging().channels.get(name)
        if channel is None:
            return
        is_over = what == Delivery.What.RESOLVED
        message = channels.Message(
            key=f"database-{self.since:%Y%m%dT%H%M%S}_{what}_{turn}_{name}",
            page_key="database",
            group="database",
            kind=Page.Kind.SWEEP,
            what=what,
            title="Over: Andon's database does not answer" if is_over else "Andon's database does not answer",
            text="It answers again."
            if is_over
            else f"Since {words.clock(self.since, now)} UTC. No post is stored; trainers decide alone "
            "and keep what they could not send.",
            link=f"{settings.PUBLIC_URL}/system",
            urgent=True,
            at=now if is_over else self.since,
            raised_at=self.since,
            ended_at=now if is_over else None,
        )
        try:
            channels.send(channel, message)
        except channels.NotSent as error:
            log.error("dead-man's page over %s: %s", name, error)
            self.retry_at[name] = now + timedelta(seconds=30)
        else:
            if not is_over:
                self.sent.add((turn, name))


# --- the watcher


def directory() -> Path:
    """Return where this machine keeps the lock and an outage; made on first use."""
    path = Path(settings.DATA_DIR) / "run"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def look_and_tell(since: datetime, silent: str | None = None) -> str:
    """Look once, whether the database answers or not; returns what is wrong, "" when nothing is.

    Args:
        since: as `look`.
        silent: why the database does not answer, where the caller knows already.
    """
    now, file = datetime.now(UTC), directory() / OUTAGE
    outage = Outage.known(file)
    try:
        wrong = "" if silent else look(since)
    except Error as error:
        silent, wrong = str(error), ""
    if silent:
        outage = outage or Outage(now, file)
        outage.keep()
        outage.tell(now)
        return f"{SILENT}: {silent}"
    if outage is not None:
        outage.over(now)
    return wrong


class Watcher(threading.Thread):
    """Looks every few seconds while this process is the one of its machine that does.

    Args:
        why_silent: asks the database on a connection of its own, with a deadline, and returns why it does not
            answer: one that hangs must not hang who would page for it.
    """

    def __init__(self, why_silent: Callable[[], str | None]) -> None:
        super().__init__(name="deadman", daemon=True)
        self._why_silent = why_silent
        self._lock: IO[str] | None = None
        self._since = timezone.now()
        self.ended = threading.Event()

    def run(self) -> None:
        """Look until the process ends."""
        while not self.ended.wait(min(LOOK_EVERY_S, settings.SWEEP_MISSED_S / 5)):
            try:
                if self._is_mine():
                    self.look_once()
            except Exception:
                # Whatever happens to one look, the next must come: nobody else would notice.
                log.exception("the dead-man's look failed")
            finally:
                connections.close_all()

    def look_once(self) -> None:
        """Look, and say in the log what is wrong."""
        wrong = look_and_tell(self._since, self._why_silent())
        if wrong:
            log.error("dead-man's look: %s", wrong)
        if wrong.startswith(SILENT):
            self._since = timezone.now()  # once it answers, workers need a moment as well

    def _is_mine(self) -> bool:
        if self._lock is not None:
            return True
        file = (directory() / "deadman.lock").open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._lock = file
        return True


def watch(why_silent: Callable[[], str | None]) -> Watcher:
    """Start the watcher of this process; it does nothing while another process of the machine does it."""
    watcher = Watcher(why_silent)
    watcher.start()
    return watcher
