"""The run directory a replay fills: checkpoints and records when they are announced, logs as they grew."""

from pathlib import Path
from typing import Any

from andon.checkpoints import MANIFEST
from andon.recording import URI_BASE, Recording


class RunFiles:
    """Writes a recording's files under `directory`, at their run-relative paths."""

    def __init__(self, recording: Recording, directory: Path) -> None:
        self.recording = recording
        self.directory = directory
        self._logs: dict[str, list[tuple[float, str]]] = {}

    def begin(self, attempt: int) -> None:
        """Start a recorded attempt: its logs are empty."""
        paths = self.recording.files(f"logs/attempt-{attempt}/")
        self._logs = {path: self.recording.log_lines(path) for path in paths}
        for path in paths:
            self._target(path).unlink(missing_ok=True)

    def _target(self, path: str) -> Path:
        target = self.directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def rebased(self, value: Any) -> Any:
        """Return JSON data with every recording:/// URI pointing below the directory."""
        if isinstance(value, dict):
            return {key: self.rebased(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.rebased(item) for item in value]
        if isinstance(value, str) and value.startswith(URI_BASE):
            return (self.directory / value.removeprefix(URI_BASE)).as_uri()
        return value

    def materialise(self, path: str, *, whole: bool) -> None:
        """Write what a URI points to: one file, or (`whole`) a checkpoint, manifest last."""
        if path in self._logs:
            self._target(path).touch()
            return
        names = self.recording.files(path + "/") if whole else [path]
        for name in sorted(names, key=lambda one: one.endswith(f"/{MANIFEST}")):
            target = self._target(name)
            if target.exists():
                if target.read_bytes() == self.recording.read(name):
                    continue
                # These bytes may be held under another name too: never write into the same inode.
                target.unlink()
            self.recording.extract(name, self.directory)

    def grow_logs(self, until_s: float) -> None:
        """Append the log lines written up to `until_s` of the attempt."""
        for path, lines in self._logs.items():
            due = [line for at_s, line in lines if at_s <= until_s]
            if due:
                del lines[: len(due)]
                with self._target(path).open("a", encoding="utf-8") as file:
                    file.writelines(due)
