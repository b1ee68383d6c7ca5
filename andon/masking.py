"""Masks secrets in what is kept as evidence: environment, command lines, logs, documents.

A value is replaced as a whole by `[masked]`, without a digest: a digest of a short secret is the
secret to whoever guesses well. Counts that training calls tokens ("tokens": 4096, "tokens/s") stay.
What counts as a secret is in `andon.masking_patterns`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from andon import masking_patterns as looks

MASK = "[masked]"
# Programs, with the short options whose next word is a secret.
_SHORT_OPTIONS = {
    "sshpass": {"-p"},
    "docker": {"-p"},
    "podman": {"-p"},
    "nerdctl": {"-p"},
    "redis-cli": {"-a"},
    "curl": {"-u", "--user"},
}
_MYSQL = ("mysql", "mysqldump", "mysqladmin")


def is_secret_name(name: str) -> bool:
    """Return whether a variable, option or field of this name holds a secret."""
    bare = name.strip().lstrip("-")
    return bool(looks.NAME.search(bare)) and not looks.NOT_SECRET.search(bare)


def _is_secret(name: str, value: str) -> bool:
    """Return whether a value under this name must go; a "…_key" only when the value looks made by chance."""
    if is_secret_name(name):
        return not _is_harmless(name, value)
    bare = name.strip().lstrip("-")
    is_key = looks.KEY_NAME.search(bare) is not None and looks.NOT_KEY_NAME.search(bare) is None
    return is_key and looks.CHANCE.match(value) is not None


def _is_harmless(name: str, value: str) -> bool:
    """A switch or nothing is no secret; a number is one unless it counts tokens."""
    return bool(looks.NOTHING.match(value)) or (
        name.lower().endswith("token") and bool(looks.NUMBER.match(value))
    )


def mask_text(text: str) -> str:
    """Return `text` with every secret replaced by `[masked]`."""
    lowered = text.lower().replace("tokens", "")  # counted in many a training line, and never a secret's name
    if not any(hint in lowered for hint in looks.HINTS) and not looks.PGPASS.search(text):
        return text  # ten times as fast as one pattern of all of them
    for shape in looks.SHAPES:
        text = shape.sub(MASK, text)
    for place in looks.PLACES:
        text = place.sub(_placed, text)
    text = looks.WANDB_LINE.sub(lambda line: looks.WANDB_KEY.sub(MASK, line[0]), text)
    text = looks.SCHEME.sub(_scheme, text)
    text = looks.PAIR.sub(_assigned, text)
    text = looks.PAIR_TURNED.sub(_assigned, text)
    text = looks.ASSIGNED.sub(_assigned, text)
    return looks.OPTION.sub(_assigned, text)


def _placed(found: re.Match[str]) -> str:
    before, quote, bare = found["before"], *_unquoted(found["secret"])
    return found[0] if bare.startswith(MASK) else f"{before}{quote}{MASK}{quote}"


def _scheme(found: re.Match[str]) -> str:
    return found["before"] + MASK if looks.SCHEME_VALUE.search(found["secret"]) else found[0]


def _assigned(found: re.Match[str]) -> str:
    quote, bare = _unquoted(found["secret"])
    # "Authorization: Bearer [masked]" is masked already.
    if bare.startswith(MASK) or bare.lower() in {"bearer", "basic", "token"}:
        return found[0]
    if not _is_secret(found["name"], bare):
        return found[0]
    after = found.groupdict().get("after") or ""
    return f"{found['before']}{quote}{MASK}{quote}{after}"


def _unquoted(value: str) -> tuple[str, str]:
    """Return the quote of a value (with its backslashes, "" when there is none) and what it quotes."""
    found = re.match(r"\\*[\"']", value)
    if found is None or len(value) < 2 * len(found[0]) or not value.endswith(found[0]):
        return "", value
    return found[0], value[len(found[0]) : -len(found[0])]


def mask_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with secret values masked; names stay."""
    return {name: MASK if _is_secret(name, value) else mask_text(value) for name, value in variables.items()}


def mask_command(words: Iterable[str]) -> list[str]:
    """Return a command line with secret values masked, also where the value is a word of its own."""
    given = list(words)
    programs = {word.rpartition("/")[2] for word in given}
    short = {option for name in programs & _SHORT_OPTIONS.keys() for option in _SHORT_OPTIONS[name]}
    is_mysql = not programs.isdisjoint(_MYSQL)
    masked: list[str] = []
    option = ""
    for word in given:
        if option and not word.startswith("-"):
            masked.append(word if _is_harmless(option, word) else _of_option(option, word))
            option = ""
            continue
        if is_mysql and re.fullmatch(r"-p.+", word):
            masked.append(f"-p{MASK}")
            continue
        masked.append(mask_text(word))
        wants = word in short or ("=" not in word and is_secret_name(word))
        option = word if word.startswith("-") and wants else ""
    return masked


