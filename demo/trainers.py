"""What trains in the demo: a recorded run, or (LIVE=1) a real one on this machine's CPU."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import rfc8785

from andon import hold
from andon.permit import Permit
from andon.recording import Recording
from andon.replay import Replay
from demo.server import REPOSITORY
from demo.stages import StageFailed


class Trainer(Protocol):
    """A training job under a supervisor."""

    checkpoint_dir: Path
    answer: dict[str, Any]

    def start(self) -> None:
        """Launch attempt 1 and return at once."""

    def check(self, permit: Permit) -> None:
        """Raise when this job cannot go on as the permit says."""

    def go_on(self, document: dict[str, Any]) -> None:
        """End the hold by the permit, launch the next attempt and return at once."""

    def ended_well(self) -> bool | None:
        """None while the newest attempt runs, then whether it came to its end unheld."""

    def close(self) -> None:
        """Stop training and leave no process."""


class RecordedTrainer:
    """Plays a recording through the real client."""

    def __init__(
        self,
        *,
        recording: Path,
        server_url: str,
        run: str,
        secret: str,
        directory: Path,
        speed: float,
        trusted: list[str],
    ) -> None:
        self.recording = Recording(recording)
        self.answer = self.recording.description.answer
        self.trusted = trusted
        self.stopping = threading.Event()
        self.replay = Replay(
            self.recording,
            url=server_url,
            run=run,
            secret=secret,
            directory=directory,
            speed=speed,
            trusted=trusted,
            say=lambda text: print(f"  trainer: {text}", flush=True),
            stop=self.stopping,
        )
        self.checkpoint_dir = self.replay.checkpoint_dir
        self._thread: threading.Thread | None = None
        self._outcome: bool | None = None

    def start(self) -> None:
        self._play(self.replay.play_until_held)

    def check(self, permit: Permit) -> None:
        self.replay.compare(permit)

    def go_on(self, document: dict[str, Any]) -> None:
        permit = hold.release(self.checkpoint_dir, document, trusted=self.trusted, at=time.time())
        self._play(lambda: self.replay.continue_with(permit))

    def ended_well(self) -> bool | None:
        return self._outcome

    def close(self) -> None:
        self.stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=20)
        self.replay.close()
        self.recording.close()

    def _play(self, play: Callable[[], dict[str, Any] | None]) -> None:
        if self._thread is not None:
            self._thread.join()
        self._outcome = None

        def body() -> None:
            try:
                held = play()
            except Exception as error:
                print(f"  trainer: stopped: {error}", flush=True)
                self._outcome = False
            else:
                self._outcome = held is None

        self._thread = threading.Thread(target=body, name="recorded-trainer", daemon=True)
        self._thread.start()


class LiveTrainer:
    """Trains a small GPT on four CPU ranks; the fault is in the data it reads."""

    def __init__(
        self, *, server_url: str, run: str, secret: str, directory: Path, trusted: list[str]
    ) -> None:
        self.url, self.run, self.secret, self.trusted = server_url, run, secret, trusted
        self.directory = directory
        self.checkpoint_dir = directory / "checkpoints"
        # What the script's fault makes happen; the same numbers as in the recording it also makes.
        self.answer = Recording(REPOSITORY / "demo" / "recordings" / "nan-one-rank.zip").description.answer
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory / "train.log"

    def start(self) -> None:
        self._launch()

    def check(self, permit: Permit) -> None:
        if permit.checkpoint is None:
            raise StageFailed("the permit names no checkpoint to go back to")

    def go_on(self, document: dict[str, Any]) -> None:
        self._wait_for_exit()
        path = self.directory / f"permit-{document['attempt']}.json"
        path.write_bytes(rfc8785.dumps(document))
        self._launch("--permit", str(path))

    def ended_well(self) -> bool | None:
        code = self.process.poll() if self.process else None
        return None if code is None else code == 0

    def close(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _wait_for_exit(self) -> None:
        # Ranks told to roll back leave with 93; their memory holds the bad weights.
        if self.process is not None and self.process.wait(120) != hold.EXIT_HELD:
            raise StageFailed(
                f"the held attempt left with {self.process.returncode}, expected {hold.EXIT_HELD}"
            )

    def _launch(self, *more: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        keys = [word for key in self.trusted for word in ("--key", key)]
        command = [sys.executable, "-m", "demo.train", "--live", "--url", self.url, "--run", self.run]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--dir", str(self.directory), *keys, *more],
                env={**os.environ, "ANDON_RUN_SECRET": self.secret, "OMP_NUM_THREADS": "1"},
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )


def policy_of(recording: Path) -> str:
    """Return the policy overrides a recording's answer needs, as JSON."""
    with Recording(recording) as opened:
        return msgspec.json.encode(opened.description.policy).decode()
