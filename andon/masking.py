"""Masks secrets in what is kept as evidence: environment, command lines, logs, documents.

A value is replaced as a whole by `[masked]`, without a digest: a digest of a short secret is the
secret to whoever guesses well. Counts that training calls tokens ("tokens": 4096, "tokens/s") stay.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MASK = "[masked]"

# Names whose values are secrets. `token` only in the singular, and never with a plain number.
_WORDS = (
    r"secret|passw(?:or)?d|passwd|passphrase|pwd|credentials?|api[_-]?key|apikey|access[_-]?key(?:[_-]?id)?|"
    r"private[_-]?key|signing[_-]?key|secret[_-]?key|account[_-]?key|encryption[_-]?key|auth[_-]?key|"
    r"token|bearer|authorization|cookie|session[_-]?id|dsn|connection[_-]?string|webhook[_-]?url|sas"
)
_NAME = re.compile(rf"(?:^|[_\-.\s]|(?<=[a-z])(?=[A-Z]))(?:{_WORDS})$", re.IGNORECASE)
_NOT_SECRET = re.compile(
    r"(?:pad|eos|bos|unk|cls|sep|mask|special|num|max|min|per|next|first|last)[_-]?token$", re.IGNORECASE
)
_NOTHING = re.compile(r"^(?:true|false|none|null|)$", re.IGNORECASE)
_NUMBER = re.compile(r"^[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?$", re.IGNORECASE)

# A text without any of these holds no secret that is known here; most lines of a log end at this.
_HINTS = (
    *("secret", "passw", "passphrase", "pwd", "credential", "key", "auth", "token", "bearer", "cookie"),
    *(
        "session",
        "dsn",
        "connection",
        "webhook",
        "sas",
        "basic",
        "://",
        "?",
        "&",
        "-----begin",
        "whsec",
        "whsk",
    ),
    *("akia", "asia", "aroa", "aida", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    *("xox", "sk-", "pypi", "npm", "aiza", "ya29", "eyj"),
)

# Shapes that are secrets wherever they stand.
_SHAPES = [
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b"),
    re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"),
    re.compile(r"\b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{30,}\b"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{30,}\b"),
    re.compile(r"\bglpat-[A-Za-z0-9_\-]{16,}"),
    re.compile(r"\bxox[abeoprs]-[A-Za-z0-9\-]{10,}"),
    re.compile(r"\bsk-[A-Za-z0-9_\-]{20,}"),
    re.compile(r"\b(?:pypi|npm)[-_][A-Za-z0-9_\-]{30,}"),
    re.compile(r"\bAIza[A-Za-z0-9_\-]{30,}"),
    re.compile(r"\bya29\.[A-Za-z0-9_\-]{20,}"),
    re.compile(r"\bwhs(?:ec|k)_[A-Za-z0-9+/=]{16,}"),
    re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?"),  # a JWT
    re.compile(r"https://hooks\.slack\.com/services/[A-Za-z0-9/]+"),
]
_URL_PASSWORD = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.\-]*://[^\s/:@'\"]*):(?P<secret>[^\s/@'\"]+)@", re.IGNORECASE
)
_SCHEME_VALUE = re.compile(
    r"\b(?P<before>(?:Bearer|Basic|Token)\s+)(?P<secret>[A-Za-z0-9._~+/=\-]{8,})", re.IGNORECASE
)
_QUERY = re.compile(
    r"(?P<before>[?&](?:X-Amz-(?:Signature|Credential|Security-Token)|sig|signature|access_token|token|api_key|key)=)"
    r"(?P<secret>[^&\s'\"]+)",
    re.IGNORECASE,
)
# name=value, name: value, "name": "value", --name value; the value may be quoted.
_ASSIGNED = re.compile(
    rf"(?P<before>(?P<name>(?<![A-Za-z0-9])[A-Za-z0-9_.\-]{{0,64}}?(?:{_WORDS}))['\"]?\s*(?:=>|=|:)\s*)"
    r"(?P<secret>\[masked\]|\"[^\"\n]*\"|'[^'\n]*'|[^\s,;'\"&}\])]+)",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"(?P<before>(?P<name>--?[A-Za-z0-9_.\-]{{0,64}}?(?:{_WORDS}))\s+)(?P<secret>\[masked\]|\"[^\"\n]*\"|'[^'\n]*'|[^\s\-][^\s]*)",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable, option or field of this name holds a secret."""
    bare = name.strip().lstrip("-")
    return bool(_NAME.search(bare)) and not _NOT_SECRET.search(bare)


