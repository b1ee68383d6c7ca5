"""Raw samples: who encrypts needs no secret, and what was changed, cut or moved does not read."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.sample_cipher import HEAD_BYTES, MAGIC, NotReadable, decrypted, encrypted, new_secret, public_of

SECRET = new_secret()


def sealed(plain: bytes, secret: bytes = SECRET) -> bytes:
    return b"".join(encrypted(io.BytesIO(plain), len(plain), public_of(secret)))


def read(body: bytes, secret: bytes = SECRET) -> bytes:
    return b"".join(decrypted(io.BytesIO(body), secret))


@given(st.binary(max_size=5000))
def test_it_reads_again_and_no_two_files_share_a_key(plain: bytes) -> None:
    one, other = sealed(plain), sealed(plain)
    assert read(one) == plain
    assert one[len(MAGIC) : HEAD_BYTES] != other[len(MAGIC) : HEAD_BYTES]
    assert len(plain) < 8 or plain not in one[HEAD_BYTES:]


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 2 << 20])
def test_chunks_end_where_they_should(size: int) -> None:
    plain = b"abcdefgh" * (size // 8) + b"x" * (size % 8)
    body = sealed(plain)
    assert read(body) == plain
    with pytest.raises(NotReadable):
        read(body[: HEAD_BYTES + (1 << 20) + 16] if size > 1 << 20 else body[:-1])


@given(st.integers(0, HEAD_BYTES + 40 + 15), st.integers(1, 255))
def test_every_byte_counts(at: int, flip: int) -> None:
    body = bytearray(sealed(b"what somebody wrote, and a little more..")[: HEAD_BYTES + 56])
    body[at] ^= flip
    with pytest.raises(NotReadable):
        read(bytes(body))


def test_another_key_reads_nothing_and_a_file_that_shrinks_is_said() -> None:
    with pytest.raises(NotReadable):
        read(sealed(b"text"), new_secret())
    with pytest.raises(NotReadable):
        read(b"")
    with pytest.raises(OSError, match="shorter"):
        b"".join(encrypted(io.BytesIO(b"abc"), 10, public_of(SECRET)))
    # A file that grows is taken as long as it was.
    assert read(b"".join(encrypted(io.BytesIO(b"abcdef"), 3, public_of(SECRET)))) == b"abc"
