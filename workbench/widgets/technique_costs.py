"""What a step costs by technique: both passes, the bytes that autograd keeps, the weights trained (PAC+, section II, Fig. 3, Table I)."""

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
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.plots.breakdown import stacked_bars
from workbench.profiler.timing import saved_by_autograd
from workbench.tasks.tokenize import Batch
from workbench.widgets.progress import bar

TECHNIQUES = {
    "full": "full",
    "lora": "LoRA",
    "adapters": "Adapters",
    "parallel_adapters": "Parallel Adapters",
    "parallel_adapters_cached": "Parallel Adapters, cached",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniqueCost:
    """One technique on one batch.  forward_s, backward_s: medians.  saved_bytes: kept for the backward pass, weights left out."""

    technique: str
    trained: int
    forward_s: float
    backward_s: float
    saved_bytes: int

    @property
    def label(self) -> str:
        """Return the technique's name as people write it."""
        return TECHNIQUES[self.technique]


def measure_techniques(
    model: str, batch: Batch, config: ParallelAdapterConfig, *, techniques: Sequence[str] = tuple(TECHNIQUES), repeats: int = 3
) -> tuple[TechniqueCost, ...]:
    """Return every technique's cost of one batch in this process, at full speed; the techniques take turns.  A bar shows how far it is.

    config: of the Parallel Adapters; the others get its kind, outputs and seed.
    """
    steps = {technique: _step(technique, model, batch, config) for technique in bar(techniques, "loading")}
    forward: dict[str, list[float]] = {technique: [] for technique in techniques}
    backward: dict[str, list[float]] = {technique: [] for technique in techniques}
    turns = [(turn, technique) for turn in range(repeats + 1) for technique in techniques]
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
            trained=sum(one.numel() for one in module.parameters() if one.requires_grad),
            forward_s=median(forward[technique]),
            backward_s=median(backward[technique]),
            saved_bytes=_saved_bytes(module, run),
        )
        for technique, (module, run) in steps.items()
    )


def cost_figure(costs: Sequence[TechniqueCost]) -> go.Figure:
    """Return both passes' milliseconds of each technique."""
    parts = {"forward": [1e3 * one.forward_s for one in costs], "backward": [1e3 * one.backward_s for one in costs]}
    title = "A training step by technique"
    return stacked_bars([one.label for one in costs], parts, title=title, label="measured in this process", x_title="ms")


def _step(technique: str, model: str, batch: Batch, config: ParallelAdapterConfig) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return what is trained, and a forward pass up to the loss."""
    stack = load_stack(model)
    if technique in ("full", "lora", "adapters"):
        chosen = TechniqueConfig(
            technique=technique,  # type: ignore[arg-type]
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            kind=config.kind,
            num_outputs=config.num_outputs,
            seed=config.seed,
        )
        stage = TechniqueStage(stack.stage(0, stack.num_layers), chosen)

        def through_all() -> Tensor:
            _, last = stage(batch.input_ids, batch.attention_mask)
            return task_loss(stage.logits(last, batch.attention_mask, batch.sample_ids, 0), batch.labels, config.kind)

        return stage, through_all
    adapter = ParallelAdapter(config).train()
    kept: list[Tensor] = []

    def taps() -> list[Tensor]:
        with torch.no_grad():
            return list(stack(batch.input_ids, batch.attention_mask)[1])

    if technique == "parallel_adapters_cached":
        kept = taps()

    def beside() -> Tensor:
        return task_loss(adapter.predict(kept or taps(), batch.attention_mask, batch.sample_ids), batch.labels, config.kind)

    return adapter, beside


def _saved_bytes(module: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes of all tensors that one forward pass leaves for the backward pass, each storage once."""
    loss, nbytes = saved_by_autograd(run, module.parameters())
    loss.backward()
    return nbytes
