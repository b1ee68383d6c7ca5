"""Who holds a data directory, and how the other commands find the servers running there."""

import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO

from config.embedded.files import private_directory
from config.embedded.processes import EmbeddedError

_LOCK, _SERVERS = "up.lock", "servers.json"


def hold(data_dir: Path) -> IO[str]:
    """Take the data directory for this process; keep the returned file open for as long as it is held.

    A lock of the kernel, not a pid file: it is gone with the process however that ends.
    """
    run_dir = private_directory(data_dir / "run")
    file = (run_dir / _LOCK).open("a+", encoding="utf-8")
    (run_dir / _LOCK).chmod(0o600)
    # A command that looks whether somebody holds it (`running`) does so for an instant only.
    deadline = time.monotonic() + 1
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                file.close()
                raise EmbeddedError(
                    f"another `manage.py up` (pid {holder}) runs with ANDON_DATA_DIR={data_dir}: "
                    "stop it first, or set another ANDON_DATA_DIR and ANDON_PORT"
                ) from None
            time.sleep(0.05)
        else:
            break
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def announce(data_dir: Path, urls: dict[str, str]) -> None:
    """Write the URLs of the embedded servers for other commands; `urls` maps variable to value."""
    run_dir = private_directory(data_dir / "run")
    temporary = run_dir / f"{_SERVERS}.new"
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(urls, file)
    temporary.rename(run_dir / _SERVERS)


def withdraw(data_dir: Path) -> None:
    """Take the announcement back."""
    (data_dir / "run" / _SERVERS).unlink(missing_ok=True)


def running(data_dir: Path) -> dict[str, str]:
    """Return the URLs announced in `data_dir` if an `up` runs there, else nothing."""
    run_dir = data_dir / "run"
    try:
        with (run_dir / _LOCK).open("r", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                announced = json.loads((run_dir / _SERVERS).read_text(encoding="utf-8"))
                return {str(name): str(url) for name, url in announced.items()}
    except (OSError, ValueError):
        # No lock file: `up` never ran here. No announcement yet: it is still starting.
        return {}
    return {}
