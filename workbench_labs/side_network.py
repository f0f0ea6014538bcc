"""A side network made of a student's two functions, trained next to a real frozen model (PAC+, sections IV-A and IV-B).

A sentence is the mean of its tokens' activations, one for each tap: functions on lists are slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.models.loading import load_stack
from workbench.models.quantization import QuantizationConfig, held_bytes, quantize
from workbench.models.stack import LayerStack
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate
from workbench.widgets.tables import Table
from workbench_labs.course.verdict import usable
from workbench_labs.exercises.caches import Record
from workbench_labs.exercises.side_layers import EXERCISES, side_output
from workbench_labs.precision import stored

Layer = Callable[[list[float], list[float], list[list[float]], float], Sequence[float]]
Gradient = Callable[[list[float], list[float], list[list[float]], float, list[float]], Mapping[str, Any]]
WIDTH, BATCH, RATE = 8, 16, 0.01
STORED = ("float32", "int8", "int4")


class _Step(torch.autograd.Function):
    """A side layer for a mini-batch, forward and backward by a student's functions, one sentence at a time."""

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, gradient: Gradient, tap: Tensor, side: Tensor, down: Tensor, mix: Tensor
    ) -> Tensor:
        ctx.gradient = gradient
        ctx.save_for_backward(tap, side, down, mix)
        rows = [layer(b, a, down.tolist(), mix.item()) for b, a in zip(tap.tolist(), side.tolist(), strict=True)]
        return torch.tensor(rows, dtype=side.dtype)

    @staticmethod
    def backward(ctx: Any, after: Tensor) -> tuple[Tensor | None, ...]:
        tap, side, down, mix = ctx.saved_tensors
        gradients = [
            ctx.gradient(b, a, down.tolist(), mix.item(), g)
            for b, a, g in zip(tap.tolist(), side.tolist(), after.tolist(), strict=True)
        ]
        parts = [
            torch.stack([torch.tensor(gradient[name]) for gradient in gradients]) for name in ("side", "down", "mix")
        ]
        return None, None, None, parts[0], parts[1].sum(dim=0), parts[2].sum(dim=0)


