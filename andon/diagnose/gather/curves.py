"""What the curves did before it: gradient norm, loss, learning rate, loss scale."""

from itertools import pairwise
from statistics import median

from andon.diagnose.fact import Fact, step_words
from andon.diagnose.record import Posted, Record

_RECENT = 10  # steps before the first bad one: the playbook's published case crept over 10
_NEEDED = 20  # steps of baseline before those
_CREPT = 3.0  # above this ratio to the baseline, and rising on most of the recent steps, it crept
_STEADY = 2.0  # below this ratio throughout the recent steps, it did not
_LR_JUMP = 1.5  # no schedule of the field moves the rate by half in one step after its warm-up
_SCALE_FELL = 4.0  # two halvings: one overflow per growth interval is normal
_SPIKES = ("loss_spike", "recovered_spike")

Curve = dict[int, tuple[float, str]]  # step → value, id of the event that told it


def facts(record: Record) -> list[Fact]:
    """Return what the curves say."""
    step = record.step
    if step is None:
        return []
    told = [event for event in record.of_type("step") if event.rank is None and event.step is not None]
    norm, loss, rate, scale = (_curve(told, name) for name in ("grad_norm", "loss", "lr", "loss_scale"))
    return [
        *_norm(norm, step),
        *_leads(norm, loss, record),
        *_rate(rate, step),
        *_scale(scale, step),
    ]


def _curve(events: list[Posted], name: str) -> Curve:
    found: Curve = {}
    for event in events:
        value = event.data.get(name)
        if event.step is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        found.setdefault(event.step, (float(value), event.id))  # every node may report the same value
    return found


def _norm(norm: Curve, step: int) -> list[Fact]:
    recent = [norm[at] for at in range(step - _RECENT, step) if at in norm]
    past = [value for at, (value, _) in norm.items() if at < step - _RECENT and value > 0]
    if len(recent) < _RECENT // 2 or len(past) < _NEEDED:
        return []
    usual, last = median(past), recent[-1]
    rises = sum(after[0] > before[0] for before, after in pairwise(recent))
    if last[0] >= _CREPT * usual and rises >= 0.6 * (len(recent) - 1):
        words = f"grad norm rose to {last[0] / usual:.1f} times its median over the last {len(recent)} steps"
        return [Fact(id=last[1], kind="norm_crept", text=f"{words} before {step_words(step)}")]
    if max(value for value, _ in recent) < _STEADY * usual:
        words = f"grad norm stayed within {_STEADY:.0f} times its median until {step_words(step - 1)}"
        return [Fact(id=last[1], kind="norm_steady", text=words)]
    return []


def _leads(norm: Curve, loss: Curve, record: Record) -> list[Fact]:
    """Return that the gradient left its range earlier than the loss reached its peak."""
    if not any(one.kind in _SPIKES for one in record.findings) or record.step is None:
        return []
    begin = record.step - _RECENT
    usual = [value for at, (value, _) in norm.items() if at < begin]
    if len(usual) < _NEEDED:
        return []
    out = next((at for at in sorted(norm) if at >= begin and norm[at][0] >= _CREPT * median(usual)), None)
    peak = max((at for at in loss if at >= begin), key=lambda at: loss[at][0], default=None)
    if out is None or peak is None or out >= peak:
        return []
    text = f"grad norm left its range at {step_words(out)}, the loss peaked at {step_words(peak)}"
    return [Fact(id=norm[out][1], kind="norm_led_loss", text=text)]


def _rate(rate: Curve, step: int) -> list[Fact]:
    before, at = rate.get(step - 1), rate.get(step)
    if at is None:  # the failing step often reports nothing: the two before it then
        before, at = rate.get(step - 2), rate.get(step - 1)
    if before is None or at is None or before[0] <= 0 or at[0] <= 0:
        return []
    ratio = at[0] / before[0]
    if ratio >= _LR_JUMP:
        text = f"the learning rate rose {ratio:.1f} times at {step_words(step)}, to {_short(at[0])}"
        return [Fact(id=at[1], kind="lr_jumped", text=text)]
    text = f"learning rate {_short(at[0])} at {step_words(step)}, {_short(before[0])} a step before"
    return [Fact(id=at[1], kind="lr_smooth", text=text)]


def _short(rate: float) -> str:
    """Return "2.4e-4"."""
    head, _, exponent = f"{rate:.1e}".partition("e")
    return f"{head}e{int(exponent)}"


def _scale(scale: Curve, step: int) -> list[Fact]:
    window = [scale[at] for at in sorted(scale) if step - 2 * _RECENT <= at <= step]
    if len(window) < 2 or min(value for value, _ in window) <= 0:
        return []
    highest, last = max(value for value, _ in window), window[-1]
    if highest / last[0] < _SCALE_FELL:
        return []
    text = f"loss scale fell from {highest:.0f} to {last[0]:.0f} within {2 * _RECENT} steps"
    return [Fact(id=last[1], kind="scale_fell", text=text)]
