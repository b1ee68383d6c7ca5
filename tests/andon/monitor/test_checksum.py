"""The checksum of a tensor: exact, whatever the order of summation, the layout and the type."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

DTYPES = ["float32", "bfloat16", "float16", "float64", "int64", "uint8"]


def tensor_of(count, dtype, seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 50).to(getattr(torch, dtype))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.sampled_from(DTYPES), st.integers(0, 9), st.data())
def test_one_flipped_bit_always_shows(count, dtype, seed, data):
    import torch

    from andon.tensor_checksum import checksum

    tensor = tensor_of(count, dtype, seed)
    changed = tensor.clone()
    raw = changed.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(changed) != checksum(tensor)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 300), st.sampled_from(DTYPES), st.integers(0, 9), st.data())
def test_the_parts_add_up_to_the_whole_wherever_it_is_cut(count, dtype, seed, data):
    from andon.tensor_checksum import checksum

    tensor = tensor_of(count, dtype, seed)
    cut = data.draw(st.integers(1, count - 1))
    assert checksum(tensor[:cut]) + checksum(tensor[cut:], start=cut) == checksum(tensor)


def test_chunks_do_not_show(monkeypatch):
    from andon import tensor_checksum

    tensor = tensor_of(1000, "float32", 1)
    whole = tensor_checksum.checksum(tensor)
    monkeypatch.setattr(tensor_checksum, "_CHUNK", 7)
    assert tensor_checksum.checksum(tensor) == whole


def test_places_count_not_only_values():
    import torch

    from andon.tensor_checksum import checksum

    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))
