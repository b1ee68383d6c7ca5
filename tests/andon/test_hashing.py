"""Digests of a stream do not depend on how it was cut on the way."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from andon.hashing import PartHasher


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 64))
def test_of_the_whole_and_of_each_part(pieces: list[bytes], part_bytes: int) -> None:
    hasher = PartHasher(part_bytes)
    for piece in pieces:
        hasher.update(piece)
    whole = b"".join(pieces)
    cut = [whole[at : at + part_bytes] for at in range(0, len(whole), part_bytes)]
    assert hasher.bytes_total == len(whole)
    assert hasher.sha256 == hashlib.sha256(whole).hexdigest()
    assert hasher.parts == tuple(hashlib.sha256(part).hexdigest() for part in cut)
