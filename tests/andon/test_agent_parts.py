"""The agent's small parts: which paths it serves, how fast it sends, what it remembers."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.agent import pace as pacing
from andon.agent.holding import _TREE
from andon.agent.pace import Pace
from andon.agent.places import Declined, Roots
from andon.agent.putting import PutFailed, Putter
from andon.agent.state import State
from andon.agent.uploading import _digests, _mask

PIECES = st.lists(
    st.sampled_from(["..", ".", "a", "link", "out", "%2e%2e", "\0", "", "é", "?x", "#y"]), max_size=8
)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A root with a directory, a link inside it, and links that lead out."""
    place = tmp_path_factory.mktemp("places")
    root = place / "root"
    (root / "a").mkdir(parents=True)
    (place / "secret").write_text("x")
    (root / "link").symlink_to(root / "a")
    (root / "out").symlink_to(place)
    return SimpleNamespace(served=Roots([root]), root=Path(os.path.realpath(root)))


@given(PIECES, st.sampled_from(["file://{}/{}", "{}/{}", "file://n1{}/{}", "s3://{}/{}", "file:{}/{}"]))
def test_no_spelling_of_a_path_leads_out_of_the_roots(
    roots: SimpleNamespace, pieces: list[str], form: str
) -> None:
    try:
        path, root = roots.served.path_of(form.format(roots.root, "/".join(pieces)))
    except Declined:
        return
    assert root == roots.root
    assert os.path.realpath(path) == str(path)
    assert path == root or root in path.parents


@pytest.mark.parametrize("name", ["../../etc", "/etc", "x", "0b4b3c1e-0000-4000-8000-000000000000/../7"])
def test_a_tree_has_a_name_that_leads_nowhere_else(name: str) -> None:
    assert _TREE.fullmatch(name) is None
    assert _TREE.fullmatch("0b4b3c1e-0000-4000-8000-000000000000/7-00001")


def test_a_cap_spreads_bytes_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    clock.monotonic = lambda: clock.now_s
    clock.sleep = lambda wait_s: setattr(clock, "now_s", clock.now_s + wait_s)
    monkeypatch.setattr(pacing, "time", clock)
    capped = Pace(10.0)
    for _ in range(200):
        capped.take(1_000_000)
    assert clock.now_s - 100.0 == pytest.approx(20.0, abs=0.3)
    Pace(0.0).take(10**12)
    assert clock.now_s - 100.0 == pytest.approx(20.0, abs=0.3)


def test_what_it_remembers_is_whole_or_as_it_was_and_ends_with_its_run(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    state.clear("run a")
    state.write("holds", "7", {"tree": "/x"})
    (tmp_path / "state" / "holds" / "7.part").write_text("{half")
    (tmp_path / "state" / "holds" / "8.json").write_text("{half")
    assert (state.read("holds", "7"), state.read("holds", "8")) == ({"tree": "/x"}, None)
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
    state.copy_of("7").write_bytes(b"log")
    state.clear("run a")
    assert state.ids("holds") == ["7", "8"]
    state.clear("run b")
    assert state.ids("holds") == []
    assert not state.copy_of("7").exists()
    for call in (state.copy_of, state.drop_copy, lambda task: state.read("holds", task)):
        with pytest.raises(ValueError, match="no task id"):
            call("../7")


def test_parts_go_to_http_addresses_only(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"x")
    for url in ("file:///etc/passwd", "ftp://h/x", "gopher://h/x"):
        with pytest.raises(PutFailed, match="not an address"):
            Putter(Pace()).put(url, {}, tmp_path / "part", 0, 1)


def test_digests_are_of_the_size_at_the_beginning_also_when_a_file_grows(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a" * 25)
    first = _digests(file, 25, 10)
    with file.open("ab") as more:
        more.write(b"b" * 100)
    assert _digests(file, 25, 10) == first
    assert len(first[1]) == 3
    assert _digests(file, 0, 10)[1] == []
    with pytest.raises(OSError, match="shorter"):
        _digests(file, 1000, 10)


def test_the_end_of_a_log_does_not_begin_with_half_a_secret(tmp_path: Path) -> None:
    log, copy = tmp_path / "log", tmp_path / "copy"
    log.write_bytes(b"HF_TOKEN=hf_" + b"q" * 34 + b" step 1\nstep 2\n")
    for tail in range(1, 60):
        _mask(log, copy, tail)
        assert b"qqqq" not in copy.read_bytes()
        assert copy.read_bytes().startswith(b"[the last ")
    _mask(log, copy, None)
    assert copy.read_bytes() == b"HF_TOKEN=[masked] step 1\nstep 2\n"
    with pytest.raises(Declined) as gone:
        _mask(tmp_path / "none", copy, None)
    assert gone.value.why == "not-here"
