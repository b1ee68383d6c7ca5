"""What an agent keeps on disk, so that being killed costs it little: notes as JSON, and copies to send."""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from andon.signing import fsync_directory


class State:
    """Notes by kind and task id below one private directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Held bytes and masked logs are as private as what they came from.
        directory.chmod(0o700)

    def read(self, kind: str, task: str) -> dict[str, Any] | None:
        """Return a note, None when there is none or it cannot be read (then the work is done anew)."""
        note = self._note(kind, task)
        try:
            found = json.loads(note.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, kind: str, task: str, document: dict[str, Any]) -> None:
        """Keep a note: whole, or as it was before."""
        target = self._note(kind, task)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = target.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(target)
        fsync_directory(target.parent)

    def forget(self, kind: str, task: str) -> None:
        """Drop a note."""
        self._note(kind, task).unlink(missing_ok=True)

    def ids(self, kind: str) -> list[str]:
        """Return the task ids that have a note of a kind."""
        return sorted(note.stem for note in (self.directory / kind).glob("*.json"))

    def copy_of(self, task: str) -> Path:
        """Return where the masked or encrypted copy of a task's file lies; its directory exists."""
        place = self.directory / "copies"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        return place / _checked(task)

    def drop_copy(self, task: str) -> None:
        """Remove a task's copy."""
        self.copy_of(task).unlink(missing_ok=True)

    def forget_old(self, seconds: float) -> None:
        """Remove copies and notes of uploads that nobody asked for in so long: their items have ended."""
        before_s = time.time() - seconds
        for kind in ("copies", "uploads", "sent"):
            for file in (self.directory / kind).glob("*"):
                with contextlib.suppress(OSError):
                    if file.stat().st_mtime < before_s:
                        file.unlink()

    def clear(self, run: str) -> None:
        """Remove everything when the directory served another server or run: ids would mean other things."""
        mark = self.directory / "run"
        with contextlib.suppress(OSError):
            if mark.read_text("utf-8") == run:
                return
        for kind in ("holds", "uploads", "sent", "copies"):
            shutil.rmtree(self.directory / kind, ignore_errors=True)
        mark.write_text(run, "utf-8")

    def _note(self, kind: str, task: str) -> Path:
        return self.directory / kind / f"{_checked(task)}.json"


def _checked(task: str) -> str:
    """Return a task id as it is; the server chose it, and it becomes a file's name."""
    if not (task.isascii() and task.isalnum()):
        raise ValueError(f"{task!r}: is no task id")
    return task
