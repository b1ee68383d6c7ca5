"""Directives: reading them, and following only those that count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.directive import Directive, Follower, from_document
from andon.signing import SigningKey, verify_document

KEY = SigningKey.generate()


def signed(seq: int, **fields) -> dict:
    return Directive(**{"kind": "hold", "seq": seq, "run": "a", "attempt": 1, **fields}).sign(KEY)


def test_it_reads_back_as_it_was_signed():
    directive = Directive(
        kind="resume", seq=4, run="a", attempt=2, mode="exit", incident="7", plan={"kind": "x"}, permit="p"
    )
    document = directive.sign(KEY)
    assert from_document(document) == directive
    assert verify_document(document, {KEY.key_id}) == directive.to_document()


def test_what_a_later_server_adds_is_passed_over():
    assert from_document({**signed(1), "added": True}).seq == 1


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "stop"},
        {"seq": "1"},
        {"seq": -1},
        {"run": None},
        {"attempt": 1.5},
        {"schema": "andon.directive/2"},
    ],
)
def test_what_is_no_directive_is_refused(change):
    with pytest.raises(ValueError, match="directive"):
        from_document({**signed(1), **change})


def test_a_follower_takes_only_what_is_newer_and_its_own():
    follower = Follower("a", attempt=1, trusted={KEY.key_id})
    assert follower.offer(signed(3))
    assert not follower.offer(signed(3, kind="continue"))
    assert not follower.offer(signed(2))
    assert follower.ignored == 0  # an answer repeats the current one; that is nothing to count
    assert not follower.offer(signed(9, run="b"))
    assert not follower.offer(signed(9, attempt=2))
    assert not follower.offer({**signed(9), "kind": "resume"})
    assert follower.ignored == 3
    assert follower.document == signed(3)
    follower.attempt = 2
    assert follower.offer(signed(4, attempt=2))


@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda v: st.dictionaries(st.text(), v) | st.lists(v))
)
def test_no_document_disturbs_a_follower(value):
    follower = Follower("a")
    assert not follower.offer(value)
    assert follower.document is None
