"""Private files and directories under ANDON_DATA_DIR."""

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

# sockaddr_un holds 108 bytes; PostgreSQL adds "/.s.PGSQL.5432" and its lock file's suffix.
SOCKET_PATH_MAX_BYTES = 100
_SOCKET_NAME = "/.s.PGSQL.5432"


def private_directory(path: Path) -> Path:
    """Create `path` with mode 0700 and return it; missing parents get the same mode.

    A directory that exists keeps its mode: it may be somebody else's (`ANDON_DATA_DIR=/tmp`).
    """
    for directory in (*reversed(path.parents), path):
        if not directory.exists():
            directory.mkdir(mode=0o700, exist_ok=True)
    return path


def secret(path: Path, *, length_bytes: int = 32) -> str:
    """Return the secret kept in `path`, made on first use with mode 0600.

    Two processes may ask at once, and either may be killed in between: the file appears complete
    under its name or not at all, and the first one to appear is everybody's.
    """
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        pass
    private_directory(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(length_bytes) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    return path.read_text(encoding="ascii").strip()


def socket_directory(run_dir: Path) -> Path:
    """Return a 0700 directory whose socket path fits into 100 bytes: `run_dir`, else a fresh one."""
    if len(os.fsencode(str(run_dir) + _SOCKET_NAME)) <= SOCKET_PATH_MAX_BYTES:
        return private_directory(run_dir)
    return Path(tempfile.mkdtemp(prefix="andon-", dir=_short_temporary_directory()))


def _short_temporary_directory() -> str:
    wanted = tempfile.gettempdir()
    # TMPDIR itself may be as long as the data directory (build systems do that).
    return wanted if len(os.fsencode(wanted)) + len("/andon-12345678" + _SOCKET_NAME) <= 100 else "/tmp"  # noqa: S108
