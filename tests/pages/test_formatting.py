"""Numbers, times and names are written one way."""

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs import formatting as f
from runs.templatetags import andon_format as tags

NOW = datetime(2026, 11, 30, 3, 16, 7, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (18003, "18,003"),
        (0, "0"),
        (-1, "−1"),
        (None, "not known yet"),
        (2**63 - 1, "9,223,372,036,854,775,807"),
    ],
)
def test_a_count_has_commas_and_a_real_minus(value, text):
    assert f.count(value) == text


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (f.loss, 2.1134, "2.113"),
        (f.loss, 0.00001234, "1.234e-5"),
        (f.loss, 10.0, "10.00"),
        (f.loss, float("nan"), "NaN"),
        (f.loss, "-inf", "−Inf"),
        (f.loss, None, "not measured"),
        (f.grad_norm, 0.41234, "0.412"),
        (f.grad_norm, 11140.2, "11,100"),
        (f.grad_norm, 0.9996, "1.00"),
        (f.grad_norm, float("inf"), "+Inf"),
        (f.learning_rate, 0.00024, "2.4e-4"),
        (f.learning_rate, -0.00024, "−2.4e-4"),
        (f.z_score, 5.13, "5.1"),
        (f.z_score, -0.25, "−0.2"),
        (f.z_score, -0.01, "0.0"),
    ],
)
def test_a_metric_has_its_digits(form, value, text):
    assert form(value) == text


@given(st.floats(-1e300, 1e300))
def test_a_formatted_number_reads_back_to_its_digits(value):
    text = f.grad_norm(value).replace(",", "").replace("−", "-")
    assert math.isclose(float(text), value, rel_tol=0.006, abs_tol=5e-324 if value else 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (2_100_000, "2.1 MB"),
        (182_000_000_000, "182 GB"),
        (999_999_999, "1 GB"),
        (4_100_000_000_000, "4.1 TB"),
        (None, "size not known yet"),
    ],
)
def test_bytes_are_si(value, text):
    assert f.size(value).replace("\u00a0", " ") == text


@given(st.integers(0, 10**17))
def test_bytes_never_show_four_digits(value):
    number = f.size(value).split("\u00a0")[0]
    assert float(number) < 1000
    assert len(number.replace(".", "")) <= 3


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([61], "61"),
        ([56, 57, 58, 59, 60, 62, 63], "56–60, 62, 63"),
        ([12, 40], "12, 40"),
        ([3, 9, 17, 20, 41, 50, 52, 54], "3, 9, 17, 20, 41 and 3 more"),
        (range(16384), "0–16383"),
    ],
)
def test_ranks_fold(ranks, text):
    assert f.ranks(ranks) == text


@given(st.sets(st.integers(0, 300), min_size=1))
def test_folded_ranks_name_every_rank_once(ranks):
    named = []
    for piece in f.fold(ranks):
        low, _, high = piece.partition("–")
        named.extend(range(int(low), int(high or low) + 1))
    assert named == sorted(ranks)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (4320, "1 h 12 min"),
        (3600, "1 h"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds, text):
    assert f.duration(seconds).replace("\u00a0", " ") == text


def test_a_time_has_its_date_only_when_it_is_not_today():
    assert f.clock(NOW.replace(hour=3, minute=12, second=7), NOW) == "03:12:07"
    assert f.clock(datetime(2026, 10, 29, 11, 40, tzinfo=UTC), NOW) == "29\u00a0Oct 11:40"
    assert f.clock(datetime(2025, 10, 29, 11, 40, tzinfo=UTC), NOW) == "29\u00a0Oct\u00a02025 11:40"
    assert f.clock(NOW.replace(microsecond=412_999), NOW, ms=True) == "03:16:07.412"


def test_the_time_tag_carries_the_exact_moment_for_the_reader_and_the_script():
    html = tags.when(NOW - timedelta(minutes=4), NOW)
    assert (
        '<time datetime="2026-11-30T03:12:07.000Z" title="2026-11-30T03:12:07.000Z" data-live="ago">' in html
    )
    assert "4\u00a0min ago</time>, 03:12:07 UTC" in html


def test_a_lag_above_ten_seconds_says_late():
    assert tags.lag(NOW, NOW + timedelta(milliseconds=94)) == "+94\u00a0ms"
    assert "late" not in str(tags.lag(NOW, NOW + timedelta(seconds=10)))
    assert "late" in str(tags.lag(NOW, NOW + timedelta(seconds=31)))
    assert f.lag(NOW, NOW - timedelta(seconds=2)) == "−2\u00a0s"


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(61, 100, "61"), (0, 15, "0"), (15, 15, "100"), (999, 1000, "99.9"), (199, 200, "99")],
)
def test_a_share_is_never_rounded_up_to_all(part, whole, text):
    assert f.percent(part, whole) == f"{text}\u202f%"


def test_money_and_gpu_hours():
    assert f.money(2.561) == "$2.56"
    assert f.money(9.999) == "$10"
    assert f.money(1051.4) == "$1,051"
    assert f.gpu_hours(21.34) == "21.3\u00a0GPU\u2011hours"
    assert f.amount(75_500_000_000) == "75.5\u00a0G"
    assert f.amount(9_999) == "9,999"


def test_a_digest_shows_eight_and_four_and_copies_all_of_it():
    whole = "7c1e90ab" + "0" * 52 + "42a9"
    html = tags.digest(whole)
    assert ">7c1e90ab…42a9<" in html
    assert f'data-copy="{whole}"' in html
    assert "not known yet" in tags.digest("")


def test_a_hostile_digest_cannot_leave_its_attribute():
    assert "<script>" not in tags.digest('"><script>alert(1)</script>' * 3)


@given(st.text(max_size=300))
def test_inert_text_has_no_control_or_bidi_characters_and_an_end(text):
    shown = f.inert(text)
    assert len(shown) < 130
    assert not set(shown) & {*map(chr, range(32)), "\u202e", "\u2066", "\u200f", "\u200b", "\ufeff", "\u2028"}


def test_a_long_name_says_how_much_is_left_out():
    assert f.inert("x" * 10_000).endswith("… (+9,920 characters)")


def test_figure_text_is_no_markup_for_plotly():
    assert f.figure_text('<a href="x">a&b</a>') == '&lt;a href="x"&gt;a&amp;b&lt;/a&gt;'


def test_a_long_sentence_is_cut_at_a_clause_for_the_strip():
    says = "Resume cannot be requested: evidence is not safe yet (" + "batch ids: planned; " * 20 + ")."
    assert tags.brief(says) == "Resume cannot be requested: evidence is not safe yet."
    assert tags.brief("Short.") == "Short."
