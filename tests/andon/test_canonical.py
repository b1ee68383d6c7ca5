"""The bytes that are hashed and signed are RFC 8785's, whoever writes them."""

import math

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from andon.canonical import canonical_bytes, exact

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["\x00\x1f\x7f", '\b\t\n\f\r"\\/', "\u2028\ue000\U0001f600"])
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(st.integers())
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner)
    ),
    max_leaves=12,
)


@given(DOCUMENTS)
def test_they_are_those_of_the_library(value):
    assert canonical_bytes(value) == rfc8785.dumps(exact(value))


@given(DOCUMENTS)
def test_what_is_made_exact_is_exact_already(value):
    assert exact(exact(value)) == exact(value)


def test_a_number_that_json_has_not_is_text():
    assert canonical_bytes([math.nan, -math.inf, 2**53, -(2**63)]) == (
        b'["nan","-inf","9007199254740992","-9223372036854775808"]'
    )


def test_a_lone_surrogate_is_refused():
    with pytest.raises(rfc8785.CanonicalizationError):
        canonical_bytes({"why": "\ud800"})