class SideNetwork(nn.Module):
    """Side layers by a student's functions, and a head that reads the last one and the last tap.

    layer, gradient: None takes torch and its autograd.
    """

    def __init__(
        self, layer: Layer | None, gradient: Gradient | None, num_taps: int, hidden_size: int, seed: int = 0
    ) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        self._functions = layer, gradient
        self.down = nn.ParameterList(
            torch.randn(WIDTH, hidden_size, generator=draws) / hidden_size**0.5 for _ in range(num_taps)
        )
        self.mix = nn.ParameterList(torch.tensor(0.5) for _ in range(num_taps - 1))
        self.head = nn.Parameter(torch.randn(2, WIDTH + hidden_size, generator=draws) * 0.01)

    def forward(self, taps: Tensor) -> Tensor:
        """Return the logits (n, 2).  taps: (num_taps, n, d)."""
        layer, gradient = self._functions
        side = functional.linear(taps[0].detach(), self.down[0])
        for tap, down, mix in zip(taps[1:], self.down[1:], self.mix, strict=True):
            if layer is None or gradient is None:
                side = side_output(tap.detach(), side, down, mix)
            else:
                side = _Step.apply(layer, gradient, tap, side, down, mix)
        return functional.linear(torch.cat([side, taps[-1].detach()], dim=1), self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentences:
    """Every `every`-th sentence of a split (splits are ordered by class), for a side network next to a frozen stack."""

    stack: LayerStack
    split: TokenizedSplit
    every: int = 1

    def batches(self) -> list[Batch]:
        """Return mini-batches of the sentences, the classes mixed."""
        chosen = list(range(0, len(self.split), self.every))
        count = -(-len(chosen) // BATCH)
        return [collate(self.split, chosen[first::count]) for first in range(count)]


def pooled_taps(stack: LayerStack, batch: Batch) -> Tensor:
    """Return the taps (num_taps, n, d), each the mean over a sentence's tokens, normalised over its d numbers."""
    share = batch.attention_mask / batch.attention_mask.sum(dim=1, keepdim=True)
    taps = torch.stack(stack(batch.input_ids, batch.attention_mask)[1])
    return functional.layer_norm(torch.einsum("lntd,nt->lnd", taps, share), taps.shape[-1:])


def side_network_of(sentences: Sentences, layer: Layer | None, gradient: Gradient | None) -> SideNetwork:
    """Return a new side network for the sentences' model.  A part that is not right yet is replaced by torch's."""
    layer = layer and usable(EXERCISES, "side_layer", layer)
    gradient = gradient and usable(EXERCISES, "side_gradient", gradient)
    return SideNetwork(layer, gradient, sentences.stack.num_taps, sentences.stack.hidden_size)


def gradients_table(sentences: Sentences, layer: Layer, gradient: Gradient) -> Table:
    """Return which parameters have a gradient after one mini-batch, and how far a student's are from autograd's.

    The backbone's parameters all ask for a gradient here, so that one that arrives would be seen.
    """
    stack, [batch, *_] = sentences.stack, sentences.batches()
    networks = side_network_of(sentences, layer, gradient), side_network_of(sentences, None, None)
    stack.requires_grad_(True)
    try:
        for network in networks:
            functional.cross_entropy(network(pooled_taps(stack, batch)), batch.labels).backward()
        groups = {"backbone": list(stack.parameters()), "side network": list(networks[0].parameters())}
        rows = [
            (
                name,
                len(parameters),
                sum(parameter.grad is not None for parameter in parameters),
                f"{sum(parameter.numel() for parameter in parameters):,}",
            )
            for name, parameters in groups.items()
        ]
    finally:
        stack.requires_grad_(False)
        stack.zero_grad(set_to_none=True)
    pairs = zip(*(network.parameters() for network in networks), strict=True)
    off = max(float((parameter.grad - other.grad).abs().max() / other.grad.abs().max()) for parameter, other in pairs)
    note = f"The largest difference from torch's autograd: {off:.0e} of a gradient's largest entry."
    columns = ("", "tensors", "with a gradient", "numbers")
    return Table(columns, rows, title="After one mini-batch, forward and backward", note=note)


def train(network: SideNetwork, batches: Sequence[Batch], taps_of: Callable[[int, int], Tensor], epochs: int) -> Losses:
    """Train with Adam; return each epoch's mean loss, and the milliseconds in which its taps came.

    taps_of: (epoch, number of the mini-batch) -> its taps.
    """
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    losses, waited_ms = [], []
    for epoch in range(epochs):
        total = waited_s = 0.0
        for number, batch in enumerate(batches):
            begin = time.perf_counter()
            taps = taps_of(epoch, number)
            waited_s += time.perf_counter() - begin
            loss = functional.cross_entropy(network(taps), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch.labels)
        losses.append(total / sum(len(batch.labels) for batch in batches))
        waited_ms.append(1e3 * waited_s)
    return Losses(losses, waited_ms)


@dataclass(frozen=True, slots=True)
class Losses:
    """Each epoch's mean loss, and the milliseconds until its activations were there."""

    losses: list[float]
    waited_ms: list[float]


def with_and_without_cache(sentences: Sentences, layer: Layer, gradient: Gradient, *, epochs: int) -> dict[str, Losses]:
    """Return the same training four times: through the backbone in every epoch, and then from caches."""
    batches, trainings = sentences.batches(), dict[str, Losses]()
    with torch.no_grad():
        fresh = [pooled_taps(sentences.stack, batch) for batch in batches]

    def through_backbone(epoch: int, number: int) -> Tensor:
        with torch.no_grad():
            return pooled_taps(sentences.stack, batches[number])

    trainings["no cache"] = train(side_network_of(sentences, layer, gradient), batches, through_backbone, epochs)
    for dtype in ("float32", "bfloat16", "int8"):
        records = [stored(taps, dtype) for taps in fresh]

        def from_cache(epoch: int, number: int, records: list[Tensor] = records) -> Tensor:
            return records[number] if epoch else through_backbone(epoch, number)

        trainings[f"cache, {dtype}"] = train(side_network_of(sentences, layer, gradient), batches, from_cache, epochs)
    return trainings


def losses_table(trainings: Mapping[str, Losses]) -> Table:
    """Return each epoch's loss with and without a cache."""
    first = next(iter(trainings.values())).losses
    rows = [
        (
            name,
            *(f"{loss:.6f}" for loss in training.losses),
            "yes"
            if training.losses == first
            else f"{max(abs(a - b) for a, b in zip(training.losses, first, strict=True)):.0e}",
            f"{training.waited_ms[-1]:.1f}",
        )
        for name, training in trainings.items()
    ]
    columns = ("", *(f"epoch {number + 1}" for number in range(len(first))), "equal", "wait for activations, ms")
    title = "Loss of each epoch, your side network (measured in this process)"
    return Table(columns, rows, title=title, note="equal: to the training without a cache, or the largest difference.")


def records_of(stack: LayerStack, batch: Batch) -> dict[str, Record]:
    """Return the activations of a batch's sentences as lists, without padding."""
    with torch.no_grad():
        taps = stack(batch.input_ids, batch.attention_mask)[1]
    lengths = batch.attention_mask.sum(dim=1).tolist()
    return {
        f"s{sample}": [tap[row, : lengths[row]].flatten().tolist() for tap in taps]
        for row, sample in enumerate(batch.sample_ids.tolist())
    }


def cache_test_table(sentences: Sentences, model: str, stale_records: Callable[..., Any]) -> Table:
    """Return how many of three sentences' records a student's test calls stale, after several things were done."""
    test, stack = usable(EXERCISES, "stale_records", stale_records), sentences.stack
    batch = collate(sentences.split, range(0, len(sentences.split), len(sentences.split) // 3 + 1))
    fresh = records_of(stack, batch)
    tolerance = max(abs(number) for record in fresh.values() for tap in record for number in tap) / 100

    def rounded(dtype: str) -> dict[str, Record]:
        def one(tap: list[float]) -> list[float]:
            return stored(torch.tensor(tap).reshape(1, -1, stack.hidden_size), dtype).flatten().tolist()

        return {name: [one(tap) for tap in record] for name, record in fresh.items()}

    quantized = quantize(load_stack(model), QuantizationConfig(storage="int4"))
    trained = load_stack(model)
    with torch.no_grad():
        for weight in trained.parameters():
            weight += 0.1 * weight.abs().mean() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    noisy = {
        name: [functional.dropout(torch.tensor(tap), 0.1).tolist() for tap in record] for name, record in fresh.items()
    }
    name = next(iter(fresh))
    done = {
        "nothing: computed again": records_of(stack, batch),
        "stored in bfloat16": rounded("bfloat16"),
        "stored in INT8": rounded("int8"),
        "one file cut off": fresh | {name: fresh[name][:-1]},
        "dropout in the backbone": noisy,
        "weights stored in INT4 since then": records_of(quantized, batch),
        "weights trained a little since then": records_of(trained, batch),
    }
    rows = [(change, f"{len(test(fresh, cached, tolerance))} of {len(fresh)}") for change, cached in done.items()]
    return Table(("what was done", "stale"), rows, title=f"Your test on real activations, tolerance {tolerance:.2f}")


def storage_table(trained: Sentences, scored: Sentences, model: str, *, epochs: int) -> Table:
    """Return what storing the backbone in fewer bits changes for side networks of torch's side layers.

    scored: sentences that are not trained on.
    """
    batches, tests, rows = trained.batches(), scored.batches(), []
    network: SideNetwork | None = None
    exact: Tensor | None = None
    for storage in STORED:
        stack = quantize(load_stack(model), QuantizationConfig(storage=storage))  # type: ignore[arg-type]
        with torch.no_grad():
            taps, unseen = ([pooled_taps(stack, batch) for batch in part] for part in (batches, tests))
        new_network = side_network_of(trained, None, None)
        losses = train(new_network, batches, lambda epoch, number, taps=taps: taps[number], epochs).losses  # type: ignore[misc]
        network, exact = network or new_network, taps[0][-1] if exact is None else exact
        change = float((taps[0][-1] - exact).norm() / exact.norm())
        scores = (f"{100 * _right(scored_network, tests, unseen):.1f}" for scored_network in (network, new_network))
        rows.append((storage, f"{held_bytes(stack) / 1e6:.1f}", f"{change:.1%}", f"{losses[-1]:.3f}", *scores))
    columns = ("weights in", "held, MB", "last tap changes by", "last loss", "right, %, of float32's", "right, %, own")
    note = (
        "of float32's: the network trained on float32's activations, used on these. own: trained on these activations. "
        f"Of {len(scored.split)} sentences, differences below {100 / len(scored.split) ** 0.5:.0f} may be chance."
    )
    return Table(columns, rows, title="A side network next to each backbone (measured in this process)", note=note)


def _right(network: SideNetwork, batches: Sequence[Batch], taps: Sequence[Tensor]) -> float:
    """Return the share of sentences whose class is right."""
    with torch.no_grad():
        right = [
            (network(batch_taps).argmax(dim=1) == batch.labels).float()
            for batch, batch_taps in zip(batches, taps, strict=True)
        ]
    return float(torch.cat(right).mean())
