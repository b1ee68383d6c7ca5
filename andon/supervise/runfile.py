"""The file that says what is supervised: RUN.toml."""

import os
import socket
import tomllib
from pathlib import Path

import msgspec

MOST_VOLATILE_S = 60.0


class RunFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One job. Times in seconds.

    run = "pt-13b"
    url = "https://andon.example.org"
    directory = "/scratch/pt-13b/checkpoints"
    command = ["torchrun", "--max-restarts=0", "--nproc-per-node=8", "train.py"]
    keys = ["…"]                 # fingerprints of the server's keys, pinned here
    secret_file = "/etc/andon/pt-13b.secret"   # default: ANDON_RUN_SECRET
    restarts_per_day = 3         # after failures that hold nothing
    volatile_wait_s = 60         # how long what vanishes with the processes is waited for, 60 at most
    kill_after_s = 30            # between SIGTERM and SIGKILL: longer than the longest save
    ends_after_s = 90            # of a SIGTERM to the supervisor: when the batch system kills everything
    [environment]                # more, for the job
    OMP_NUM_THREADS = "1"
    """

    run: str
    url: str
    directory: str
    command: list[str]
    keys: list[str] = []
    secret_file: str | None = None
    node: str = msgspec.field(default_factory=socket.gethostname)
    restarts_per_day: int = 3
    volatile_wait_s: float = MOST_VOLATILE_S
    kill_after_s: float = 30.0
    ends_after_s: float | None = None
    leave_grace_s: float = 60.0  # past the deadline of a hold, for ranks to leave by themselves
    settle_s: float = 10.0  # after a failure, for the server to say whether it holds the run
    environment: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("command: what is started is missing")
        if not self.keys:
            raise ValueError("keys: pin the fingerprint of the server's key; a permit is checked against it")
        if not 0 <= self.volatile_wait_s <= MOST_VOLATILE_S:
            raise ValueError(f"volatile_wait_s: 0 to {MOST_VOLATILE_S:g}; longer costs more than is lost")
        if min(self.kill_after_s, self.leave_grace_s, self.settle_s, self.restarts_per_day) < 0:
            raise ValueError("times and restarts_per_day: not below 0")

    @property
    def secret(self) -> str:
        """Return the run's secret. Raises ValueError, OSError."""
        found = Path(self.secret_file).read_text("utf-8").strip() if self.secret_file else ""
        found = found or os.environ.get("ANDON_RUN_SECRET", "")
        if not found:
            raise ValueError("secret_file or ANDON_RUN_SECRET: the run's secret is missing")
        return found


def read(path: Path) -> RunFile:
    """Read a RUN.toml.

    Raises:
        OSError: it cannot be read.
        ValueError: what is wrong in it, with the field's name.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), RunFile)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error
