"""The computation of one ring device: embedding, frozen and unfrozen layers, head; and its optimizer, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from workbench.methods.fine_tuning.handlers import StageContext
from workbench.methods.training.handlers import Targets
from workbench.models.parallel_adapter import task_loss
from workbench.models.stack import BackboneStage
from workbench.models.techniques import TechniqueStage
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule


class RingCompute:
    """A block of layers with their adapters, and this device's copies of embedding and head.  first: a stage with the embedding."""

    def __init__(self, model: TechniqueStage, first: BackboneStage) -> None:
        self.model, self._first = model, first
        self._parts: dict[range, BackboneStage] = {}

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return b_0 (n, t, d)."""
        with torch.no_grad():
            return self._first.embed(input_ids, attention_mask)

    def frozen(self, hidden: Tensor, attention_mask: Tensor, layers: range) -> Tensor:
        """Return the output of layers whose adapters are frozen."""
        with torch.no_grad():
            return self._run(hidden, attention_mask, layers)

    def forward(self, hidden: Tensor, attention_mask: Tensor, layers: range, *, is_lowest: bool) -> StageContext:
        """Run unfrozen layers.  is_lowest: no layer below is trained, so the gradient of their input is not needed."""
        source = None if is_lowest else hidden.detach().requires_grad_()
        return StageContext(source, self._run(hidden if source is None else source, attention_mask, layers))

    def backward(self, context: StageContext, gradient: Tensor) -> Tensor | None:
        """Accumulate the adapters' gradients; return the gradient of the layers' input, None for the lowest layers."""
        torch.autograd.backward(context.output, gradient)
        return None if context.hidden is None else context.hidden.grad

    def score(self, hidden: Tensor, attention_mask: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Accumulate the head's gradient; return the loss, the sum over samples divided by the mini-batch's, and its gradient."""
        leaf, config = hidden.detach().requires_grad_(), self.model.config
        logits = self.model.logits(leaf, attention_mask, targets.sample_ids, targets.epoch)
        loss = task_loss(logits, targets.labels, config.kind, reduction="sum", label_std=config.label_std) / targets.total
        loss.backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    def _run(self, hidden: Tensor, attention_mask: Tensor, layers: range) -> Tensor:
        if layers not in self._parts:
            self._parts[layers] = self.model.backbone.part(layers.start, layers.stop)
        part = self._parts[layers]
        output, taps = part(hidden, attention_mask)
        return taps[-1] if part.stop == part.num_layers else output


class RingOptimizer:
    """AdamW for a device's adapters, each with its own step count because they start at different times, and for the head.

    updates: number of updates of each layer in the first rounds of a run.  keeps_head: whether this device has the head after a round.
    num_noted: number of rounds, for an adaptive policy.  history: each round's value (see rounds.Policy), the same on all devices.
    An Optimizer whose steps are rounds.
    """

    def __init__(
        self,
        model: TechniqueStage,
        schedule: LinearSchedule,
        weight_decay: float,
        *,
        updates: Callable[[int, Sequence[float]], Mapping[int, int]],
        keeps_head: bool,
        num_noted: int = 0,
    ) -> None:
        def of(named: dict[str, nn.Module]) -> FlatAdamW:
            return FlatAdamW(nn.ModuleDict(named), learning_rate=schedule, weight_decay=weight_decay)

        assert model.head is not None
        self._schedule, self._updates = schedule, updates
        self._layers = {int(index): of({"adapters": nn.ModuleDict({index: adapter})}) for index, adapter in model.adapters.items()}
        self._head = of({"head": model.head})
        self._kept = [*self._layers.values(), *([self._head] if keeps_head else [])]
        self.num_steps = 0
        self.history = torch.zeros(num_noted) if num_noted else None

    @property
    def state_bytes(self) -> int:
        """Return the bytes of parameters, gradients and moments (see Optimizer)."""
        return sum(part.state_bytes for part in self._kept)

    def update(self, layers: Iterable[int], step: int) -> None:
        """Update the adapters of some layers in a mini-batch.  step: mini-batches before it in the whole run."""
        for layer in layers:
            self._layers[layer].step(self._schedule(step))

    def squared_gradients(self, layers: Iterable[int]) -> Tensor:
        """Return the sum of some layers' squared gradients."""
        return torch.stack([self._layers[layer].gradients.square().sum() for layer in layers]).sum()

    def update_head(self, step: int) -> Tensor:
        """Update the head; return its weights and moments, (head_values,)."""
        self._head.step(self._schedule(step))
        return torch.cat(self._head.state_vectors())

    def take_head(self, state: Tensor, step: int) -> None:
        """Load the head of another device, as of after so many mini-batches."""
        for own, given in zip(self._head.state_vectors(), state.chunk(3), strict=True):
            own.copy_(given)
        self._head.set_num_steps(step)

    def take_all(self, mean: Tensor) -> None:
        """Load weights and moments, (values,)."""
        own = self.state_vectors()
        for vector, given in zip(own, mean.split([len(vector) for vector in own]), strict=True):
            vector.copy_(given)

    def state_vectors(self) -> tuple[Tensor, ...]:
        """Return all state that determines the next step (see Optimizer)."""
        own = tuple(vector for part in self._kept for vector in part.state_vectors())
        return own if self.history is None else (*own, self.history)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return parameters and moments by name (see Optimizer)."""
        own = {name: tensor for part in self._kept for name, tensor in part.named_tensors().items()}
        return own if self.history is None else own | {"history": self.history}

    def load_named_tensors(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Load parameters and moments by name, and the number of rounds done (see Optimizer)."""
        for name, mine in self.named_tensors().items():
            mine.copy_(tensors[name])
        self.set_num_steps(num_steps)

    def set_num_steps(self, num_steps: int) -> None:
        """Continue as after so many rounds (see Optimizer)."""
        self.num_steps = num_steps
        counts = self._updates(num_steps, [] if self.history is None else self.history.tolist())
        for layer, part in self._layers.items():
            part.set_num_steps(counts[layer])
        self._head.set_num_steps(max(counts.values()))
