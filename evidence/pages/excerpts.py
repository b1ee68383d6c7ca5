"""A few lines out of kept evidence, for a page: never more than a bounded number of bytes is read.

From what the vault holds (masked when it was stored), else from a held source that this server may read
(masked here). Who reads is a row of the dossier's custody, as for a download.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from andon.masking import mask_lines
from evidence import actions, sources
from evidence.kinds import words
from evidence.models import Dossier, Item, StoredObject
from evidence.sources import SourceError
from evidence.vault import VaultError, vault
from runs import formatting
from runs.models import Person

READ = "excerpt read"  # the act, as custody rows name it
MOST_BYTES = 4 << 20  # one excerpt reads no more, however large the file is
_WHOLE_BYTES = 1 << 20  # a file up to here is read at once
_PROBE_BYTES = 32 << 10
_AROUND_BYTES = 256 << 10  # enough for 50 lines either side, of 2,000 characters
_LINE_CHARS = 400
_MOST_FILES = 64  # looked at for one excerpt

Key = Callable[[str], float | None]  # what a line says of when: a step, a time; None for nothing


class NoExcerpt(Exception):
    """There are no bytes to read; `says` is why, as a sentence for people."""

    def __init__(self, says: str) -> None:
        super().__init__(says)
        self.says = says


@dataclass
class Kept:
    """One readable file of a dossier's item, and how much of it was read so far."""

    item: Item
    path: str
    bytes_total: int
    sha256: str  # "" while it is only held
    sealed: bool
    _open: Callable[[int], Any] = field(repr=False)
    bytes_read: int = 0

    def at(self, start: int, count: int) -> bytes:
        """Return up to `count` bytes from `start`, fewer at the end or when the excerpt's bytes are used up.

        Raises:
            NoExcerpt: the store or the source does not give them.
        """
        count = min(count, MOST_BYTES - self.bytes_read, max(0, self.bytes_total - start))
        if count <= 0:
            return b""
        pieces, left = [], count
        try:
            with closing(self._open(start)) as file:
                while left and (data := file.read(left)):
                    pieces.append(data)
                    left -= len(data)
        except (VaultError, SourceError, OSError) as error:
            raise NoExcerpt(f"It cannot be read now: {formatting.inert(error, 200)}.") from error
        self.bytes_read += count - left
        return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of a file. `mark` is the index of the line that was looked for, None when it was not found."""

    lines: list[str]
    mark: int | None
    found_by: str  # "step", "time", or why the end of the file stands here
    path: str
    sha256: str
    bytes_total: int
    bytes_read: int


def files(dossier: Dossier, kind: str, prefix: str = "") -> Iterator[Kept]:
    """Yield what can be read of an item kind: stored objects, and held files that this server may read.

    Args:
        prefix: only files whose path begins so.

    Raises:
        NoExcerpt: there is nothing, with the reason the evidence list gives.
    """
    items = list(Item.objects.filter(dossier=dossier, kind=kind).order_by("-id"))
    if not items:
        raise NoExcerpt(f"The freeze plan of this dossier asks for no {words(kind)}.")
    found = False
    for item in items:
        for kept in (*_stored(item, prefix), *_held(item, prefix)):
            found = True
            yield kept
    if not found:
        raise NoExcerpt(_why_not(items[0], prefix))


def _stored(item: Item, prefix: str) -> Iterator[Kept]:
    rows = StoredObject.objects.filter(item=item, deleted_at=None, path__startswith=prefix).order_by("path")
    for one in rows[:_MOST_FILES]:
        yield Kept(item, one.path, one.bytes_total, one.sha256, True, _opener(one))


def _opener(one: StoredObject) -> Callable[[int], Any]:
    return lambda start: vault().open(one.key, one.version_id, start)


def _held(item: Item, prefix: str) -> Iterator[Kept]:
    """Yield offered files that are not in the vault yet but lie where this server may read."""
    if item.state in {Item.State.SEALED, Item.State.MISSING, Item.State.NOT_APPLICABLE}:
        return
    tried = 0
    for entry in item.source.get("artifacts", []):
        uri, rank = str(entry["uri"]), entry.get("rank")
        name = uri.rsplit("/", 1)[-1]
        path = f"rank-{rank:05d}/{name}" if isinstance(rank, int) else name
        if not path.startswith(prefix) or not sources.is_readable_here(uri):
            continue
        tried += 1
        if tried > _MOST_FILES:
            return
        try:
            source = sources.open_uri(uri)
        except SourceError:
            continue
        yield Kept(item, path, source.bytes_total, "", False, source.open)


def _why_not(item: Item, prefix: str) -> str:
    name = words(item.kind)
    others = StoredObject.objects.filter(item=item, deleted_at=None).count() if prefix else 0
    if others:
        return f"None of its own among the {formatting.plural(others, 'file')} of the {name}."
    match item.state:
        case Item.State.MISSING:
            return f"Missing: {item.why or f'nobody offered the {name}'}."
        case Item.State.NOT_APPLICABLE:
            return f"Does not apply: {item.why}."
        case Item.State.SEALED:
            return f"What was sealed of the {name} was deleted after its date."
    if item.silent_since is not None:
        return f"Not here yet: its source is silent since {item.silent_since:%H:%M:%S} UTC. {item.why}"
    return f"Not here yet: {item.why or f'the {name} are being collected'}."


def note(kept: Kept, *, dossier: Dossier, person: Person) -> None:
    """Record in the dossier's custody that a person read lines of a file."""
    path = f"{kept.item.kind}/{kept.path}"
    actions.note_access(dossier=dossier, person=person, what=READ, object_sha256=kept.sha256, path=path)


