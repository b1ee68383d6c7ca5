"""What secrets look like: names whose values are secret, shapes of tokens, and commands that take one."""

import re

# Names whose values are secrets. `token` only in the singular, and never with a plain number.
WORDS = (
    r"secret(?:[_-]?id)?|passw(?:or)?d|passwd|passphrase|pwd|pw|credentials?|api[_-]?key|apikey|"
    r"access[_-]?key(?:[_-]?id)?|private[_-]?key(?:[_-]?id)?|signing[_-]?key|secret[_-]?key|account[_-]?key|"
    r"encryption[_-]?key|auth[_-]?key|routing[_-]?key|app[_-]?key|license[_-]?key|ssh[_-]?key|munge[_-]?key|"
    r"token|bearer|authorization|cookie|session[_-]?id|dsn|connection[_-]?string|webhook[_-]?url|sas|_auth"
)
NAME = re.compile(rf"(?:^|[_\-.\s]|(?<=[a-z])(?=[A-Z]))(?:{WORDS})$", re.IGNORECASE)
NOT_SECRET = re.compile(
    r"(?:pad|eos|bos|unk|cls|sep|mask|special|num|max|min|per|next|first|last)[_-]?token$", re.IGNORECASE
)
# Any other "…_key" is one when its value looks made by chance. These name what lies somewhere, or a sum.
KEY_NAME = re.compile(r"[A-Za-z0-9](?:[_-]key|(?<=[a-z])Key)$|^[A-Z0-9_]+_KEY$")
NOT_KEY_NAME = re.compile(
    r"(?:cache|dedup\w*|sort|object|partition|primary|foreign|group|row|idempotency|public|shard|store|s3)[_-]?key$",
    re.IGNORECASE,
)
CHANCE = re.compile(r"^(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/=_\-]{16,}$")
NOTHING = re.compile(r"^(?:true|false|none|null|)$", re.IGNORECASE)
NUMBER = re.compile(r"^[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?$", re.IGNORECASE)

