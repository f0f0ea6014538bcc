"""The pipeline that both sides of the runtime benchmark train: the same layers, inputs, loss, links and pacing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.schedule import Op, Schedule
from workbench.models.loading import load_stage
from workbench.runtime.executor import execute
from workbench.runtime.pacing import Pacer
from workbench.runtime.transport import TensorSpec, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBench:
    """forward_s, backward_s: of one layer and one micro-batch on an unslowed core.  Shapes are the same for every micro-batch."""

    model: str
    plan: Plan
    cluster: Cluster
    schedule: Schedule
    sequence_length: int
    hidden_size: int
    forward_s: float
    backward_s: float
    rounds: int
    steps: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of a micro-batch's activations."""
        return self.plan.micro_batch_size, self.sequence_length, self.hidden_size


class TrainedStage(nn.Module):
    """A stage's layers, all of their weights trained.  hidden: (n, t, d) throughout; the embedding is not part of the benchmark."""

    def __init__(self, model: str, start: int, stop: int) -> None:
        super().__init__()
        # Without the embedding every stage maps (n, t, d) to (n, t, d), which is what torch's pipeline asks for.
        self.stage = load_stage(model, start, stop)
        self.stage.embedding = None
        for parameter in self.stage.layers.parameters():
            parameter.requires_grad_(True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the stage's output."""
        return self.stage(hidden, torch.ones(hidden.shape[:2], dtype=torch.int64))[0]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error, on both sides."""
    return nn.functional.mse_loss(output, target)


def made_up_data(bench: PipelineBench) -> tuple[Tensor, Tensor]:
    """Return a mini-batch's inputs and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    count, length, width = bench.shape
    whole = (bench.plan.num_micro_batches * count, length, width)
    return torch.randn(whole, generator=generator), torch.randn(whole, generator=generator)


class TorchPipeline:
    """torch.distributed.pipelining's Schedule1F1B, its chunks paced as ours."""

    def __init__(self, bench: PipelineBench, rank: int, module: TrainedStage, pacer: Pacer) -> None:
        plan = bench.plan
        stage = plan.stages[rank]
        self._rank, self._last = rank, len(plan.stages) - 1
        paced = _PacedStage(
            module,
            rank,
            len(plan.stages),
            torch.device("cpu"),
            pacer=pacer,
            forward_s=stage.num_layers * bench.forward_s,
            backward_s=stage.num_layers * bench.backward_s,
        )
        self._schedule = Schedule1F1B(paced, plan.num_micro_batches, loss_fn=lambda output, target: loss_of(output, target))
        self._data, self._target = made_up_data(bench)

    def step(self) -> float | None:
        """Run a mini-batch forward and backward; return its mean loss on the last stage."""
        losses: list[Tensor] = []
        if self._rank == 0 == self._last:
            self._schedule.step(self._data, target=self._target, losses=losses)
        elif self._rank == 0:
            self._schedule.step(self._data)
        elif self._rank == self._last:
            self._schedule.step(target=self._target, losses=losses)
        else:
            self._schedule.step()
        return float(torch.stack(losses).mean()) if losses else None


class _PacedStage(PipelineStage):
    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        device: torch.device,
        *,
        pacer: Pacer,
        forward_s: float,
        backward_s: float,
    ) -> None:
        super().__init__(module, index, count, device)
        self._pacer, self._forward_s, self._backward_s = pacer, forward_s, backward_s

    def forward_one_chunk(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return self._pacer.run(lambda: super(_PacedStage, self).forward_one_chunk(*args, **kwargs), self._forward_s).result

    def backward_one_chunk(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return self._pacer.run(lambda: super(_PacedStage, self).backward_one_chunk(*args, **kwargs), self._backward_s).result


class OurPipeline:
    """The workbench's executor on the same stage."""

    def __init__(self, bench: PipelineBench, rank: int, module: TrainedStage, pacer: Pacer, transport: Transport) -> None:
        self._bench, self._rank, self._module, self._pacer, self._transport = bench, rank, module, pacer, transport
        self._layers = bench.plan.stages[rank].num_layers
        self._last = len(bench.plan.stages) - 1
        data, target = made_up_data(bench)
        self._data = data.split(bench.plan.micro_batch_size)
        self._target = target.split(bench.plan.micro_batch_size)

    def step(self) -> float | None:
        """Run a mini-batch forward and backward; return its mean loss on the last stage."""
        schedule = self._bench.schedule
        done = execute(
            schedule,
            self._rank,
            handlers={"F": self._forward, "B": self._backward, "STEP": lambda op, reads: (None,) * len(op.writes)},
            transport=self._transport,
            spec=lambda value: TensorSpec(self._bench.shape, torch.float32),
            inputs={value: None for value in schedule.inputs[self._rank]},
            pacer=self._pacer,
            full_speed_s=self._full_speed_s,
        )
        losses = [content for value, content in done.outputs.items() if value.name == "loss"]
        return float(torch.stack(losses).mean()) if losses else None

    def _full_speed_s(self, op: Op) -> float:
        return self._layers * {"F": self._bench.forward_s, "B": self._bench.backward_s, "STEP": 0.0}[op.kind]

    def _forward(self, op: Op, reads: tuple) -> tuple:
        arrived = [content for value, content in zip(op.reads, reads, strict=True) if value.name == "act"]
        source = arrived[0].requires_grad_() if arrived else self._data[op.microbatch]
        output = self._module(source)
        if self._rank == self._last:
            output = loss_of(output, self._target[op.microbatch])
        return tuple((source, output) if value.name == "ctx" else output.detach() for value in op.writes)

    def _backward(self, op: Op, reads: tuple) -> tuple:
        (source, output), *gradients = sorted(reads, key=lambda content: isinstance(content, Tensor))
        # torch's schedule divides by the number of micro-batches after the pass; the division is not timed on either side.
        torch.autograd.backward(output, gradients[0] if gradients else None)
        return tuple(source.grad if value.name == "grad" else None for value in op.writes)
