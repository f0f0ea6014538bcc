"""Put this machine's own forward passes under its own roof: what a further part of a pass costs (P-RGE, sections 3.1-3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from workbench.models.products import linear
from workbench.models.zeroth_order import CausalModel, PromptLike
from workbench.plots.zeroth_order_roofline import Pass
from workbench.profiler.host import gemm_rate, memory_rate
from workbench.profiler.timing import time_calls
from workbench.profiler.zeroth_order import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoofline:
    """One thread of this machine.  flops_per_s: of a large product.  bytes_per_s: of memory.  passes: of one model, by rising parts."""

    flops_per_s: float
    bytes_per_s: float
    passes: tuple[Pass, ...]

    @property
    def ridge(self) -> float:
        """Return the FLOPs for each byte from which on arithmetic bounds a pass."""
        return self.flops_per_s / self.bytes_per_s

    def machine(self, num_layers: int) -> Machine:
        """Return the rates for the time model.  What the smallest pass takes beyond its roof is what its layers cost besides."""
        [first, *_] = self.passes
        roof_s = max(first.flops / self.flops_per_s, first.weight_bytes / self.bytes_per_s)
        return Machine(
            flops_per_s=self.flops_per_s,
            memory_bytes_per_s=self.bytes_per_s,
            layer_s=max(0.0, first.seconds - roof_s) / num_layers,
            is_asynchronous=False,
        )


def measure_roofline(
    model: CausalModel, batch: PromptLike, parts: Sequence[int], *, seconds: float = 1.0, pass_budget_s: float = 20.0
) -> HostRoofline:
    """Return this machine's two rates and what passes with so many parts of `batch` take, all timed in turn on one thread.

    seconds: for each rate.  pass_budget_s: for all passes together; every number of parts is timed at least once.
    """
    counts = sorted(set(parts))

    def run(count: int) -> None:
        with torch.inference_mode():
            model.part_losses(batch, count)

    weight_bytes = float(_weight_bytes(model))
    flat = model.trainables.flat
    assert flat is not None, "full parameters have no parts"
    flops = {}
    try:
        for count in counts:
            model.trainables.bind(flat.repeat(count, 1))
            with FlopCounterMode(display=False) as counter:
                run(count)
            flops[count] = float(counter.get_total_flops())
        copies = {count: flat.repeat(count, 1) for count in counts}

        def bind(count: int) -> int:
            model.trainables.bind(copies[count])
            return count

        timings = time_calls({count: (partial(bind, count), run) for count in counts}, repeats=5, budget_s=pass_budget_s)
    finally:
        model.trainables.bind(None)
    rate = gemm_rate(seconds=seconds, product=torch.inference_mode()(linear))  # the products that the passes are made of
    found = tuple(Pass(count, flops[count], weight_bytes, timings[count].seconds) for count in counts)
    return HostRoofline(flops_per_s=rate, bytes_per_s=memory_rate(seconds=seconds), passes=found)


def one_by_one(found: Sequence[Pass]) -> dict[str, list[tuple[float, float]]]:
    """Return milliseconds over the number of parts: in one pass, and as many passes of the smallest kind."""
    first = found[0]
    return {
        "one after the other": [(one.parts, 1e3 * first.seconds * one.parts / first.parts) for one in found],
        "in one pass": [(one.parts, 1e3 * one.seconds) for one in found],
    }


def _weight_bytes(model: CausalModel) -> int:
    """Return the bytes of all matrices that a pass multiplies with: the layers' and the head's, not the table of embeddings."""
    matrices = [one for one in model.backbone.layers.parameters() if one.dim() == 2 and not one.requires_grad]
    weight = getattr(model.head, "weight", None)
    total = sum(one.numel() * one.element_size() for one in matrices)
    return total + (weight.numel() * weight.element_size() if isinstance(weight, torch.Tensor) else 0)
