"""Rendering a postmortem: the same document gives the same bytes, and nothing in it becomes markup."""

import json
import re
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from andon.postmortem import figures, html, markdown
from andon.postmortem.document import (
    Action,
    Actions,
    Cited,
    Commands,
    Document,
    Figure,
    Group,
    Prose,
    Row,
    Section,
    Sentence,
    Table,
    Version,
    decode,
    encode,
    finished,
    ids_of,
    people_in,
    person,
)

AXIS = figures.Axis(1, 20)

text = st.text(max_size=40)
ids = st.lists(st.from_regex(r"[FTEL]-[1-9][0-9]{0,3}", fullmatch=True), min_size=1, max_size=3).map(tuple)
facts = st.builds(Sentence, text=text, ids=ids)
items = st.one_of(
    facts,
    st.builds(
        lambda rows: Table(("a", "b"), tuple(rows)),
        st.lists(st.builds(Row, cells=st.tuples(text, text), ids=ids), max_size=3),
    ),
    st.builds(Group, title=text, facts=st.lists(facts, max_size=2).map(tuple), mark=st.booleans()),
    st.builds(Prose, part=st.just("impact"), text=text, by=text, at=text),
    st.builds(
        lambda rows: Actions(tuple(rows), "x", "y"),
        st.lists(st.builds(Action, what=text, owner=text, due=text, ticket=text), max_size=2),
    ),
    st.builds(Commands, says=facts, lines=st.lists(text, max_size=2).map(tuple)),
    st.builds(
        lambda caption, data: Figure("grid", "Figure 1", caption, figures.curves([], AXIS, step=None), data),
        facts,
        text,
    ),
)


@st.composite
def documents(draw):
    made = Document(
        incident="I-7",
        run=draw(text),
        title=draw(text),
        version=Version(status="draft", says=draw(text)),
        head=Table(("", ""), (Row(("Run", draw(text)), ("I-7",)),)),
        sections=tuple(
            Section(f"s{n}", draw(text), tuple(draw(st.lists(items, max_size=3)))) for n in range(2)
        ),
        appendix=(),
    )
    rows = tuple(Cited(one, draw(text), (("says", draw(text)),)) for one in sorted(set(ids_of(made))))
    return finished(msgspec.structs.replace(made, appendix=rows))


@settings(max_examples=40)
@given(documents())
def test_the_same_document_gives_the_same_bytes_and_json_reads_back(document):
    again = decode(encode(document))
    assert again == document
    assert encode(again) == encode(document)
    assert markdown.render(again) == markdown.render(document)
    assert html.render(again) == html.render(document)
    assert finished(again).digest == document.digest


class Tags:
    """Counts the elements of an HTML text."""

    def __init__(self, source):
        from html.parser import HTMLParser

        self.found = found = []

        class Reader(HTMLParser):
            def handle_starttag(self, tag, attrs):
                found.append((tag, tuple(name for name, _ in attrs)))

        Reader().feed(source)


@settings(max_examples=40)
@given(documents())
def test_no_text_becomes_an_element_or_an_address(document):
    for tag, names in Tags(html.render(document)).found:
        assert tag not in {"script", "img", "iframe", "link", "object", "form", "input"}
        assert not [name for name in names if name.startswith("on")]
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", html.render(document))


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_markdown_shows_a_text_as_it_was_written(written):
    shown = MarkdownIt("commonmark").enable("table").render(markdown.escape(written))
    assert not re.search(r"<(?!/?p>)", shown)
    plain = re.sub(r"</?p>\n?", "", shown)
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        plain = plain.replace(entity, character)
    # CommonMark itself drops blanks at the edges of a line and replaces NUL.
    assert plain.split() == written.replace("\0", "\ufffd").split()


def test_a_fence_is_longer_than_any_in_what_it_holds():
    lines = markdown._code("a\n````\nb")
    assert (lines[0], lines[-1]) == ("`````", "`````")