# A text without any of these holds no secret that is known here; most lines of a log end at this.
HINTS = (
    *("secret", "passw", "passphrase", "pwd", "pw=", "credential", "key", "auth", "token", "bearer"),
    *("cookie", "session", "dsn", "connection", "webhook", "sas", "basic", "://", "?", "&", "signature="),
    *("-----begin", "-----end", "whsec", "whsk", "akia", "asia", "aroa", "aida", "aiza", "ya29", "gocspx-"),
    *("hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "xapp-", "nvapi-"),
    *("hvs.", "sk-", "sk_live", "rk_live", "sk_test", "pypi", "npm", "eyj", "sg.", "wandb", "sshpass"),
    *("docker", "podman", "mysql", "redis-cli", "curl", "wget"),
)
PGPASS = re.compile(
    r"^(?P<before>[\w.\-*]+:(?:\d+|\*):[A-Za-z_*][\w\-]*:[A-Za-z_*][\w\-]*:)(?P<secret>\S+)", re.M
)

KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
KEY_ENDS = re.compile(r"-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
KEY_LINE = re.compile(r"^[A-Za-z0-9+/=]{16,}\s*$")

# Shapes that are secrets wherever they stand.
SHAPES = [
    re.compile(rf"{KEY_BEGINS.pattern}.*?(?:{KEY_ENDS.pattern}|\Z)", re.DOTALL),
    re.compile(r"\bAGE-SECRET-KEY-1[A-Z0-9]{20,}"),
    re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b"),
    re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"),
    re.compile(r"\b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{30,}\b"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{30,}\b"),
    re.compile(r"\bglpat-[A-Za-z0-9_\-]{16,}"),
    re.compile(r"\bxox[abeoprs]-[A-Za-z0-9\-]{10,}"),
    re.compile(r"\bxapp-[A-Za-z0-9\-]{20,}"),
    re.compile(r"\bsk-[A-Za-z0-9_\-]{20,}"),
    re.compile(r"\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"),
    re.compile(r"\b(?:pypi|npm)[-_][A-Za-z0-9_\-]{30,}"),
    re.compile(r"\bnvapi-[A-Za-z0-9_\-]{20,}"),
    re.compile(r"\bhvs\.[A-Za-z0-9_\-]{20,}"),
    re.compile(r"\bSG\.[A-Za-z0-9_\-]{16,}\.[A-Za-z0-9_\-]{16,}"),
    re.compile(r"\bAIza[A-Za-z0-9_\-]{30,}"),
    re.compile(r"\bGOCSPX-[A-Za-z0-9_\-]{16,}"),
    re.compile(r"\bya29\.[A-Za-z0-9_\-]{20,}"),
    re.compile(r"\bwhs(?:ec|k)_[A-Za-z0-9+/=]{16,}"),
    re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?"),  # a JWT
    re.compile(r"https://hooks\.slack\.com/[a-z]+/[A-Za-z0-9/]+"),
    re.compile(r"https://[\w.\-]+/(?:api/)?webhooks?/[A-Za-z0-9/_@\-]{16,}"),
]

# A value: quoted (also in JSON within a string), else up to what separates.
_QUOTED = r"\\*\"(?:[^\"\\\n]|\\.)*\\*\"|'(?:[^'\\\n]|\\.|'')*'"
_VALUE = rf"{_QUOTED}|[^\s,;'\"&}}\])]+"
_WORD = rf"{_QUOTED}|[^\s|;&'\"]+"
MASKED = r"\[masked\]"

# Each has `before`, which stays, and `secret`, which goes.
PLACES = [
    re.compile(
        r"(?P<before>\b[a-z][a-z0-9+.\-]{0,20}://[^\s/:@'\"]{0,200}:)(?!\d{1,5}/)"
        r"(?P<secret>[^\s'\"]{1,400})(?=@)",
        re.IGNORECASE,
    ),
    re.compile(
        r"(?P<before>[?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|sig|signature|access_token|"
        r"token|api_key|key)=)(?P<secret>[^&\s'\"]+)",
        re.IGNORECASE,
    ),
    re.compile(r"(?P<before>\bSignature=)(?P<secret>[A-Za-z0-9%+/=_\-]{16,})", re.IGNORECASE),
    re.compile(r"(?P<before>['\"]_?auth\\*['\"]\s*:\s*\\*['\"])(?P<secret>[A-Za-z0-9+/=]{16,})"),
    re.compile(r"(?P<before>\bmachine\s+\S+\s+login\s+\S+\s+password\s+)(?P<secret>\S+)"),
    re.compile(r"(?P<before>^[ \t]*password[ \t]+)(?P<secret>\S+)(?=[ \t]*\r?$)", re.M),
    PGPASS,
    # The password is …: a quoted value, or one with a digit in it.
    re.compile(
        r"(?P<before>\b(?:password|passphrase)\s+is\s+)"
        rf"(?P<secret>{_QUOTED}|(?=[^\s\d]{{0,100}}\d)[^\s,;'\"]{{0,100}}[^\s,;'\".])",
        re.IGNORECASE,
    ),
    re.compile(
        r"(?P<before>\b[\w\-]*(?:token|secret|key)\s+is\s+)['\"]?(?P<secret>(?=[A-Za-z_\-]{0,100}\d)[\w+/=\-]{16,})",
        re.IGNORECASE,
    ),
    # Commands with a secret behind a short option.
    re.compile(
        rf"(?P<before>\b(?:docker|podman|nerdctl)\s+login\b[^\n|]{{0,400}}?\s-p[ =]?)(?P<secret>{_WORD})"
    ),
    re.compile(rf"(?P<before>\bsshpass\s+-p[ ]?)(?P<secret>{_WORD})"),
    re.compile(rf"(?P<before>\bmysql(?:dump|admin)?\b[^\n|]{{0,400}}?\s-p)(?P<secret>{_WORD})"),
    re.compile(rf"(?P<before>\bredis-cli\b[^\n|]{{0,400}}?\s-a\s+)(?P<secret>{_WORD})"),
    re.compile(
        r"(?P<before>\b(?:curl|wget)\b[^\n|]{0,400}?\s(?:-u|--user)[ =]?['\"]?[^\s:'\"]+:)"
        r"(?P<secret>[^\s'\"]+)"
    ),
    re.compile(rf"(?P<before>\becho\s+(?:-n\s+)?)(?P<secret>{_WORD})(?=\s*\|[^\n]{{0,400}}--password-stdin)"),
]
# Its keys have no mark of their own and look like any SHA-1: only in lines about a login or a key.
WANDB_LINE = re.compile(r"^(?=.*wandb)(?=.*(?:login|key|netrc)).*$", re.M | re.I)
WANDB_KEY = re.compile(r"\b[0-9a-f]{40}\b")
# Authorization schemes; a word of prose after "basic" is none.
SCHEME = re.compile(
    r"\b(?P<before>(?:Bearer|Basic|Token)\s+)(?P<secret>[A-Za-z0-9._~+/=\-]{8,})", re.IGNORECASE
)
SCHEME_VALUE = re.compile(r"\d|=|.[A-Z]")
# name=value, name: value, "name": "value"; the value may be quoted.
ASSIGNED = re.compile(
    rf"(?P<before>(?<![A-Za-z0-9_.\-])(?P<name>[A-Za-z0-9_.\-]{{0,200}}(?:{WORDS}|key))"
    r"\\*['\"]?\s*(?:=>|=|:)\s*)"
    rf"(?P<secret>{MASKED}|{_VALUE})",
    re.IGNORECASE,
)
OPTION = re.compile(
    rf"(?P<before>(?P<name>--?[A-Za-z0-9_.\-]{{0,64}}?(?:{WORDS}))\s+)"
    rf"(?P<secret>{MASKED}|{_QUOTED}|[^\s\-][^\s]*)",
    re.IGNORECASE,
)
# A pair whose name is a value: Kubernetes' env, JSON lists, XML attributes.
PAIR = re.compile(
    r"(?P<before>\b(?:name|key)\\*[\"']?\s*[:=]\s*\\*[\"']?(?P<name>[\w.\-]+)\\*[\"']?[\s,]+\\*[\"']?"
    rf"value\\*[\"']?\s*[:=]\s*)(?P<secret>{MASKED}|{_VALUE})",
    re.IGNORECASE,
)
PAIR_TURNED = re.compile(
    rf"(?P<before>\bvalue\\*[\"']?\s*[:=]\s*)(?P<secret>{MASKED}|{_VALUE})"
    r"(?P<after>[\s,]+\\*[\"']?(?:name|key)\\*[\"']?\s*[:=]\s*\\*[\"']?(?P<name>[\w.\-]+))",
    re.IGNORECASE,
)
# The first half of such a pair at the end of a line, the second on the next one.
NAME_LINE = re.compile(r"\b(?:name|key)[\"']?\s*[:=]\s*[\"']?(?P<name>[\w.\-]+)[\"']?,?\s*$", re.IGNORECASE)
VALUE_LINE = re.compile(rf"^(?P<before>\s*[\"']?value[\"']?\s*[:=]\s*)(?P<secret>{MASKED}|{_VALUE})", re.I)