def documents(kept: Kept) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of one per line, as far as the excerpt's bytes reach.

    A line that is no JSON object is left out: what was cut at the end is none.
    """
    for line in kept.at(0, MOST_BYTES).split(b"\n"):
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict):
            yield one


def head(kept: Kept, count: int) -> Excerpt:
    """Return the first lines of a file."""
    lines = _lines(kept, 0, _AROUND_BYTES)
    return _excerpt(kept, lines[:count], None, "its first lines")


def around(kept: Kept, keys: dict[str, tuple[Key, float]], *, either_side: int = 50) -> Excerpt:
    """Return the lines around the first one that says at least a step or a time.

    A large file is searched by halves, which needs lines whose steps (or times) do not run backwards; a
    file whose lines say nothing of the kind is shown at its end, where a run that stopped wrote last.

    Args:
        keys: what to look for, by name and in order: what a line says, and the value wanted.
    """
    for name, (key, wanted) in keys.items():
        start = _search(kept, key, wanted)
        if start is None:
            continue
        lines = _lines(kept, start, max(_WHOLE_BYTES, 2 * _AROUND_BYTES))
        mark = next(
            (n for n, line in enumerate(lines) if (value := key(line)) is not None and value >= wanted), None
        )
        if mark is not None:
            first = max(0, mark - either_side)
            return _excerpt(kept, lines[first : mark + either_side + 1], mark - first, name)
    lines = _lines(kept, max(0, kept.bytes_total - _AROUND_BYTES), _AROUND_BYTES)
    return _excerpt(
        kept, lines[-2 * either_side :], None, "the end: no line of it names the step or the time"
    )


def _search(kept: Kept, key: Key, wanted: float) -> int | None:
    """Return from where to read to have the wanted line and those before it, None when no line says."""
    if kept.bytes_total <= _WHOLE_BYTES:
        return 0
    low, high, said = 0, kept.bytes_total, False
    while high - low > _AROUND_BYTES and kept.bytes_read < MOST_BYTES // 2:
        middle = (low + high) // 2
        values = [value for line in _lines(kept, middle, _PROBE_BYTES) if (value := key(line)) is not None]
        if not values:
            break
        said = True
        low, high = (low, middle) if values[0] >= wanted else (middle, high)
    return max(0, low - _AROUND_BYTES) if said else None


def _lines(kept: Kept, start: int, count: int) -> list[str]:
    """Return whole lines from `start` on, inert, and masked where they were not when they were stored."""
    raw = kept.at(start, count)
    lines = raw.split(b"\n")
    if start:
        lines = lines[1:]  # its beginning is not in
    if start + len(raw) < kept.bytes_total:
        lines = lines[:-1]
    elif lines and not lines[-1]:
        lines.pop()
    if not kept.sealed:
        lines = b"".join(mask_lines(line + b"\n" for line in lines)).split(b"\n")[: len(lines)]
    return [formatting.inert(line.decode("utf-8", "replace").expandtabs(4), _LINE_CHARS) for line in lines]


def _excerpt(kept: Kept, lines: list[str], mark: int | None, found_by: str) -> Excerpt:
    return Excerpt(lines, mark, found_by, kept.path, kept.sha256, kept.bytes_total, kept.bytes_read)
