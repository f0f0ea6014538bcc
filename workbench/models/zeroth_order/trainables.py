"""The values that forward passes train: where each lies, their noise, and their update (P-RGE, Algorithms 1 and 3).

A query's noise is standard normal, from its seed: the same values whoever draws them, all at once or a layer at a time (Algorithm 1,
line 6).  The definition: one torch.Generator for each query, normals drawn parameter after parameter in stack order, each in pieces of
at most PIECE values.  On processors of another kind the last bit may differ, as logarithm and cosine do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.zeroth_order.step_log import StepLog

HEAD = -1
"""Stands for the layer of what is trained behind the last one."""
PIECE = 1 << 20
"""Values drawn at a time: what is in flight stays in the cache, and full parameters need no noise as large as a word embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One trainable parameter.  name: in the model.  layer: its number in the whole model, or HEAD.  start: of its values in theta."""

    name: str
    layer: int
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of its values."""
        return math.prod(self.shape)


class Binding:
    """What the adapted layers compute with: theta itself, or perturbed copies of a stretch of it.

    copies: (P, values) of P parts, or None for theta.  start: of the stretch in theta.
    """

    def __init__(self) -> None:
        self.copies: Tensor | None = None
        self.start = 0


class Trainables:
    """theta: named parameters in stack order.

    parameters: name -> parameter.  layers: of each, its layer's number or HEAD.  flat: (d,) float32 whose pieces the parameters are,
    or None if they are a model's own.
    ranges: of each layer where its values begin and end in theta, and the sizes of its parameters.
    preceding: sizes of the parameters that earlier pipeline stages hold.  Their noise comes first, so that a stage's own is what it
    is in the whole model.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], layers: Sequence[int], flat: Tensor | None, binding: Binding) -> None:
        self.parameters = dict(parameters)
        self.flat, self.binding = flat, binding
        starts = [0, *accumulate(parameter.numel() for parameter in self.parameters.values())]
        self.slots = tuple(
            Slot(name=name, layer=layer, start=start, shape=tuple(parameter.shape))
            for (name, parameter), layer, start in zip(self.parameters.items(), layers, starts, strict=False)
        )
        self.ranges = _ranges(self.slots)
        self.preceding: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Return whether the parameters are still pieces of `flat`: a copied or converted module has parameters of its own."""
        return self.flat is None or all(
            parameter.data_ptr() == self.flat[slot.start :].data_ptr()
            for slot, parameter in zip(self.slots, self.parameters.values(), strict=True)
        )

    @property
    def num_values(self) -> int:
        """Return d, of this stage."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of values of each parameter."""
        return tuple(slot.size for slot in self.slots)

    def bind(self, copies: Tensor | None, start: int = 0) -> None:
        """Let the next passes compute with perturbed copies (P, values) of theta from `start`; None: with theta itself."""
        self.binding.copies, self.binding.start = copies, start

    def generator(self, seed: int) -> torch.Generator:
        """Return a query's generator, behind what earlier stages draw."""
        generator = torch.Generator().manual_seed(seed)
        for size in self.preceding:
            for _ in _pieces(generator, size):
                pass
        return generator

    def noise(self, seed: int, out: Tensor | None = None) -> Tensor:
        """Return a query's noise (d,) float32, in `out` if it is given."""
        drawn = torch.empty(self.num_values) if out is None else out
        fill(drawn, self.generator(seed), self.sizes)
        return drawn

    @torch.no_grad()
    def move(self, seed: int, scale: float) -> None:
        """Add scale times a query's noise to theta, in place (Algorithm 3, PerturbParameters)."""
        generator = self.generator(seed)
        for parameter in self.parameters.values():
            values = _as_vector(parameter)
            for place, piece in _pieces(generator, parameter.numel()):
                values[place].add_(piece, alpha=scale)

    def apply(self, log: StepLog) -> None:
        """Make a step (Algorithm 1, line 14): the same arithmetic, to the bit, in whatever way the gradients were found."""
        for seed, gradient in zip(log.seeds, log.gradients, strict=True):
            self.move(seed, -log.learning_rate * gradient / len(log.seeds))

    def state(self) -> dict[str, Tensor]:
        """Return copies of the values by name."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set the values.  Raises ConfigError unless names and shapes agree."""
        expected = {slot.name: slot.shape for slot in self.slots}
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if found != expected:
            wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            raise ConfigError(
                f"Trained values of {len(found)} parameters were to be loaded.",
                f"They are not this model's: {wrong[0]} differs, and {len(wrong) - 1} more.",
                "Give the values of the same model, technique and rank.",
            )
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])


def flatten(modules: Sequence[tuple[str, int, nn.Module]], binding: Binding) -> Trainables:
    """Put the parameters of modules into one vector, whose pieces they become.

    modules: name, layer and module of each, in stack order.
    """
    found = [
        (f"{name}.{own}", layer, module, own) for name, layer, module in modules for own in dict(module.named_parameters(recurse=False))
    ]
    flat = torch.empty(sum(module.get_parameter(own).numel() for _, _, module, own in found))
    parameters, at = {}, 0
    for name, _, module, own in found:
        old = module.get_parameter(own)
        piece = flat[at : at + old.numel()].view(old.shape)
        piece.copy_(old.detach())
        module.register_parameter(own, nn.Parameter(piece))
        parameters[name] = module.get_parameter(own)
        at += old.numel()
    return Trainables(parameters, [layer for _, layer, _, _ in found], flat, binding)


def fill(out: Tensor, generator: torch.Generator, sizes: Sequence[int]) -> None:
    """Draw the noise of the next parameters into out (sum of sizes,), float32."""
    for own in out.split(list(sizes)):
        for piece in own.split(PIECE):
            piece.normal_(generator=generator)


def _pieces(generator: torch.Generator, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the noise of a parameter of `size` values: where each piece belongs, and the piece, which the next overwrites."""
    scratch = torch.empty(min(size, PIECE))
    for at in range(0, size, PIECE):
        piece = scratch[: min(PIECE, size - at)]
        yield slice(at, at + len(piece)), piece.normal_(generator=generator)


def _ranges(slots: Sequence[Slot]) -> dict[int, tuple[int, int, tuple[int, ...]]]:
    found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    for slot in slots:
        first, _, sizes = found.get(slot.layer, (slot.start, slot.start, ()))
        found[slot.layer] = (first, slot.start + slot.size, (*sizes, slot.size))
    return found


def _as_vector(parameter: Tensor) -> Tensor:
    # A view even of a matrix that is stored column after column: the noise lies in the order of memory.
    return parameter.detach().view(-1) if parameter.is_contiguous() else parameter.detach().t().view(-1)
