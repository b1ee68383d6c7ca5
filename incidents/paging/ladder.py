"""The operator's file: over which channels people are paged, in which steps, and who is on call.

One TOML file (`ANDON_PAGING_FILE`), because addresses of channels are secrets that belong beside the
other secrets, and because the dead-man's page must know them with the database down. Read again whenever
it changes; a file that cannot be read leaves the last good one in force and says so.
"""

import logging
import re
import tomllib
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from django.conf import settings

from andon.signing import sign_webhook

log = logging.getLogger(__name__)

ON_CALL = "on-call"  # in a step: all channels of whoever has the pager
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
Kind = Literal["apprise", "alertmanager", "webhook"]


class PagingError(Exception):
    """The file does not say what it should; the message names the place."""


class Channel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One way to reach people or a tool. `person`: it is theirs alone, and gets their own link."""

    name: str = ""  # filled from the table's name
    kind: Kind
    address: str = ""
    address_file: str = ""
    secret: str = ""
    secret_file: str = ""
    person: str = ""

    def __repr__(self) -> str:
        return f"Channel({self.name}, {self.kind})"  # never its address or secret


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """After so many minutes without an acknowledgement: these channels, all at once."""

    after_min: float
    channels: tuple[str, ...]


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who has the pager: people one after the other, each for `every_days`, from `starts` on."""

    people: tuple[str, ...]
    starts: datetime
    every_days: float = 7.0


class Ladder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one project pages by. `quiet`: channels for what holds no run; default: the first step's."""

    steps: tuple[Step, ...] = ()
    repeat_min: float | None = None  # the last step again, until somebody has it; 0 = never
    quiet: tuple[str, ...] = ()
    on_call: Rotation | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    channels: dict[str, Channel] = {}
    steps: tuple[Step, ...] = ()
    repeat_min: float = 15.0
    quiet: tuple[str, ...] = ()
    on_call: Rotation | None = None
    projects: dict[str, Ladder] = {}


class Paging(msgspec.Struct, frozen=True):
    """The whole file, checked. `why` is what is wrong with the newest one, "" when it is in force."""

    channels: dict[str, Channel]
    default: Ladder
    projects: dict[str, Ladder]
    why: str = ""

    def ladder(self, project: str) -> Ladder:
        """Return the ladder of a project: what it does not say itself is the file's."""
        own = self.projects.get(project)
        if own is None:
            return self.default
        return Ladder(
            steps=own.steps or self.default.steps,
            repeat_min=self.default.repeat_min if own.repeat_min is None else own.repeat_min,
            quiet=own.quiet or self.default.quiet,
            on_call=own.on_call or self.default.on_call,
        )

    def of_person(self, username: str) -> list[str]:
        """Return the names of a person's own channels, in the file's order."""
        return [name for name, one in self.channels.items() if username and one.person == username]


_NOBODY = Paging({}, Ladder(), {}, "ANDON_PAGING_FILE is not set: nobody is paged")
_last_good: dict[str, Paging] = {}


def paging() -> Paging:
    """Return the file as it is now; the last good one, with what is wrong, when it cannot be read."""
    path = str(settings.PAGING_FILE)
    if not path:
        return _NOBODY
    try:
        _last_good[path] = read(path)
    except PagingError as error:
        log.error("paging: %s", error)
        known = _last_good.get(path, _NOBODY)
        return Paging(known.channels, known.default, known.projects, str(error))
    return _last_good[path]


def read(path: str) -> Paging:
    """Read and check a file; unchanged ones are read once.

    Raises:
        PagingError: it is not there, is no TOML, or says something that cannot be meant.
    """
    try:
        about = Path(path).stat()
    except OSError as error:
        raise PagingError(f"{path}: {error.strerror or error}") from error
    return _read(path, about.st_mtime_ns, about.st_ino)


@lru_cache(maxsize=2)
def _read(path: str, changed_ns: int, inode: int) -> Paging:
    try:
        document = tomllib.loads(Path(path).read_text("utf-8"))
        file = msgspec.convert(document, _File)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise PagingError(f"{path}: {error}") from error
    channels = {name: _channel(name, one, Path(path).parent) for name, one in file.channels.items()}
    default = Ladder(file.steps, file.repeat_min, file.quiet, file.on_call)
    _check("", default, channels)
    for slug, own in file.projects.items():
        _check(f"projects.{slug}: ", own, channels)
    return Paging(channels, default, file.projects)


def _channel(name: str, one: Channel, beside: Path) -> Channel:
    where = f"channels.{name}"
    if not _NAME.fullmatch(name) or name == ON_CALL:
        raise PagingError(f"{where}: a name is lower-case letters, digits, '-' and '_', and not {ON_CALL!r}")
    address = _given(where, "address", one.address, one.address_file, beside)
    secret = _given(where, "secret", one.secret, one.secret_file, beside) if one.kind == "webhook" else ""
    if one.kind != "webhook" and (one.secret or one.secret_file):
        raise PagingError(f"{where}: only a webhook has a secret")
    if one.kind != "apprise":
        try:
            parts = urlsplit(address)
            fits = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            fits = False
        if not fits:
            raise PagingError(f"{where}: address: expected http(s)://HOST[:PORT][/PATH]")
    if one.kind == "webhook":
        try:
            sign_webhook(secret, "check", 0, b"")
        except ValueError as error:
            raise PagingError(f"{where}: secret: {error}") from error
    return Channel(name=name, kind=one.kind, address=address, secret=secret, person=one.person)


def _given(where: str, what: str, value: str, file: str, beside: Path) -> str:
    if bool(value) == bool(file):
        raise PagingError(f"{where}: set one of {what} and {what}_file")
    if not file:
        return value
    try:
        text = (beside / file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PagingError(f"{where}: {what}_file: {error}") from error
    if not text:
        raise PagingError(f"{where}: {what}_file: the file is empty")
    return text


def _check(place: str, ladder: Ladder, channels: dict[str, Channel]) -> None:
    known = {*channels, ON_CALL}
    minutes = -1.0
    for number, step in enumerate(ladder.steps, start=1):
        if not step.channels:
            raise PagingError(f"{place}step {number}: names no channel")
        if not 0 <= step.after_min <= 24 * 60 or step.after_min < minutes:
            raise PagingError(f"{place}step {number}: after_min must rise, from 0 to a day")
        minutes = step.after_min
        for name in step.channels:
            if name not in known:
                raise PagingError(f"{place}step {number}: there is no channel {name!r}")
    for name in ladder.quiet:
        if name not in known:
            raise PagingError(f"{place}quiet: there is no channel {name!r}")
    if ladder.repeat_min and not 1 <= ladder.repeat_min <= 24 * 60:
        raise PagingError(f"{place}repeat_min must be 0 or 1 minute to a day")
    turns = ladder.on_call
    if turns is not None and (not turns.people or not 1 / 24 <= turns.every_days <= 365):
        raise PagingError(f"{place}on_call: needs people, and every_days from an hour to a year")


def utc(moment: datetime) -> datetime:
    """Return a time of the file; one without an offset is UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
