"""TensorBoard's event files, written here by the format's own rules."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.cli import main
from andon.detect.series import SeriesError
from andon.readers.scalars import Scalar
from andon.readers.scalars import series as curve
from andon.readers.tensorboard import read


def series(scalars):
    return curve(scalars, "TensorBoard")


def varint(number):
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def record(body):
    return struct.pack("<QI", len(body), 0) + body + b"\0\0\0\0"


def event(step, *values, wall_time=1.77e9):
    body = varint(1 << 3 | 1) + struct.pack("<d", wall_time) + varint(2 << 3) + varint(step)
    return record(body + field(5, b"".join(field(1, value) for value in values)))


def simple(tag, value):
    return field(1, tag.encode()) + varint(2 << 3 | 5) + struct.pack("<f", value)


def tensor(tag, value):
    inner = varint(1 << 3) + varint(1) + field(5, struct.pack("<f", value))
    return field(1, tag.encode()) + field(8, inner) + field(9, field(1, b"scalars"))


VERSION = record(varint(1 << 3 | 1) + struct.pack("<d", 1.77e9) + field(3, b"brain.Event:2"))


def test_both_forms_of_a_scalar_and_no_placeholder():
    body = (
        VERSION
        + event(0, simple("hp_metric", -1.0))
        + event(15, simple("train_loss", 2.5), tensor("val_loss", 3.5))
    )
    assert read(body) == [Scalar(1.77e9, 15, "train_loss", 2.5), Scalar(1.77e9, 15, "val_loss", 3.5)]


def test_a_run_that_died_before_its_first_log_has_no_metrics():
    scalars = read(VERSION + event(0, simple("hp_metric", -1.0)))
    with pytest.raises(SeriesError, match="ended before it logged any"):
        series(scalars)


def test_a_tag_written_twice_at_a_step_is_no_restart():
    body = VERSION + b"".join(
        event(step, simple("epoch", 1.0)) + event(step, simple("epoch", 1.0), simple("train/loss", 2.0))
        for step in (15, 31)
    )
    with pytest.raises(SeriesError, match="no training loss among"):
        series([one for one in read(body) if one.tag == "epoch"])
    found = series(read(body.replace(b"train/loss", b"train_loss")))
    assert [(row.step, row.loss) for row in found.rows] == [(15, 2.0), (31, 2.0)]


def test_a_torn_end_costs_only_itself():
    first, second = event(1, simple("loss", 2.0)), event(2, simple("loss", 1.0))
    for cut in range(len(second)):
        assert [one.value for one in read(VERSION + first + second[:cut])] == [2.0]


def test_andon_detect_judges_it(tmp_path, capsys):
    file = tmp_path / "events.out.tfevents.1"
    steps = [event(step, simple("train_loss", 2.0 + step % 3 / 100)) for step in range(60)]
    file.write_bytes(VERSION + b"".join(steps) + event(60, simple("train_loss", math.nan)))
    assert main(["detect", str(file)]) == 1
    assert '"kind": "nonfinite"' in capsys.readouterr().out


@given(st.binary(max_size=200), st.integers(0, 200))
def test_no_bytes_crash_it(noise, at):
    whole = VERSION + event(1, simple("loss", 2.0), tensor("x", 1.0))
    for one in read(whole[: len(VERSION)] + noise) + read(VERSION + whole[at:] + noise):
        assert isinstance(one.value, float)
