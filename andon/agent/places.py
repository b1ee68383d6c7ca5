"""Which files an agent may touch: those under its own roots, whatever a server asks for."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Declined(Exception):
    """This node cannot do what is wanted; `why` is the wire's word for it."""

    def __init__(self, why: str, says: str) -> None:
        super().__init__(says)
        self.why = why
        self.says = says


class Roots:
    """Directories in which evidence may lie."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(os.path.realpath(root)) for root in roots]

    def path_of(self, uri: str) -> tuple[Path, Path]:
        """Return the real path that a `file://` URI or an absolute path names, and the root it lies in.

        Symbolic links are resolved first, so that none leads out.

        Raises:
            Declined: outside of all roots, or no file URI.
        """
        text = uri
        if not uri.startswith("/"):
            text = _path_in(uri)
        if "\0" in text:
            raise Declined("outside-roots", "a path cannot hold a NUL")
        real = Path(os.path.realpath(text))
        for root in self.roots:
            if real == root or root in real.parents:
                return real, root
        raise Declined("outside-roots", f"{text}: is under none of this agent's roots")


def _path_in(uri: str) -> str:
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise Declined("outside-roots", f"{uri}: {error}") from error
    path = unquote(parts.path)
    if parts.scheme != "file" or not path.startswith("/"):
        raise Declined("outside-roots", f"{uri}: is no file:// URI")
    return path
