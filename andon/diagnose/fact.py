"""A fact that speaks: a plain sentence with the id of the row it came from."""

import msgspec


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is known.

    Attributes:
        id: of the row it came from.
        kind: key of `andon.diagnose.meaning.MEANING`.
        text: a plain sentence without its full stop.
        more: how many further rows say the same.
    """

    id: str
    kind: str
    text: str
    more: int = 0


def step_words(step: int | None) -> str:
    """Return "step 18,003"."""
    return "an unknown step" if step is None else f"step {step:,}"
