"""Links out: an operator's template, a stranger's names."""

from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.links import FIELDS, Link, parse

GRAFANA = "Grafana=https://grafana.example.org/d/gpu?var-node={node}&from={from_ms}&to={to_ms}"


def test_a_template_is_filled():
    (link,) = parse(f"  {GRAFANA}\n")
    filled = link.fill({"node": "node-07", "from_ms": 1, "to_ms": 2})
    assert filled == "https://grafana.example.org/d/gpu?var-node=node-07&from=1&to=2"
    assert parse("W_and_B=http://wandb.local/{run}")[0].name == "W and B"
    assert parse("") == []


def test_a_link_whose_field_is_not_known_is_none():
    assert parse(GRAFANA)[0].fill({"node": None, "from_ms": 1, "to_ms": 2}) is None
    assert parse(GRAFANA)[0].fill({"from_ms": 1, "to_ms": 2}) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("https://grafana.example.org", "expected NAME=URL"),
        ("=https://a.example", "expected NAME=URL"),
        ("G=javascript:alert(1)", "expected an http"),
        ("G=data:text/html,x", "expected an http"),
        ("G=//a.example/{run}", "expected an http"),
        ("G=https:///x", "expected an http"),
        ("G=https://{node}/x", "no field and no user"),
        ("G=https://{node}.example.org/x", "no field and no user"),
        ("G=https://me@a.example/", "no field and no user"),
        ("G=https://a.example/{password}", "is no field; known are attempt"),
        ("G=https://a.example/{run!r}", "is no field"),
        ("G=https://a.example/{run:>9}", "is no field"),
        ("G=https://a.example/{}", "is no field"),
        ("G=https://a.example/{run.slug}", "is no field"),
        ("G=https://a.example/{run", "expected '}'"),
        ("G=https://[a.example/", "Invalid IPv6"),
    ],
)
def test_any_other_template_is_refused_and_says_why(text, says):
    with pytest.raises(ValueError, match=says):
        parse(text)


@given(st.text(min_size=1), st.sampled_from(sorted(FIELDS)))
def test_a_name_stays_one_value_whatever_it_holds(name, field):
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    filled = Link("G", f"https://a.example/d?x={{{field}}}&y=1").fill({field: name})
    parts = urlsplit(filled)
    assert (parts.scheme, parts.netloc, parts.path, parts.fragment) == ("https", "a.example", "/d", "")
    assert parse_qs(parts.query, keep_blank_values=True) == {"x": [name], "y": ["1"]}