def _is_harmless(name: str, value: str) -> bool:
    """A switch or nothing is no secret; a number is one unless it counts tokens."""
    return bool(_NOTHING.match(value)) or (name.lower().endswith("token") and bool(_NUMBER.match(value)))


def mask_text(text: str) -> str:
    """Return `text` with every secret replaced by `[masked]`."""
    lowered = text.lower().replace("tokens", "")  # counted in many a training line, and never a secret's name
    if not any(hint in lowered for hint in _HINTS):  # ten times as fast as one pattern of all of them
        return text
    for shape in _SHAPES:
        text = shape.sub(MASK, text)
    text = _URL_PASSWORD.sub(lambda found: f"{found['before']}:{MASK}@", text)
    text = _QUERY.sub(lambda found: found["before"] + MASK, text)
    text = _SCHEME_VALUE.sub(lambda found: found["before"] + MASK, text)
    text = _ASSIGNED.sub(_assigned, text)
    return _OPTION.sub(_assigned, text)


def _assigned(found: re.Match[str]) -> str:
    value = found["secret"]
    quote = value[0] if value[:1] in {'"', "'"} else ""
    bare = value.strip("\"'")
    if (
        bare == MASK
        or bare.startswith(MASK)
        or _is_harmless(found["name"], bare)
        or not is_secret_name(found["name"])
    ):
        return found[0]
    if bare.lower() in {"bearer", "basic", "token"}:  # "Authorization: Bearer [masked]" is masked already
        return found[0]
    return f"{found['before']}{quote}{MASK}{quote}"


def mask_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with secret values masked; names stay."""
    return {
        name: MASK if is_secret_name(name) and not _is_harmless(name, value) else mask_text(value)
        for name, value in variables.items()
    }


def mask_command(words: Iterable[str]) -> list[str]:
    """Return a command line with secret values masked, also where the value is a word of its own."""
    masked: list[str] = []
    option = ""
    for word in words:
        if option and not word.startswith("-"):
            masked.append(word if _is_harmless(option, word) else MASK)
            option = ""
            continue
        masked.append(mask_text(word))
        option = word if word.startswith("-") and "=" not in word and is_secret_name(word) else ""
    return masked


def mask_value(value: Any, name: str = "") -> Any:
    """Return JSON-like data with secret strings masked, by the name of their field or by their shape."""
    if isinstance(value, str):
        if name and is_secret_name(name) and not _is_harmless(name, value):
            return MASK
        return mask_text(value)
    if isinstance(value, Mapping):
        return {key: mask_value(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        if value and all(isinstance(one, str) for one in value):
            return mask_command(value) if not is_secret_name(name) else [MASK for _ in value]
        return [mask_value(one, name) for one in value]
    return value


# A key block is longer than any line; more than this without an end is no key.
_BLOCK_LINES = 200
_LINE_LIMIT = 1 << 20


def mask_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Mask a log line by line (bytes, each with its line end); a private key over several lines is one mask.

    Bytes that are not UTF-8 are kept as they are.
    """
    in_key = 0
    for raw in lines:
        text = raw.decode("utf-8", "surrogateescape")
        if in_key:
            in_key = 0 if "-----END" in text or in_key > _BLOCK_LINES else in_key + 1
            continue
        if "-----BEGIN" in text and "PRIVATE KEY-----" in text and "-----END" not in text:
            in_key = 1
        yield mask_text(text).encode("utf-8", "surrogateescape")
        if in_key and not raw.endswith(b"\n"):
            in_key = 0


def read_lines(file: Any, limit: int) -> Iterator[bytes]:
    """Yield at most `limit` bytes of a binary stream as lines; a longer line than 1 MiB is cut in pieces."""
    left = limit
    while left > 0:
        line: bytes = file.readline(min(left, _LINE_LIMIT))
        if not line:
            return
        left -= len(line)
        yield line
