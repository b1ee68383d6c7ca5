"""Stages of the demo: one line each, with its seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageFailed(Exception):
    """A stage did not hold; the text says what was expected and what was seen."""


class Stages:
    """Times stages and prints one line per stage.

    Attributes:
        failed: names of the stages that did not hold.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.failed: list[str] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Print `ok` or `FAILED` with the seconds the body took; a failure is raised again."""
        start = time.monotonic()
        try:
            yield
        except Exception as error:
            self.failed.append(name)
            self._line("FAILED", name, start, str(error) or type(error).__name__)
            raise
        self._line("ok", name, start, "")

    def _line(self, word: str, name: str, start: float, detail: str) -> None:
        seconds = time.monotonic() - start
        print(f"{word:>6}  {seconds:6.1f} s  {name}{': ' + detail if detail else ''}", flush=True)


def say(text: str = "") -> None:
    """Print a line for the person at the terminal."""
    print(text, flush=True)


def complain(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)
