"""The reference quantization keeps within the error bounds of its equations."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.errors import ConfigError
from workbench.models.quantization import config
from workbench.models.quantization.config import (
    NF4_VALUES,
    dequantize_blocks,
    dequantize_constants,
    quantize_blocks,
    quantize_constants,
)

CODED = ("int8", "int4", "nf4")
WIDEST_GAP = max(right - left for left, right in itertools.pairwise(NF4_VALUES))
BOUND = {"int8": 1 / (2 * 127), "int4": 1 / 14, "nf4": WIDEST_GAP / 2}
# Zero, and magnitudes over forty powers of ten, so that a block has outliers; float32 rounds them once more.
NUMBERS = st.one_of(
    st.just(0.0), st.floats(1e-20, 1e20), st.floats(-1e20, -1e-20), st.sampled_from([-1.0, -0.5, 0.25, 1.0])
)


def round_trip(values, storage, block_size):
    codes, absmax = quantize_blocks(values, storage, block_size)
    back = dequantize_blocks(codes, absmax, storage)
    assert back.shape == (len(absmax), block_size) and back.dtype == torch.float32
    return back.view(-1)[: values.numel()].view(values.shape), absmax


@pytest.mark.parametrize("storage", CODED)
@settings(max_examples=60, deadline=None)
@given(values=st.lists(NUMBERS, min_size=1, max_size=70), half_block=st.integers(1, 16))
def test_errors_stay_within_the_bound(storage, values, half_block):
    values = torch.tensor(values)
    back, absmax = round_trip(values, storage, 2 * half_block)
    largest = absmax.repeat_interleave(2 * half_block)[: len(values)]
    assert torch.all((values - back).abs() <= BOUND[storage] * largest * (1 + 1e-5))


@pytest.mark.parametrize("storage", CODED)
@settings(max_examples=30, deadline=None)
@given(values=st.lists(NUMBERS, min_size=1, max_size=40))
def test_zeros_and_the_largest_of_a_block_are_exact(storage, values):
    values = torch.tensor(values)
    back, absmax = round_trip(values, storage, 8)
    assert torch.all(back[values == 0] == 0)
    if storage != "nf4":  # its negative half is no mirror image, but its ends are -1 and 1 too
        assert torch.equal(back[values.abs() == absmax.max()].sign(), values[values.abs() == absmax.max()].sign())
    torch.testing.assert_close(back.abs().max(), absmax.max())


@pytest.mark.parametrize("storage", CODED)
def test_the_bound_is_reached_nearly(storage):
    """It would not notice an error twice too large otherwise."""
    values = torch.linspace(-1, 1, 4001)
    back, _ = round_trip(values, storage, 4002)
    assert (values - back).abs().max() > 0.98 * BOUND[storage]


def test_eq_1_and_2_by_hand():
    codes, absmax = quantize_blocks(torch.tensor([[0.5, -2.0], [1.0, 0.0], [3.0, 1.5]]), "int8", 4)
    assert codes.tolist() == [[32, -127, 64, 0], [127, 64, 0, 0]] and absmax.tolist() == [2.0, 3.0]
    back = dequantize_blocks(codes, absmax, "int8")
    torch.testing.assert_close(back, torch.tensor([[64, -254, 128, 0], [381, 192, 0, 0]]) / 127)


def test_two_codes_share_a_byte():
    codes, _ = quantize_blocks(torch.tensor([7.0, -7.0, 1.0, 0.0]), "int4", 4)
    assert codes.tolist() == [[0x79, 0x10]]
    codes, _ = quantize_blocks(torch.tensor([-1.0, 1.0, 0.0, 0.43]), "nf4", 4)
    assert codes.tolist() == [[0x0F, 0x7C]]


def test_nf4_takes_the_nearest_value_and_between_two_the_lower():
    known = torch.tensor(NF4_VALUES)
    middles = (known[1:] + known[:-1]) / 2
    values = torch.cat([torch.tensor([1.0]), middles, torch.linspace(-1, 1, 4096 - 16)])
    codes, _ = quantize_blocks(values, "nf4", 4096)
    assert torch.equal(torch.stack([codes >> 4, codes & 15], dim=-1).flatten().long(), torch.bucketize(values, middles))


@pytest.mark.parametrize("storage", CODED)
def test_a_tensor_is_quantized_in_parts_to_the_same_codes(storage, monkeypatch):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    reference = quantize_blocks(values, storage, 64)
    monkeypatch.setattr(config, "_PART_VALUES", 128)
    parts = quantize_blocks(values, storage, 64)
    assert all(map(torch.equal, reference, parts))


@pytest.mark.parametrize("storage", CODED)
def test_an_outlier_spoils_its_own_block_only(storage):
    values = torch.randn(256, generator=torch.Generator().manual_seed(0))
    spoilt = values.clone()
    spoilt[3] = 1000.0
    clean, _ = round_trip(values, storage, 64)
    back, _ = round_trip(spoilt, storage, 64)
    assert torch.equal(back[64:], clean[64:]) and not torch.equal(back[:64], clean[:64])


@pytest.mark.parametrize("storage", CODED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(storage, bad):
    with pytest.raises(ConfigError, match="not a number"):
        quantize_blocks(torch.tensor([1.0, bad]), storage, 2)


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=600))
def test_double_quantization_keeps_constants_within_its_bound(values):
    absmax = torch.tensor(values)
    back = dequantize_constants(*quantize_constants(absmax), len(absmax))
    assert torch.all(back >= 0)
    largest = (absmax - absmax.mean()).abs().max()
    assert torch.all((absmax - back).abs() <= largest / 254 * 1.001 + 1e-5)


def test_block_counts_must_agree():
    with pytest.raises(ValueError, match="2 blocks of codes and 1 constants"):
        dequantize_blocks(torch.zeros(2, 4, dtype=torch.int8), torch.ones(1), "int8")
