"""The agent's turn, over and over: ask what is wanted, hold at once; upload and remove beside it; watch."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.agent.holding import Holder
from andon.agent.pace import Pace
from andon.agent.places import Declined, Roots
from andon.agent.putting import PutFailed, Putter
from andon.agent.server import Server
from andon.agent.state import State
from andon.agent.uploading import Uploader
from andon.client_http import AnswerError, Backoff, Unreachable

logger = logging.getLogger("andon.agent")

WATCH_EVERY_S = 60.0
FORGET_AFTER_S = 14 * 86_400.0  # longer than any item's deadline; what is still wanted is made anew
# Said by the server when a task went to somebody else or is done meanwhile: nothing to try again.
_OVER = frozenset({"unknown-task", "not-wanted", "wrong-node", "other-bytes"})
_BESIDE = frozenset({"upload", "encrypt", "release"})  # what a hold never waits for


@dataclass(frozen=True)
class Settings:
    """How an agent runs. `every_s` is the longest pause between two questions, `uploads` its threads."""

    url: str
    run: str
    secret: str
    node: str
    roots: tuple[Path, ...]
    state: Path
    max_mb_per_s: float = 0.0
    every_s: float = 5.0
    uploads: int = 4


class NodeAgent:
    """One node's agent. `run` returns after `stop`; being killed costs it nothing but time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pace = Pace(settings.max_mb_per_s)
        self.server = Server(settings.url, settings.run, settings.secret, settings.node)
        self.state = State(settings.state)
        self.state.clear(f"{settings.url} {settings.run}")
        roots = Roots(settings.roots)
        self.holder = Holder(self.server, roots, self.state)
        self.uploader = Uploader(self.server, roots, self.state, Putter(self.pace))
        self._stopped = threading.Event()
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._later: dict[str, Backoff] = {}

    def stop(self) -> None:
        """Make `run` return after what it does now."""
        self._stopped.set()

    def run(self, *, once: bool = False) -> None:
        """Work until stopped; `once`: until nothing is wanted and nothing is under way."""
        trouble = Backoff()
        watched_s = 0.0
        with ThreadPoolExecutor(self.settings.uploads) as pool:
            while not self._stopped.is_set():
                pause_s = self.settings.every_s
                try:
                    answer = self.server.wanted()
                    trouble.worked()
                    self._take_on(answer, pool)
                    pause_s = min(pause_s, float(answer.get("ask_again_s") or pause_s))
                    self.uploader.settle()
                    if time.monotonic() - watched_s > WATCH_EVERY_S:
                        self.holder.watch()
                        self.state.forget_old(FORGET_AFTER_S)
                        watched_s = time.monotonic()
                    if once and not answer["items"] and not self._busy:
                        return
                except (Unreachable, AnswerError) as error:
                    logger.warning("the server does not answer as hoped: %s", error)
                    trouble.failed(None)
                    pause_s = max(pause_s, trouble.until_s - time.monotonic())
                except OSError as error:
                    logger.warning("this node has trouble: %s", error)
                self._stopped.wait(pause_s)

    def _take_on(self, answer: dict[str, Any], pool: ThreadPoolExecutor) -> None:
        asked = float(answer.get("max_mb_per_s") or 0.0)
        rates = [rate for rate in (asked, self.settings.max_mb_per_s) if rate > 0]
        self.pace.mb_per_s = min(rates, default=0.0)
        for task in answer["items"]:
            if not self._begin(str(task["id"])):
                continue
            if task["act"] == "hold":
                self._do(task)  # at once and before any upload: holds never wait
            elif task["act"] in _BESIDE:
                pool.submit(self._do, task)
            else:
                self._end(str(task["id"]))  # a newer server's; another agent may know it

    def _begin(self, id_: str) -> bool:
        with self._lock:
            later = self._later.get(id_)
            if id_ in self._busy or (later is not None and later.waiting):
                return False
            self._busy.add(id_)
            return True

    def _end(self, id_: str, *, failed: bool = False) -> None:
        with self._lock:
            self._busy.discard(id_)
            if failed:
                self._later.setdefault(id_, Backoff(first_s=1.0)).failed(None)
            else:
                self._later.pop(id_, None)

    def _do(self, task: dict[str, Any]) -> None:
        id_, failed = str(task["id"]), True
        try:
            if self._stopped.is_set():
                return
            if task["act"] == "hold":
                self.holder.hold(task)
            elif task["act"] == "release":
                self.holder.release(task)
            else:
                self.uploader.upload(task)
            failed = False
        except Declined as reason:
            logger.warning("declined: %s", reason.says)
            failed = not self._decline(id_, reason)
        except AnswerError as error:
            failed = error.type not in _OVER
            logger.warning("%s: %s", task["paths"][0], error)
            if error.type == "bytes-differ":
                failed = not self._decline(id_, Declined("bytes-differ", str(error.problem["detail"])))
        except (Unreachable, PutFailed, OSError) as error:
            logger.warning("%s: %s; will be tried again", task["paths"][0], error)
        except Exception:  # one task that goes wrong must not end the others
            logger.exception("%s: failed unexpectedly; will be tried again", task["paths"][0])
        finally:
            self._end(id_, failed=failed)

    def _decline(self, id_: str, reason: Declined) -> bool:
        try:
            self.server.decline(id_, reason.why, reason.says)
        except (AnswerError, Unreachable) as error:
            logger.warning("could not decline: %s", error)
            return isinstance(error, AnswerError) and error.type in _OVER
        return True
