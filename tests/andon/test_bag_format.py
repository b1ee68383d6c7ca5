"""A bag's own files have one spelling, and so has its archive."""

import hashlib
import io
import zipfile

import pytest
import rfc8785
from hypothesis import assume, given
from hypothesis import strategies as st

from andon import bag_format as form
from andon.bag_zip import ZipWriter, read
from andon.chain import canonical, parse_canonical, row_digest, verify_rows

names = st.text(
    st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"]), min_size=1, max_size=12
).filter(lambda part: part not in {".", ".."})
paths = st.lists(names, min_size=1, max_size=3).map("/".join).filter(lambda path: not path.startswith("~"))
digests = st.binary(max_size=8).map(lambda raw: hashlib.sha256(raw).hexdigest())


@given(st.dictionaries(paths, digests, max_size=5))
def test_manifests_are_read_as_they_are_written(table: dict[str, str]) -> None:
    assert form.read_manifest(form.render_manifest(table), "m") == table


@given(st.dictionaries(paths, digests, min_size=1, max_size=3), st.data())
def test_any_other_spelling_of_a_manifest_is_refused_or_says_something_else(
    table: dict[str, str], data: st.DataObject
) -> None:
    raw = form.render_manifest(table)
    at = data.draw(st.integers(0, len(raw) - 1))
    other = raw[:at] + data.draw(st.binary(max_size=2)) + raw[at + 1 :]
    assume(other != raw)
    try:
        assert form.read_manifest(other, "m") != table
    except ValueError:
        return


@pytest.mark.parametrize(
    "raw",
    [
        b"A" * 64 + b"  a\n",
        b"a" * 64 + b" a\n",
        b"a" * 64 + b"  a",
        b"a" * 64 + b"  a\r\n",
        b"a" * 64 + b"  ./a\n",
        b"a" * 64 + b"  ../a\n",
        b"a" * 64 + b"  /a\n",
        b"a" * 64 + b"  a%0a\n",
        b"a" * 64 + b"  b\n" + b"a" * 64 + b"  a\n",
        b"a" * 64 + b"  a\n" + b"b" * 64 + b"  a\n",
        b"\xff",
    ],
)
def test_wrong_manifests_are_refused(raw: bytes) -> None:
    if raw == b"a" * 64 + b"  a\r\n":
        assert form.read_manifest(raw.replace(b"\r", b"%0D"), "m") == {"a\r": "a" * 64}
    with pytest.raises(ValueError):
        form.read_manifest(raw, "m")


@given(st.dictionaries(paths, st.binary(max_size=30), max_size=4))
def test_an_archive_is_read_by_others_and_has_one_spelling(files: dict[str, bytes]) -> None:
    out = io.BytesIO()
    writer = ZipWriter(out)
    for name, body in files.items():
        writer.add(name, [body[:3], body[3:]])
    writer.close()
    raw = out.getvalue()
    assert [entry.name for entry in read(io.BytesIO(raw), len(raw))] == list(files)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert archive.testzip() is None
        assert {info.filename: archive.read(info) for info in archive.infolist()} == files
    for other in (raw + b"x", b"x" + raw, raw[:-1], raw[1:]):
        with pytest.raises(ValueError):
            read(io.BytesIO(other), len(other))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(max_codepoint=127), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json_is_that_of_rfc_8785_and_reads_back(value: object) -> None:
    raw = canonical(value)
    assert raw == rfc8785.dumps(value)
    assert parse_canonical(raw, "x") == value


@pytest.mark.parametrize("value", [1.5, float("nan"), 2**53, {"é": 1}, "\ud800", b"x", {1: 2}])
def test_what_has_no_single_spelling_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        canonical(value)


@pytest.mark.parametrize(
    "raw", [b'{"a": 1}', b'{"b":1,"a":1}', b'{"a":1,"a":1}', b"1.0", b"1e3", b'"\\u0041"', b"{}\n", b"["]
)
def test_another_spelling_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        parse_canonical(raw, "x")


def chain_of(count: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for seq in range(1, count + 1):
        row: dict[str, object] = {
            "dossier": "d",
            "seq": seq,
            "at": "2026-01-01T00:00:00.000000Z",
            "who": "andon",
            "what": "x",
            "item": "",
            "object_sha256": "",
            "data": {"n": seq},
            "previous": rows[-1]["digest"] if rows else "",
        }
        rows.append(row | {"digest": row_digest(row)})
    return rows


def test_a_chain_verifies_and_every_change_of_it_does_not() -> None:
    rows = chain_of(4)
    assert verify_rows(rows) == []
    assert verify_rows(rows[1:])
    assert verify_rows([rows[0], rows[2], rows[3]])
    assert verify_rows([rows[0], rows[2], rows[1], rows[3]])
    assert verify_rows(rows, "another dossier")
    for name in ("who", "what", "item", "at", "object_sha256", "previous", "digest"):
        assert verify_rows([rows[0] | {name: "other"}, *rows[1:]]), name
    # Bytes cannot move from one field to its neighbour: each has its length in front.
    moved = rows[0] | {"who": "ando", "what": "nx"}
    assert row_digest(moved) != rows[0]["digest"]
