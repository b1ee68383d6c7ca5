"""`python -m config.alive worker|scheduler`: exit 0 if that process rang or answered a bell lately.

For health checks of containers, which cannot ask a Celery process over HTTP. The schedule rings every
few seconds, so a worker that has answered nothing for a minute, or a scheduler that has rung nothing,
is stuck or cut off from the broker. Reads the time of a file in ANDON_DATA_DIR, so it starts in
milliseconds and needs no settings.
"""

import os
import sys
import time
from pathlib import Path

MAX_AGE_S = 60.0


def file_of(part: str, data_dir: Path) -> Path:
    """Return the file whose time says when `part` was last seen at work."""
    return data_dir / "run" / f"{part}.alive"


def main(arguments: list[str]) -> int:
    """Return the exit status for `arguments`."""
    if len(arguments) != 1 or arguments[0] not in {"worker", "scheduler"}:
        sys.stderr.write("usage: python -m config.alive worker|scheduler\n")
        return 2
    default = Path(__file__).resolve().parent.parent / "var"
    file = file_of(arguments[0], Path(os.environ.get("ANDON_DATA_DIR", default)))
    try:
        age_s = time.time() - file.stat().st_mtime
    except OSError as error:
        sys.stderr.write(f"{arguments[0]}: never seen at work: {error}\n")
        return 1
    if age_s > MAX_AGE_S:
        sys.stderr.write(f"{arguments[0]}: last seen at work {age_s:.0f} s ago\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
