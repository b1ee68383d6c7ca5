"""Made-up secrets for the tests of masking: the corpus in tests/cases/secrets, with its places filled in.

No token stands in the corpus as it would be found in the wild: each is made anew from a fixed seed, so
that a scanner of this repository finds nothing, and a test knows exactly what must not survive.
"""

import json
import random
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CASES = Path(__file__).parent / "cases" / "secrets"
_PLACE = re.compile(r"«(?:(?P<kind>[ahbu]):(?P<length>\d+)|=(?P<plain>[^»]+))»")
_ALPHABETS = {
    "a": string.ascii_letters + string.digits,
    "h": "0123456789abcdef",
    "b": string.ascii_letters + string.digits + "+/",
    "u": string.ascii_letters + string.digits + "-_",
}


@dataclass(frozen=True)
class Case:
    """A text with secrets in it."""

    name: str
    text: str
    secrets: tuple[str, ...]

    def left_in(self, text: str) -> list[str]:
        """Return the secrets of which half or more is still in `text`."""
        return [secret for secret in self.secrets if any(part in text for part in _halves(secret))]


def _halves(secret: str) -> list[str]:
    size = max(4, len(secret) // 2)
    return [secret[at : at + size] for at in range(max(1, len(secret) - size + 1))]


def fill(template: str, seed: int = 7) -> Case:
    """Return a template with a secret in each of its places."""
    made: list[str] = []
    choose = random.Random(f"{seed} {template}")

    def one(found: re.Match[str]) -> str:
        if found["plain"]:
            made.append(found["plain"])
        else:
            alphabet = _ALPHABETS[found["kind"]]
            inner = "".join(choose.choice(alphabet) for _ in range(int(found["length"]) - 2))
            # Neither end may be a mark: a shell would not take it, and \b would not see it.
            made.append(f"{choose.choice('abcdef')}{inner}{choose.choice('0123456789')}")
        return made[-1]

    return Case(template, _PLACE.sub(one, template), tuple(made))


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def texts() -> list[Case]:
    """Return the corpus of texts."""
    return [
        fill(
            line.replace("\\\\n", "\0")
            .replace("\\r", "\r")
            .replace("\\n", "\n")
            .replace("\0", "\\n")
            .replace("\\x1b", "\x1b")
        )
        for line in _lines(CASES / "text.txt")
    ]


def launch() -> tuple[dict[str, Any], Case]:
    """Return what a launch might tell of itself, with secrets in it, and those secrets."""
    case = fill((CASES / "launch.json").read_text())
    return json.loads(case.text), case


def ordinary() -> list[str]:
    """Return texts that hold no secret."""
    return _lines(CASES / "ordinary.txt")
