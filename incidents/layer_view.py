"""What a person asks to see of the layers: which number, of which replica, and whose lines below."""

from dataclasses import dataclass
from typing import Literal

from django.http import QueryDict

Shown = Literal["z", "norm", "ratio"]
MAX_LINES = 4
METRICS: dict[Shown, str] = {"z": "grad_norm", "norm": "grad_norm", "ratio": "update_ratio"}
WORDS: dict[Shown, str] = {
    "z": "z of gradient norm",
    "norm": "log of gradient norm",
    "ratio": "update ratio, log",
}


@dataclass(frozen=True, slots=True)
class LayerView:
    """The number shown, the replica (None: the worst of all), and the layers whose lines stand below."""

    shown: Shown = "z"
    replica: int | None = None
    lines: tuple[str, ...] = ()

    @property
    def metric(self) -> str:
        """The column of layer frames that is shown."""
        return METRICS[self.shown]

    def query(self) -> dict[str, str]:
        """Return what asks for the same heat map again."""
        asked: dict[str, str] = {} if self.shown == "z" else {"layers": self.shown}
        return asked if self.replica is None else asked | {"replica": str(self.replica)}


PLAIN = LayerView()


def layer_view(query: QueryDict) -> LayerView:
    """Read `?layers=norm&replica=3&line=layers.6.attn.qkv&line=…`; what cannot be read is the default."""
    shown: Shown = next((known for known in METRICS if known == query.get("layers")), "z")
    text = query.get("replica", "")
    replica = int(text) if text.isdecimal() and len(text) < 8 else None
    lines = tuple(dict.fromkeys(name for name in query.getlist("line") if 0 < len(name) <= 1_000))
    return LayerView(shown, replica, lines[:MAX_LINES])