def test_a_name_can_be_put_in_and_left_out():
    one = "4d5c0a9e-0000-4000-8000-1234567890ab"
    fact = Sentence(f"{person(one)} approved.", ("I-7",))
    made = Document(
        incident="I-7",
        run="r",
        title="t",
        version=Version(status="draft", says="d"),
        head=Table(("", ""), (Row(("a", "b"), ("I-7",)),)),
        sections=(Section("s", "S", (fact,)),),
        appendix=(Cited("I-7", "incident", (("a", "b"),)),),
    )
    assert people_in(made) == {one}
    named = encode(made.text({one: 'jo"nas\\'}))
    assert json.loads(named)["sections"][0]["items"][0]["text"] == 'jo"nas\\ approved.'
    assert "person 4d5c0a9e approved." in markdown.render(made.text({}))


class TestFigures:
    def grid(self, plane):
        names = [f"rank {row}" for row in range(plane.shape[0])]
        axis = figures.Axis(100, 100 + plane.shape[1] - 1)
        return figures.grid(plane, axis, names, step=102, ringed=[1], words="first bad: rank 1")

    def test_a_cell_stands_at_its_step_and_row(self):
        plane = np.ones((3, 10), dtype=np.uint8)
        plane[1, 2] = figures.NONFINITE
        root = ElementTree.fromstring(self.grid(plane))
        space = "{http://www.w3.org/2000/svg}"
        bad = [one for one in root.iter(f"{space}rect") if one.get("fill") == figures.BAD]
        cell = bad[0]
        assert float(cell.get("x")) == pytest.approx(figures.LEFT + 2 * figures.PLOT / 10, abs=0.06)
        assert float(cell.get("width")) == pytest.approx(figures.PLOT / 10, abs=0.06)
        circle = next(root.iter(f"{space}circle"))
        assert float(circle.get("cx")) == pytest.approx(figures.LEFT + 2.5 * figures.PLOT / 10, abs=0.06)
        assert (
            float(cell.get("y")) < float(circle.get("cy")) < float(cell.get("y")) + float(cell.get("height"))
        )
        words = [one.text for one in root.iter(f"{space}text")]
        assert {"first bad: rank 1", "step 102", "nonfinite", "healthy"} <= set(words)

    def test_a_nonfinite_value_breaks_the_line_and_is_marked(self):
        points = ((1, 2.0), (2, 2.1), (3, None), (4, None), (5, 2.2))
        root = ElementTree.fromstring(figures.curves([figures.Curve("Loss", False, points)], AXIS, step=3))
        space = "{http://www.w3.org/2000/svg}"
        lines = [one for one in root.iter(f"{space}polyline") if one.get("stroke") == figures.CURVE]
        assert [len(one.get("points").split()) for one in lines] == [2, 1]
        assert "NaN × 2" in [one.text for one in root.iter(f"{space}text")]

    @settings(max_examples=40)
    @given(
        st.lists(
            st.none() | st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30),
            max_size=20,
        ),
        st.booleans(),
    )
    def test_any_curve_is_drawn_as_well_formed_xml_with_finite_coordinates(self, values, log):
        points = tuple(enumerate(values, start=1))
        svg = figures.curves([figures.Curve("Gradient norm", log, points)], AXIS, step=7)
        ElementTree.fromstring(svg)
        assert "nan" not in svg.replace("NaN", "")
        assert "inf" not in svg

    @given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 2**32 - 1))
    @settings(max_examples=20)
    def test_any_grid_is_well_formed_and_the_same_twice(self, rows, columns, seed):
        plane = np.random.default_rng(seed).integers(0, 10, (rows, columns)).astype(np.uint8)
        ElementTree.fromstring(self.grid(plane) if rows > 1 else self.grid(np.vstack([plane, plane])))
        assert self.grid(np.vstack([plane, plane])) == self.grid(np.vstack([plane, plane]))
