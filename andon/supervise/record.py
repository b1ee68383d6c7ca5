"""What a supervisor remembers over its own restarts: the attempt, and when it started it again by itself."""

import json
import time
from pathlib import Path
from typing import Any

from andon import checkpoints

FILE = "andon-supervise.json"
DAY_S = 86_400.0


class Record:
    """Kept beside the checkpoints. A record that cannot be read counts as a spent budget: a person looks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.attempt = 0
        self.restarts: list[float] = []  # Unix seconds
        self.trouble = ""
        try:
            told: Any = json.loads((directory / FILE).read_bytes())
            self.attempt = int(told["attempt"])
            self.restarts = [float(at) for at in told["restarts"]]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.trouble = f"{directory / FILE} cannot be read ({error}): remove it once you know why"

    def launched(self, attempt: int, *, by_itself: bool) -> None:
        """Write down a launch before it happens: one that is killed in between is counted, not lost."""
        self.attempt = max(self.attempt, attempt)
        if by_itself:
            self.restarts.append(time.time())
        document = {"schema": "andon.supervise/1", "attempt": self.attempt, "restarts": self.today()}
        checkpoints.write_document(self.directory, FILE, document)

    def today(self) -> list[float]:
        """Return the restarts of the last 24 hours."""
        return [at for at in self.restarts if at > time.time() - DAY_S]
