"""Recordings: what a training run truly posted, in one file that can be replayed anywhere.

A recording is a .zip of

- `recording.json`: what was run, where, with which versions, and the right answer (`Description`);
- `posts.jsonl`: one post a line, in the order of emission: `t_s` since its attempt began, attempt,
  kind (event | frame), node, and the body in the wire's JSON form;
- `run/…`: files of the run directory that posts point to by `recording:///` URIs: checkpoints,
  rank logs, configuration. Log lines begin with the same `t_s`, so a replay can let them grow.

Nothing else is needed to read it than this module and `andon.wire`.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from andon.wire import Frame, decode_frame, encode_events, encode_frame_json

SCHEMA = "andon.recording/1"
DESCRIPTION, POSTS, FILES = "recording.json", "posts.jsonl", "run/"
URI_BASE = "recording:///"
MAX_FILE_BYTES = 8 * 1024 * 1024  # it lies in the repository
MAX_LINE_BYTES = 4 * 1024 * 1024


class RecordingError(ValueError):
    """A file is no recording this version can read; the text says what is wrong where."""


class Post(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One post as emitted. `body` is a list of events, or a frame in JSON form."""

    t_s: float
    attempt: int
    kind: Literal["event", "frame"]
    node: str
    body: Any

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of an event post."""
        return self.body if isinstance(self.body, list) else [self.body]

    def frame(self) -> Frame:
        """Return the frame of a frame post."""
        return decode_frame(msgspec.json.encode(self.body), "application/json")


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the run. `logical`: a name for some ranks of one host, not a machine."""

    node: str
    ranks: tuple[int, ...]
    logical: bool = True


