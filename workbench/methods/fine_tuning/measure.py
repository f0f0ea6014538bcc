"""Profile a technique on this host: seconds and bytes of every layer, from the same calls as in a run (section V-A,
'Profiling').
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from workbench.core.profile import Bytes, Grid, Layers
from workbench.core.schedule import STEP
from workbench.methods.common.scaling import BATCH_SIZES, SEQUENCE_LENGTHS, TARGET_LENGTH, crossing_bytes, lengths_up_to
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.training.handlers import StageContext, Targets
from workbench.models.layer_inputs import Contexts
from workbench.models.optimization import backpropagate
from workbench.models.parallel_adapter import made_up_mask
from workbench.models.quantization import held_bytes
from workbench.models.sharding.trained import TrainedLayer
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.profiler.grids import time_grids
from workbench.profiler.layers import BUDGET_S, Span, Stacks, kept_bytes, profile_layers, saved_by_autograd
from workbench.profiler.timing import Call, Maker, core_clock
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule


def measure_layers(
    stack: LayerStack,
    config: TechniqueConfig,
    *,
    max_length: int,
    batch_sizes: tuple[int, ...] = BATCH_SIZES,
    lengths: tuple[int, ...] = SEQUENCE_LENGTHS,
    budget_s: float = BUDGET_S,
) -> Layers:
    """Return the profile of every layer on one core of this host at full speed (see profiler.layers)."""
    lengths = lengths_up_to(max_length, lengths, reads_images=stack.family.reads_images)
    stacks = Stacks(stack.num_layers, stack.num_encoder_layers)
    context_at = max_length if stack.family.reads_images else 32
    benches = {span: _Bench(stack, config, span, context_at) for span in stacks.spans}
    # One optimizer for all of them, as in a run: many small ones would each add overhead.
    optimizer = FlatAdamW(
        nn.ModuleList(bench.model for bench in benches.values()),
        learning_rate=LinearSchedule(peak=1e-3, num_steps=100_000),
        weight_decay=0.01,
    )
    return profile_layers(
        stacks,
        benches,
        batch_sizes,
        lengths,
        budget_s=budget_s,
        layer_bytes=lambda layer: (
            _parameter_bytes(benches[stacks.span_of(layer)].model) | crossing_bytes(stack, layer, config.side_width)
        ),
        prepared={"B": "F"},  # the forward pass keeps the backward pass's data, as in a run
        update={STEP: lambda batch, length: optimizer.step},
    )


def measure_parts(
    stack: LayerStack,
    config: TechniqueConfig,
    *,
    max_length: int,
    device: str | torch.device = "cpu",
) -> dict[str, Grid]:
    """Return the seconds of a layer's heads and columns, all together and for one group (see schedules.division).

    device: a torch device, which gets its input from the host and returns its result to it, as in a run.
    """
    model = _build(stack, config, Span(0, 1))
    layer, backbone = TrainedLayer(model, 0), model.backbone
    makers, prepared = dict[str, Maker](), dict[str, str]()

    def heads(hidden: Tensor, contexts: Contexts, groups: int) -> Tensor:
        return layer.heads(hidden, contexts, 0, groups)

    def columns(hidden: Tensor, contexts: Contexts, groups: int) -> Tensor:
        return layer.columns(hidden, 0, groups)

    def passes(compute: Callable[[Tensor, Contexts, int], Tensor], groups: int) -> Maker:
        def back(batch: int, length: int) -> Call:
            hidden, mask = torch.randn(batch, length, stack.hidden_size), made_up_mask(batch, length)
            contexts = backbone.contexts(mask, hidden)

            def forward() -> Tensor:
                return compute(hidden.detach().requires_grad_().to(device), contexts, groups).cpu()

            return forward, lambda output: backpropagate(output, torch.ones_like(output))

        return back

    for kind, compute, groups in (("H", heads, layer.num_groups), ("C", columns, layer.num_columns)):
        makers[f"{kind}B"], makers[f"{kind}B1"] = passes(compute, groups), passes(compute, 1)
        prepared |= {f"{kind}B": f"{kind}F", f"{kind}B1": f"{kind}F1"}
    lengths = lengths_up_to(max_length, SEQUENCE_LENGTHS, reads_images=stack.family.reads_images)
    clock = core_clock() if device == "cpu" else time.perf_counter
    return time_grids(makers, BATCH_SIZES, lengths, prepared=prepared, budget_s=BUDGET_S, clock=clock)


def _parameter_bytes(model: TechniqueStage) -> dict[str, int]:
    """Return the bytes of a stage's frozen and trained parameters, as fields of LayerProfile."""
    trained, head = model.trained().values(), model.backbone.language_model_head
    modules = nn.ModuleList([model] if head is None else [model, head])
    return {
        "frozen_bytes": held_bytes(modules, without=trained),
        "trainable_bytes": sum(parameter.nbytes for parameter in trained),
    }


def _build(stack: LayerStack, config: TechniqueConfig, span: Span) -> TechniqueStage:
    # A copy: modules that a technique inserts into layers stay in them.
    return TechniqueStage(copy.deepcopy(stack.stage(*span)), config)


class _Bench:
    """Calls of one stage on synthetic inputs of any size.

    context_at: the number of a sample's tokens at which its context is counted.
    """

    def __init__(self, stack: LayerStack, config: TechniqueConfig, span: Span, context_at: int) -> None:
        self.model, self._context_at = _build(stack, config, span), context_at
        self._compute = StageCompute(self.model)
        self._is_last = span.stop == stack.num_layers
        self._has_decoder = stack.num_encoder_layers is not None

    @property
    def calls(self) -> dict[str, Maker]:
        """Return the calls to time, by kind of operation."""
        return {"B": self.backward}

    def backward(self, batch: int, length: int) -> Call:
        """Return the backward pass, prepared by its forward pass."""
        inputs = self._inputs(batch, length)

        def back(context: StageContext) -> Tensor | None:
            width = -self.model.config.side_width  # 0: all
            return self._compute.backward(
                context, None if self._is_last else torch.ones_like(context.output[..., width:])
            )

        return (lambda: self._compute.forward(*inputs)), back

    def context_bytes(self, batch: int = 4) -> Bytes:
        """Return the bytes that autograd keeps between both passes, without parameters."""

        def context_bytes(length: int) -> int:
            inputs = self._inputs(batch, length)
            return saved_by_autograd(lambda: self._compute.forward(*inputs), self.model.parameters())[1]

        return kept_bytes(
            context_bytes, batch, length=self._context_at, other=2 * self._context_at, has_decoder=self._has_decoder
        )

    def _inputs(self, batch: int, length: int) -> tuple[Tensor, Tensor, Targets | None]:
        source, _, _ = self.model.backbone.make_inputs(batch, length, TARGET_LENGTH)
        if source.is_floating_point() and self.model.backbone.start:
            source = pad(source, (0, self.model.config.side_width))
        targets = Targets.made_up(self.model.config.kind, batch, length) if self._is_last else None
        return source, made_up_mask(batch, length), targets
