"""The computation of one ring device: embedding, frozen and unfrozen layers, head; its optimizer, and its cache, layer
by layer.

The activation cache of a ring's frozen layers is PAC+'s, layer by layer, until the layer is trained.  The input of a
layer does not change for a sample while all layers below are frozen: the backbone runs without dropout.  Each device
caches the inputs of its frozen layers, so the input of the lowest trained layer is always available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec
from workbench.methods.training.handlers import StageContext, Targets
from workbench.models.parallel_adapter import ParallelAdapterStage
from workbench.models.recomputation import LayerInput, SingleLayers
from workbench.models.stack import BackboneStage
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.runtime.activation_cache import ActivationCache, CacheManifest
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule
from workbench.runtime.state import Run, carry_out
from workbench.schedules.costs import Crossing
from workbench.schedules.moves import moves

Modules = dict[str, nn.Module]
"""Modules by the names that their parameters have in the whole model."""


class RingCompute:
    """A block of layers with their trained modules, and this device's copies of embedding and head.

    config: describes serial adapters inside the layers (Eq. 1), or Parallel Adapters next to them (PAC+, section IV-A).
    backbone: the block, with the embedding.  trained: the modules of each layer.  head: the modules of
    the head.
    side_width: the side network's width, 0 with serial adapters.  folder: where `first_pass` stores activations; None:
    they are computed again.
    """

    folder: Path | None = None

    def __init__(self, config: TechniqueConfig, backbone: BackboneStage) -> None:
        self._backbone, self._side, self.side_width = backbone, None, config.side_width
        self._model = model = TechniqueStage(backbone.part(backbone.start, backbone.stop), config, has_head=True)
        if isinstance(model.adapters, ParallelAdapterStage):
            self._side = side = model.adapters
            self.head = Modules(adapters=nn.ModuleDict({"last": side.last}))
            self.trained = {
                layer: Modules(adapters=side.part(layer, layer + 1)) for layer in range(side.start, side.stop)
            }
            for modules in self.trained.values():
                modules["adapters"].last = None
        else:
            self.head = Modules(head=model.head)
            self.trained = {
                int(layer): Modules(adapters=nn.ModuleDict({layer: adapter}))
                for layer, adapter in model.adapters.items()
            }

    def parted(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Split the model's state (n, t, d) from the side network's, (n, t, 0) if it is not there."""
        return state[..., : self._backbone.hidden_size], state[..., self._backbone.hidden_size :]

    def widened(self, state: Tensor) -> Tensor:
        """Return a state with zeros for the side network's, (n, t, d + d / r)."""
        return pad(state, (0, self._backbone.hidden_size + self.side_width - state.shape[2]))

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return b_0 (n, t, d)."""
        with torch.no_grad():
            return self._backbone.embed(input_ids, attention_mask)

    @torch.no_grad()
    def ahead(self, state: Tensor, attention_mask: Tensor, layers: range, first_unfrozen: int) -> tuple[Any, ...]:
        """Run what waits for no update, and return the values that it writes (see methods.ringada.schedule, P).

        Serial: the frozen layers; (n, t, d).  Parallel: all layers, and the frozen side layers; the next block's input,
        and that of the trained side layers, if there are any: (side state, taps).  state: (n, t, d), with the side
        state (n, t, d + d / r) while all side layers below are frozen.
        """
        frozen = range(layers.start, min(layers.stop, first_unfrozen))
        if self._side is None:
            return (self._run(state, attention_mask, frozen)[0],)
        hidden, below = self.parted(state)
        output, taps = self._run(hidden, attention_mask, layers)
        taps = [*([hidden] if layers.start == 0 else ()), *taps]
        if frozen:
            side = self._side.part(frozen.start, frozen.stop)
            below = side(below if layers.start else None, taps[: side.num_taps], attention_mask)
            taps = taps[side.num_taps :]
        return (output, (below, taps)) if first_unfrozen < layers.stop else (torch.cat([output, below], dim=2),)

    def forward(self, states: Sequence[Any], attention_mask: Tensor, layers: range, *, is_lowest: bool) -> StageContext:
        """Run unfrozen layers.  is_lowest: no layer below is trained, so the gradient of their input is not needed.

        states: serial, the input.  Parallel: (side state, taps) from `ahead`; and the side state of the block below,
        unless `is_lowest`.
        """
        source = None if is_lowest else states[0 if self._side is None else 1].detach().requires_grad_()
        if self._side is None:
            return StageContext(source, self._run(states[0] if source is None else source, attention_mask, layers)[0])
        frozen_below, taps = states[0]
        below = None if layers.start == 0 else frozen_below if source is None else source
        return StageContext(source, self._side.part(layers.start, layers.stop)(below, taps, attention_mask))

    def first_pass(
        self, state: Tensor, attention_mask: Tensor, layers: range, *, is_lowest: bool, keeps_last: bool
    ) -> tuple[Tensor, list[LayerInput], StageContext | None]:
        """Run unfrozen layers as `forward` does, but keep only their inputs (see StageCompute.first_pass)."""
        output, inputs, last = self._single.first_pass(
            state,
            attention_mask,
            None,
            keeps_last=keeps_last,
            start=layers.start,
            needs_gradient=not is_lowest,
            folder=self.folder,
        )
        return output, inputs, None if last is None else StageContext(*last)

    def again(self, layer: int, given: LayerInput, attention_mask: Tensor) -> StageContext:
        """Compute one layer's activations again, or read them, for its backward pass."""
        self._single.again(layer, given, attention_mask)
        return StageContext(given.leaf, given.output)

    @cached_property
    def _single(self) -> SingleLayers:
        return SingleLayers(self._model)

    def score(self, states: Sequence[Tensor], attention_mask: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Accumulate the head's gradient; return the loss, the sum over samples divided by the mini-batch's, and its
        gradient.

        states: the last hidden state (n, t, d); parallel, then the last side state, of which the gradient is.
        """
        leaf = states[-1].detach().requires_grad_()
        last = leaf if self._side is None else (leaf, states[0])
        logits = self._model.logits(last, attention_mask, targets.sample_ids, targets.epoch)
        loss = targets.loss(logits, self._model.config)
        loss.backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    def _run(self, hidden: Tensor, attention_mask: Tensor, layers: range) -> tuple[Tensor, list[Tensor]]:
        """Return the layers' output, (n, s, d) of a decoder's last, and their taps."""
        output, taps = self._backbone.part(layers.start, layers.stop)(hidden, attention_mask)
        return (taps[-1] if layers.stop == self._backbone.num_layers else output), taps


class RingOptimizer:
    """AdamW for a device's trained layers, each with its own step count because they start at different times, and for
    the head.

    updates: number of updates of each layer in the first rounds of a run.  keeps_head: whether this device has the head
    after a round.
    num_noted: number of rounds, for an adaptive policy.  history: each round's value (see prepare.Policy), the same on
    all devices.
    An Optimizer whose steps are rounds.
    """

    def __init__(
        self,
        compute: RingCompute,
        schedule: LinearSchedule,
        weight_decay: float,
        *,
        updates: Callable[[int, Sequence[float]], Mapping[int, int]],
        keeps_head: bool,
        num_noted: int = 0,
    ) -> None:
        def of(named: Modules) -> FlatAdamW:
            return FlatAdamW(nn.ModuleDict(named), learning_rate=schedule, weight_decay=weight_decay)

        self._schedule, self._updates = schedule, updates
        self._layers = {index: of(modules) for index, modules in compute.trained.items()}
        self._head = of(compute.head)
        self._parts = [*self._layers.values(), *([self._head] if keeps_head else [])]
        self.num_steps = 0
        self.history = torch.zeros(num_noted) if num_noted else None

    @property
    def state_bytes(self) -> int:
        """Return the bytes of parameters, gradients and moments (see Optimizer)."""
        return sum(part.state_bytes for part in self._parts)

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
        """Load the head of another device, which has trained for `step` mini-batches."""
        for vector, values in zip(self._head.state_vectors(), state.chunk(3), strict=True):
            vector.copy_(values)
        self._head.set_num_steps(step)

    def take_all(self, mean: Tensor) -> None:
        """Load weights and moments, (values,)."""
        vectors = self.state_vectors()
        for vector, values in zip(vectors, mean.split([len(vector) for vector in vectors]), strict=True):
            vector.copy_(values)

    def state_vectors(self) -> tuple[Tensor, ...]:
        """Return all state that determines the next step (see Optimizer)."""
        vectors = tuple(vector for part in self._parts for vector in part.state_vectors())
        return vectors if self.history is None else (*vectors, self.history)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return parameters and moments by name (see Optimizer)."""
        tensors = {name: tensor for part in self._parts for name, tensor in part.named_tensors().items()}
        return tensors if self.history is None else tensors | {"history": self.history}

    def set_num_steps(self, num_steps: int) -> None:
        """Continue as after so many rounds (see Optimizer)."""
        self.num_steps = num_steps
        counts = self._updates(num_steps, [] if self.history is None else self.history.tolist())
        for layer, part in self._layers.items():
            part.set_num_steps(counts[layer])
        self._head.set_num_steps(max(counts.values()))

    def give_up_step(self) -> None:
        """Clear the gradients (see Optimizer)."""
        for part in (*self._layers.values(), self._head):
            part.give_up_step()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """The hidden states in front of some layers, on the disk.

    lengths: tokens of every sample.  lowest: no layer below it is ever trained.
    """

    folder: Path
    lengths: tuple[int, ...]
    crossing: Crossing
    lowest: int = 0
    _caches: dict[int, ActivationCache] = field(default_factory=dict)

    def keep(self, layer: int, samples: Sequence[int], hidden: Tensor) -> None:
        """Store the input (n, t, d) of a layer, (n, t + s, d) for a decoder.  Raises CacheError if the disk is full."""
        if layer < self.lowest:
            return
        if layer not in self._caches:
            self._caches[layer] = ActivationCache.create(self._folder(layer), self._manifest(layer))
        decoder_tokens = self.crossing.tokens(layer, 0)
        tokens = hidden.shape[1] - decoder_tokens
        self._caches[layer].write_batch(
            samples, hidden.split([tokens, decoder_tokens], dim=1) if decoder_tokens else [hidden]
        )

    def read(self, layer: int, samples: Sequence[int], padded_length: int) -> Tensor:
        """Return the stored input of a layer, with zeros in the padding."""
        return torch.cat(self._caches[layer].batch(samples, padded_length), dim=1)

    def take_over(self, moving: Sequence[tuple[int, int, int]], rank: int, run: Run, cluster: Cluster) -> None:
        """Continue with a ring's caches after layers have moved; all ranks do it at once.

        moving: (layer, the rank that has its inputs, the rank that needs them).
        """
        for layer, holder, _ in moving:
            if holder == rank:
                self._caches[layer] = ActivationCache.reopen(self._folder(layer), self._manifest(layer), verify=False)
        moving = [move for move in moving if move[1] != move[2]]
        specs = {str(layer): Spec((self._manifest(layer).nbytes,), "uint8") for layer, *_ in moving}
        rounds = moves(
            {str(move[0]): move[2:] for move in moving}, {str(move[0]): move[1:2] for move in moving}, specs, cluster
        )
        contents = {
            str(layer): torch.from_numpy(self._caches[layer].rows) for layer, holder, _ in moving if holder == rank
        }
        for layer, _, receiver in moving:
            if receiver == rank:
                self._caches[layer] = ActivationCache.create(self._folder(layer), self._manifest(layer))
        into = {
            str(layer): torch.from_numpy(self._caches[layer].rows) for layer, _, receiver in moving if receiver == rank
        }
        carry_out(rounds, rank, run, contents, into)
        for layer, holder, _ in moving:
            if holder == rank:
                self._caches.pop(layer).remove()

    def _folder(self, layer: int) -> Path:
        return self.folder / f"layer-{layer}"

    def _manifest(self, layer: int) -> CacheManifest:
        decoder_tokens = self.crossing.tokens(layer, 0)
        return CacheManifest(
            fingerprint="",
            samples=tuple(range(len(self.lengths))),
            lengths=self.lengths,
            num_taps=1,
            width=self.crossing.hidden_size + self.crossing.side_width,
            dtype="float32",
            num_target_taps=int(decoder_tokens > 0),
            target_length=decoder_tokens,
        )

    def forget_above(self, layer: int) -> None:
        """Delete the inputs of higher layers, which no longer follow only frozen layers."""
        for above in [cached for cached in self._caches if cached > layer]:
            self._caches.pop(above).remove()

    @property
    def nbytes(self) -> int:
        """Return the bytes on the disk."""
        return sum(cache.manifest.nbytes for cache in self._caches.values())