def _of_option(option: str, word: str) -> str:
    user, colon, _ = word.partition(":")
    return f"{user}:{MASK}" if option in {"-u", "--user"} and colon else MASK


def mask_value(value: Any, name: str = "") -> Any:
    """Return JSON-like data with secret strings masked, by the name of their field or by their shape."""
    if isinstance(value, str):
        if name and _is_secret(name, value):
            return MASK
        if name in {"auth", "_auth"} and re.fullmatch(r"[A-Za-z0-9+/=]{16,}", value):
            return MASK  # a registry's user and password in base64
        return mask_text(value)
    if isinstance(value, Mapping):
        named = value.get("name", value.get("key"))  # {"name": "WANDB_API_KEY", "value": …}
        return {
            key: mask_value(one, named if key == "value" and isinstance(named, str) else str(key))
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return _mask_list(value, name)
    # A number under a secret's name is a secret as well, unless it counts tokens or switches something.
    if isinstance(value, int | float) and not isinstance(value, bool) and name and is_secret_name(name):
        return value if _is_harmless(name, str(value)) else MASK
    return value


def _mask_list(value: Sequence[Any], name: str) -> list[Any]:
    if value and all(isinstance(one, str) for one in value):
        if is_secret_name(name):
            return [MASK for _ in value]
        if any(looks.KEY_BEGINS.search(one) or looks.NAME_LINE.search(one) for one in value):
            # Lines of a text, with a secret over several of them.
            raw = mask_lines(f"{one}\n".encode("utf-8", "surrogatepass") for one in value)
            value = [line.decode("utf-8", "surrogatepass").removesuffix("\n") for line in raw]
        return mask_command(value)
    return [mask_value(one, name) for one in value]


# A key block is longer than any line; more than this without an end is no key.
_BLOCK_LINES = 200
_LINE_LIMIT = 1 << 20
_LOOK_BACK = 64 << 10


def mask_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Mask a log line by line (bytes, each with its line end); a private key over several lines is one mask.

    A log that begins in the middle of a key loses what there is of it. Bytes that are not UTF-8 are kept.
    """
    in_key, named = 0, ""
    held: list[bytes] | None = []  # lines at the start that may be the end of a key
    for raw in lines:
        text = raw.decode("utf-8", "surrogateescape")
        if held is not None:
            if looks.KEY_LINE.match(text) and len(held) < _BLOCK_LINES:
                held.append(raw)
                continue
            if held and looks.KEY_ENDS.search(text):
                held, text = [], f"{MASK}\n"
            yield from map(_mask_bytes, held)
            held = None
        if in_key:
            in_key = 0 if looks.KEY_ENDS.search(text) or in_key > _BLOCK_LINES else in_key + 1
            continue
        if looks.KEY_BEGINS.search(text) and not looks.KEY_ENDS.search(text):
            in_key = 1
        found = looks.VALUE_LINE.match(text) if named else None
        if found is not None and _is_secret(named, _unquoted(found["secret"])[1]):
            text = f"{found['before']}{MASK}{text[found.end() :]}"
        line = looks.NAME_LINE.search(text)
        named = line["name"] if line is not None else ""
        yield mask_text(text).encode("utf-8", "surrogateescape")
        if in_key and not raw.endswith(b"\n"):
            in_key = 0
    yield from map(_mask_bytes, held or ())


def _mask_bytes(line: bytes) -> bytes:
    return mask_text(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def read_lines(file: Any, limit: int, *, is_cut: bool = False) -> Iterator[bytes]:
    """Yield at most `limit` bytes of a binary stream as lines.

    A line longer than 1 MiB is cut in pieces, each at white space or a comma where there is one, so that
    no word is in two of them.

    Args:
        is_cut: the stream begins anywhere in a file: its first word, which may be half a secret, is left out.
    """
    left, rest = limit, b""
    while left > 0:
        read: bytes = file.readline(min(left, _LINE_LIMIT))
        if not read:
            break
        left -= len(read)
        line, rest = rest + read, b""
        if is_cut:
            line, is_cut = re.sub(rb"^\S+", b"", line), False
        if not line.endswith(b"\n") and len(read) == _LINE_LIMIT:
            near = line[-_LOOK_BACK:]
            at = max(near.rfind(mark) for mark in (b" ", b",", b"\t", b"\r", b";"))
            keep = len(near) - at - 1 if at >= 0 else 0
            line, rest = line[: len(line) - keep], line[len(line) - keep :] if keep else b""
        yield line
    if rest:
        yield rest
