"""The hand-written passes of the side network give what autograd gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.methods.pac_plus.fast_side import FastSide, rounded, unsupported
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.parallel_adapter import ParallelAdapterStage, task_loss
from workbench.models.side_layers import Packing
from workbench.runtime.memory import read_memory

RAGGED = (5, 1, 8, 3)


def config(*, is_causal: bool = False, **changes: object) -> ParallelAdapterConfig:
    return ParallelAdapterConfig(hidden_size=48, num_layers=4, reduction=2, num_heads=3, is_causal=is_causal, **changes)


def stage(start: int, stop: int, **changes: bool) -> ParallelAdapterStage:
    """Return a stage whose parameters and calibration constants are all unlike their initial values."""
    adapter = ParallelAdapterStage(config(**changes), start, stop).train()
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in adapter.state_dict().items():
            if name.endswith("mix"):
                tensor.uniform_(-0.5, 1.5, generator=drawn)
            elif name.endswith("inverse_std"):
                tensor.uniform_(0.5, 2, generator=drawn)
            else:
                tensor.add_(torch.randn(tensor.shape, generator=drawn), alpha=0.2)
    return adapter


def inputs(adapter: ParallelAdapterStage, lengths: tuple[int, ...]) -> tuple[Tensor, list[Tensor], Tensor | None]:
    drawn = torch.Generator().manual_seed(1)
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    count = adapter.stop - adapter.start + (adapter.start == 0)
    taps = [torch.randn(len(lengths), longest, 48, generator=drawn) for _ in range(count)]
    return mask, taps, None if adapter.start == 0 else torch.randn(len(lengths), longest, 24, generator=drawn)


def gradients(adapter: ParallelAdapterStage) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone() for name, parameter in adapter.named_parameters() if parameter.grad is not None
    }


def close(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert mine.keys() == theirs.keys()
    scale = max(gradient.abs().max().item() for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, f"{name} got no gradient"
        torch.testing.assert_close(
            mine[name], gradient, rtol=tolerance, atol=tolerance * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [RAGGED, (6, 6), (1,)])
@pytest.mark.parametrize(("start", "stop"), [(0, 4), (0, 2), (1, 3), (2, 4)])
def test_every_stage_equals_autograd(start: int, stop: int, lengths: tuple[int, ...], is_causal: bool) -> None:
    """Side output, side input's gradient and every parameter's, which are added to what is there; padding has no
    say."""
    adapter = stage(start, stop, is_causal=is_causal)
    mask, taps, side = inputs(adapter, lengths)
    gradient = torch.randn(*mask.shape, 24, generator=torch.Generator().manual_seed(2)) * mask[:, :, None]
    if side is not None:
        side.requires_grad_()
    expected = adapter(side, taps, mask)
    torch.autograd.backward([expected, expected], [gradient, gradient])
    autograd = {name: grad for name, grad in gradients(adapter).items() if not name.startswith("last.")}
    adapter.zero_grad()

    fast = FastSide(adapter)
    packing = fast.packing(mask)
    for _ in range(2):
        output, context = fast.forward(
            None if side is None else packing.pack(side.detach()), [packing.pack(tap) for tap in taps], packing
        )
        returned = fast.backward(context, packing.pack(gradient))
    torch.testing.assert_close(output, packing.pack(expected), rtol=1e-5, atol=1e-5)
    # One token alone attends to itself whatever queries and keys say; of more, nobody sees the keys' bias: float noise
    # on both sides.
    ours = {name: grad for name, grad in gradients(adapter).items() if not name.startswith("last.")}
    for found in (ours, autograd):
        for name in [name for name in found if "query_key_value" in name]:
            found[name] = found[name][48:] if max(lengths) == 1 else torch.cat([found[name][:24], found[name][48:]])
    close(ours, autograd)
    if side is None:
        assert returned is None
    else:
        assert side.grad is not None and returned is not None
        scale = side.grad.abs().max().item()
        torch.testing.assert_close(
            2 * packing.unpack(returned), side.grad * mask[:, :, None], rtol=1e-5, atol=1e-5 * scale
        )


def test_loss_and_head_equal_autograd() -> None:
    adapter = ParallelAdapterStage(config(), 0, 4).train()
    mask, taps, _ = inputs(adapter, RAGGED)
    labels, ids = torch.tensor([0, 1, 1, 0]), torch.tensor([7, 3, 9, 4])
    expected = task_loss(adapter.head(adapter(None, taps, mask), taps[-1], mask, ids, 2), labels, "classification")
    expected.backward()
    autograd = gradients(adapter)
    adapter.zero_grad()

    fast = FastSide(adapter)
    packing = fast.packing(mask)
    packed = [packing.pack(tap) for tap in taps]
    side, context = fast.forward(None, packed, packing)
    logits, head = fast.head(side, packed[-1], packing, ids, 2)
    loss = task_loss(logits, labels, "classification")
    loss.backward()
    fast.backward(context, fast.head_backward(head))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    ours = gradients(adapter)
    close(
        {name: grad for name, grad in ours.items() if not name.endswith("query_key_value.bias")},
        {name: grad for name, grad in autograd.items() if not name.endswith("query_key_value.bias")},
    )


@pytest.mark.parametrize(("in_bfloat16", "tolerance"), [(True, 0.02), (False, 1e-5)])
def test_bfloat16_taps_cost_bfloat16s_precision_and_no_more(in_bfloat16: bool, tolerance: float) -> None:
    """Products with a tap in its own type differ from those in float32 by bfloat16's rounding of weights and
    results."""
    adapter = stage(0, 4)
    mask, taps, _ = inputs(adapter, RAGGED)
    half = [tap.bfloat16() for tap in taps]
    expected = adapter(None, half, mask)
    expected.backward(mask[:, :, None].expand_as(expected).float())
    autograd = {name: grad for name, grad in gradients(adapter).items() if "query_key_value.bias" not in name}
    adapter.zero_grad()
    fast = FastSide(adapter, in_bfloat16=in_bfloat16)
    packing = fast.packing(mask)
    output, context = fast.forward(None, [packing.pack(tap) for tap in half], packing)
    fast.backward(context, torch.ones_like(output))
    assert context.nbytes > 4 * output.numel() * 12 * 4  # four layers of at least twelve times their width
    assert (output - packing.pack(expected)).abs().max() < tolerance * expected.abs().max()
    ours = gradients(adapter)
    scale = max(grad.abs().max() for grad in autograd.values())
    assert all((ours[name] - grad).abs().max() < tolerance * scale for name, grad in autograd.items())


def test_ever_new_numbers_of_tokens_take_no_more_memory() -> None:
    """Every step has as many tokens as none before it: nothing may be compiled for each and kept (a quarter of a
    megabyte was)."""
    if not read_memory().data_bytes:
        pytest.skip("this system does not tell")
    adapter = stage(0, 4)
    fast = FastSide(adapter)
    by_size: dict[int, list[int]] = {}
    for tokens in range(257, 513):
        by_size.setdefault(rounded(tokens), []).append(tokens)
    assert 4 <= len(by_size) <= 16

    def step(tokens: int) -> None:
        lengths = torch.full((8,), tokens // 8) + (torch.arange(8) < tokens % 8)
        packing = fast.packing((torch.arange(64) < lengths[:, None]).long())
        assert packing.num_tokens == tokens
        output, context = fast.forward(None, [torch.ones(tokens, 48)] * 5, packing)
        fast.backward(context, torch.ones_like(output))

    for sizes in by_size.values():
        step(sizes.pop())
    before = read_memory().data_bytes
    for tokens in [tokens for sizes in by_size.values() for tokens in sizes][:150]:
        step(tokens)
    assert read_memory().data_bytes - before < 10_000_000  # two kernels for each would be 75 MB


def test_packing_goes_there_and_back() -> None:
    mask = (torch.arange(8) < torch.tensor(RAGGED)[:, None]).long()
    packing = Packing.of(mask, 3, is_causal=False)
    padded = torch.randn(4, 8, 6)
    packed = packing.pack(padded)
    assert packed.shape == (sum(RAGGED), 6) and packing.num_tokens == sum(RAGGED)
    assert torch.equal(packing.unpack(packed), padded * mask[:, :, None])
    means = torch.stack([padded[row, :length].mean(dim=0) for row, length in enumerate(RAGGED)])
    torch.testing.assert_close(packing.share @ packed, means)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_encoder_layers": 2, "target_length": 1}, "encoder-decoder"),
    ],
)
def test_what_has_no_fast_path_is_named(changes: dict, said: str) -> None:
    adapter = ParallelAdapterStage(config(**changes), 0, 4)
    assert said in unsupported(adapter)
    with pytest.raises(ValueError, match=said):
        FastSide(adapter)
    assert "float32" in unsupported(ParallelAdapterStage(config(), 0, 4).double())