class Skip(msgspec.Struct, frozen=True, kw_only=True):
    """A window of absolute sample positions, half open."""

    start: int
    stop: int


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorded next attempt began from; a permit must say the same to be played.

    `positions` are those of the checkpoint, `digest` its file-list digest, and `first_position` the
    sample the next attempt read first.
    """

    attempt: int
    checkpoint_step: int
    digest: str
    positions: dict[str, int]
    skip: Skip | None
    first_position: int


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded attempt."""

    attempt: int
    first_step: int
    last_step: int
    seconds: float
    posts: int


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording says of itself.

    Attributes:
        script: version and SHA-256 per file of the code that made it.
        policy: overrides on the default policy under which its answer holds.
        answer: the ground truth, known because the fault was placed on purpose.
    """

    name: str
    title: str
    recorded_at: str
    script: dict[str, Any]
    command: str
    versions: dict[str, str]
    world_size: int
    nodes: tuple[Node, ...]
    note: str
    policy: dict[str, Any]
    answer: dict[str, Any]
    attempts: tuple[Attempt, ...]
    continuation: Continuation | None = None
    schema: str = SCHEMA

    def node_of(self, rank: int) -> str:
        """Return the node a rank belongs to."""
        return next(node.node for node in self.nodes if rank in node.ranks)


class Recorder:
    """An `andon.outbox.Sender` that keeps posts in a file instead of sending them.

    Arguments:
        path: one file per node; `pack` joins them.
        began_ns: when the attempt began; all nodes of an attempt use the same.
    """

    def __init__(self, path: Path, *, node: str, attempt: int, clock: Any, began_ns: int) -> None:
        self.node = node
        self.attempt = attempt
        self._clock = clock
        self._began_ns = began_ns
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")

    @property
    def directive(self) -> None:
        """A recording has no server, so no directive."""
        return None

    def send_events(self, events: list[dict[str, Any]], /) -> None:
        """Keep events, nonfinite numbers spelled as the wire does."""
        body = msgspec.json.decode(encode_events(events))
        self._write("event", body if isinstance(body, list) else [body])

    def send_frame(self, frame: Frame, /) -> None:
        """Keep a frame in the wire's JSON form."""
        self._write("frame", msgspec.json.decode(encode_frame_json(frame)))

    def _write(self, kind: Literal["event", "frame"], body: Any) -> None:
        t_s = round((self._clock() - self._began_ns) / 1e9, 3)
        post = Post(t_s=t_s, attempt=self.attempt, kind=kind, node=self.node, body=body)
        self._file.write(msgspec.json.encode(post) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Recording:
    """A recording opened for reading.

    Raises:
        RecordingError: it is not a zip, or its description cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            raw = self._zip.read(DESCRIPTION)
        except FileNotFoundError as error:
            raise RecordingError(f"{path}: no such file") from error
        except (zipfile.BadZipFile, KeyError) as error:
            raise RecordingError(f"{path}: not a recording ({error})") from error
        try:
            self.description = msgspec.json.decode(raw, type=Description)
        except msgspec.DecodeError as error:
            raise RecordingError(f"{path}: {DESCRIPTION}: {error}") from error
        if self.description.schema != SCHEMA:
            raise RecordingError(f"{path}: schema {self.description.schema!r}, this version reads {SCHEMA!r}")

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    def posts(self, attempt: int | None = None) -> Iterator[Post]:
        """Yield the posts in order of emission, of one attempt or of all.

        Raises:
            RecordingError: a line is too long or no post; the line is named.
        """
        with self._zip.open(POSTS) as lines:
            number = 0
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise RecordingError(f"{self.path}: {POSTS} line {number}: above {MAX_LINE_BYTES} bytes")
                try:
                    post = msgspec.json.decode(line, type=Post)
                except msgspec.DecodeError as error:
                    raise RecordingError(f"{self.path}: {POSTS} line {number}: {error}") from error
                if attempt in (None, post.attempt):
                    yield post

    def files(self, prefix: str = "") -> list[str]:
        """Return the run-relative paths of the stored files that begin with `prefix`."""
        names = (name.removeprefix(FILES) for name in self._zip.namelist() if name.startswith(FILES))
        return sorted(name for name in names if name.startswith(prefix) and not name.endswith("/"))

    def read(self, path: str) -> bytes:
        """Return one file of the run directory."""
        return self._zip.read(FILES + path)

    def extract(self, path: str, root: Path) -> Path:
        """Write one file under `root`, at its run-relative path.

        Raises:
            RecordingError: the path would leave `root`.
        """
        target = (root / path).resolve()
        if not target.is_relative_to(root.resolve()):
            raise RecordingError(f"{self.path}: {path!r} points outside the run directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.read(path))
        return target

    def log_lines(self, path: str) -> list[tuple[float, str]]:
        """Return (t_s, line with its newline) of a log; a line without a time belongs to the one before."""
        rows: list[tuple[float, str]] = []
        at_s = 0.0
        for line in self.read(path).decode("utf-8", "replace").splitlines(keepends=True):
            with suppress(ValueError, IndexError):
                at_s = float(line.split(maxsplit=1)[0])
            rows.append((at_s, line))
        return rows


def pack(
    path: Path,
    description: Description,
    *,
    run_directory: Path,
    posts: Mapping[int, list[Path]],
    files: list[Path],
) -> int:
    """Write a recording and return its size in bytes.

    Arguments:
        run_directory: `file://` URIs below it become `recording:///` URIs.
        posts: per attempt, the recorders' files, one a node; joined by time.
        files: what to keep of the run directory.

    Raises:
        RecordingError: it would be larger than MAX_FILE_BYTES; the file is removed.
    """
    base = (run_directory.resolve().as_uri() + "/").encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(DESCRIPTION, json.dumps(msgspec.to_builtins(description), indent=1) + "\n")
        lines: list[bytes] = []
        for attempt in sorted(posts):
            own: list[tuple[float, bytes]] = []
            for source in posts[attempt]:
                own += [
                    (msgspec.json.decode(line, type=Post).t_s, line)
                    for line in source.read_bytes().splitlines(keepends=True)
                ]
            # Stable: of two posts with one time, those of one node keep their order.
            lines += [
                line.replace(base, URI_BASE.encode()) for _, line in sorted(own, key=lambda row: row[0])
            ]
        archive.writestr(POSTS, b"".join(lines))
        for file in sorted(files):
            archive.write(file, FILES + file.relative_to(run_directory).as_posix())
    size_bytes = path.stat().st_size
    if size_bytes > MAX_FILE_BYTES:
        path.unlink()
        raise RecordingError(f"{path}: {size_bytes} bytes, a recording may have {MAX_FILE_BYTES}")
    return size_bytes


def script_digest(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return SHA-256 per file and one over all, to tell whether the code that recorded has changed."""
    hashes = {name: hashlib.sha256(body).hexdigest() for name, body in sorted(files.items())}
    joined = "".join(f"{name} {digest}\n" for name, digest in hashes.items())
    return {"files": hashes, "digest": hashlib.sha256(joined.encode()).hexdigest()}
