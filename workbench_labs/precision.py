"""Costs and gains of PAC+'s choices, measured on this machine.

Fewer bits: the error of weights and of cached activations (section IV-D, Eq. 1-2, Fig. 8).  Techniques: both passes of
a step, the bytes that autograd keeps, the weights trained (section II, Fig. 3, Table I).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import plotly.graph_objects as go
import torch
from torch import Tensor, nn

from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.models.quantization import dequantize_blocks, quantize_blocks
from workbench.plots.breakdown import stacked_bars
from workbench.profiler.layers import saved_by_autograd
from workbench.runtime.activation_records import RecordLayout
from workbench.tasks.tokenize import Batch
from workbench.trainings.common import technique_stage
from workbench.widgets.run_panel import bar

BLOCKWISE = ("int8", "int4", "nf4")


def block_errors(weight: torch.Tensor, *, block_size: int) -> dict[str, tuple[float, float]]:
    """Return the root mean square and the largest error of a weight's first block after Eq. 1 and 2, for each storage
    dtype.
    """
    block = weight.detach().reshape(-1)[:block_size].float()
    errors = {}
    for storage in BLOCKWISE:
        codes, constants = quantize_blocks(block, storage, block_size)
        errors[storage] = errors_of(dequantize_blocks(codes, constants, storage).reshape(-1)[: len(block)] - block)
    return errors


def errors_of(off: torch.Tensor) -> tuple[float, float]:
    """Return the root mean square and the largest of some differences."""
    return float(off.square().mean().sqrt()), float(off.abs().max())


def stored(taps: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return taps (..., d) as the workbench's cache writes and reads them."""
    layout, rows = _layout(taps, dtype), taps.reshape(-1, taps.shape[-1])
    raw = torch.zeros(len(rows), layout.row_bytes, dtype=torch.uint8)
    layout.encode(rows, raw)
    return layout.decode(raw).float().reshape(taps.shape)


def _layout(taps: torch.Tensor, dtype: str) -> RecordLayout:
    return RecordLayout(dtype=dtype, width=taps.shape[-1], num_taps=1)


def cache_errors(tap: torch.Tensor, *, dtypes: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Return a token's bytes and the relative root-mean-square error of a tap (rows, d) that was written and read, for
    each dtype.
    """
    errors = {}
    for dtype in dtypes:
        usual, _ = errors_of(stored(tap, dtype) - tap)
        errors[dtype] = (_layout(tap, dtype).row_bytes, usual / errors_of(tap)[0])
    return errors


TECHNIQUES = {
    "full": "full",
    "lora": "LoRA",
    "adapters": "Adapters",
    "parallel_adapters": "Parallel Adapters",
    "parallel_adapters_cached": "Parallel Adapters, cached",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniqueCost:
    """One technique on one batch.  forward_s, backward_s: medians.  saved_bytes: stored for the backward pass, without
    the weights.
    """

    technique: str
    trained: int
    forward_s: float
    backward_s: float
    saved_bytes: int

    @property
    def label(self) -> str:
        """Return the technique's usual name."""
        return TECHNIQUES[self.technique]


def measure_techniques(
    model: str, batch: Batch, config: ParallelAdapterConfig, *, repeats: int = 3
) -> tuple[TechniqueCost, ...]:
    """Return every technique's cost of one batch in this process, at full speed; the techniques take turns.  A bar
    shows the progress.

    config: the Parallel Adapters' configuration; the others get its kind, outputs and seed.
    """
    steps = {technique: _step(technique, model, batch, config) for technique in bar(list(TECHNIQUES), "loading")}
    forward: dict[str, list[float]] = {technique: [] for technique in TECHNIQUES}
    backward: dict[str, list[float]] = {technique: [] for technique in TECHNIQUES}
    turns = [(turn, technique) for turn in range(repeats + 1) for technique in TECHNIQUES]
    for turn, technique in bar(turns, "training steps"):
        begin = time.perf_counter()
        loss = steps[technique][1]()
        middle = time.perf_counter()
        loss.backward()
        if turn:  # the first turn warms up
            forward[technique].append(middle - begin)
            backward[technique].append(time.perf_counter() - middle)
    return tuple(
        TechniqueCost(
            technique=technique,
            trained=sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad),
            forward_s=median(forward[technique]),
            backward_s=median(backward[technique]),
            saved_bytes=_saved_bytes(module, run),
        )
        for technique, (module, run) in steps.items()
    )


def cost_figure(costs: Sequence[TechniqueCost]) -> go.Figure:
    """Return the milliseconds of both passes for each technique."""
    parts = {"forward": [1e3 * cost.forward_s for cost in costs], "backward": [1e3 * cost.backward_s for cost in costs]}
    title = "A training step by technique"
    return stacked_bars(
        [cost.label for cost in costs], parts, title=title, label="measured in this process", x_title="ms"
    )


def _step(
    technique: str, model: str, batch: Batch, config: ParallelAdapterConfig
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the trained parameters, and a function that runs a forward pass up to the loss."""
    stack = load_stack(model)
    if technique in ("full", "lora", "adapters"):
        stage = technique_stage(stack, config, technique=technique, seed=config.seed)

        def through_all() -> Tensor:
            _, last = stage(batch.input_ids, batch.attention_mask)
            return task_loss(stage.logits(last, batch.attention_mask, batch.sample_ids, 0), batch.labels, config.kind)

        return stage, through_all
    adapter = ParallelAdapter(config).train()
    cached: list[Tensor] = []

    def taps() -> list[Tensor]:
        with torch.no_grad():
            return list(stack(batch.input_ids, batch.attention_mask)[1])

    if technique == "parallel_adapters_cached":
        cached = taps()

    def through_side_network() -> Tensor:
        return task_loss(
            adapter.predict(cached or taps(), batch.attention_mask, batch.sample_ids), batch.labels, config.kind
        )

    return adapter, through_side_network


def _saved_bytes(module: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes of all tensors that one forward pass keeps for the backward pass, each storage once."""
    loss, nbytes = saved_by_autograd(run, module.parameters())
    loss.backward()
    return nbytes
