"""The values that forward passes train: their places, their perturbations, and their update (P-RGE, Algorithms 1 and
3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.core.ranges import Positive, Width, require_ranges
from workbench.methods.p_rge.options import Projections
from workbench.methods.p_rge.zeroth_order.directions import NORMAL, Directions, Draw, Shape
from workbench.methods.p_rge.zeroth_order.momentum import LowRankMomentum
from workbench.methods.p_rge.zeroth_order.step_log import StepLog

HEAD = -1
"""The layer number of trainable values after the last layer."""


ZerothOrderTechnique = Literal["lora_fa", "lora", "dora", "vera", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableConfig:
    """Which values are trained.

    technique: LoRA-FA trains B next to a frozen A; LoRA both; DoRA their direction and a magnitude; VeRA two vectors
    next to frozen, shared A and B (Appendix B); full all parameters.
    projections: next to which projections of a layer: queries and values (P-RGE, Appendix D.3), or all of them (MobiZO,
    arXiv:2409.15520v3).
    rank, alpha: r and alpha, the update is alpha / r x A B (Appendix D.3).  VeRA has no alpha.
    num_outputs: number of outputs of the linear head added to models without a vocabulary (encoders, images); 0 if the
    model has one.
    seed: seed of A and of that head.
    """

    technique: ZerothOrderTechnique = "lora_fa"
    projections: Projections = "query_value"
    rank: Width = 16
    alpha: Positive = 32.0
    num_outputs: Annotated[int, Meta(ge=0, le=10**9)] = 0
    seed: int = 0

    def __post_init__(self) -> None:
        require_ranges(self, "Training by forward passes")

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings that identify a run.  The default projections are left out, as in older runs."""
        settings = asdict(self)
        if self.projections == "query_value":
            del settings["projections"]
        return settings

    def shapes(self, inputs: int, outputs: int) -> tuple[Shape, ...]:
        """Return the shapes of the parameters added to a projection.  Empty for 'full'."""
        a, b = (inputs, self.rank), (self.rank, outputs)
        shapes_of: dict[str, tuple[Shape, ...]] = {
            "lora_fa": (b,),
            "lora": (a, b),
            "dora": (a, b, (outputs,)),
            "vera": ((self.rank,), (outputs,)),
        }
        return shapes_of.get(self.technique, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One trainable parameter.

    name: its name in the model.  layer: its layer's number in the whole model, or HEAD.  start: first index in theta.
    """

    name: str
    layer: int = HEAD
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of its values."""
        return math.prod(self.shape)


class Binding:
    """The values with which the adapted layers compute: theta itself, or perturbed copies of a range of it.

    copies: (P, values) for P parts, or None for theta.  start: begin of the range in theta.
    """

    def __init__(self) -> None:
        self.copies: Tensor | None = None
        self.start = 0


class Trainables:
    """theta: named parameters in stack order.

    parameters: name -> parameter.  layers: each parameter's layer number or HEAD.  flat: (d,) float32 of which the
    parameters are views, or None if they are a model's own.
    ranges: for each layer the range of its values in theta, and the shapes of its parameters.
    momentum: the momentum since the first step that has one; None before it.
    preceding: shapes of the parameters of earlier pipeline stages.  Their noise is drawn first, so that a stage's own
    noise is the same as in the whole model.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], layers: Sequence[int], flat: Tensor | None, binding: Binding
    ) -> None:
        self.parameters = dict(parameters)
        self.flat, self.binding = flat, binding
        starts = [0, *accumulate(parameter.numel() for parameter in self.parameters.values())]
        self.slots = tuple(
            Slot(name=name, layer=layer, start=start, shape=tuple(parameter.shape))
            for (name, parameter), layer, start in zip(self.parameters.items(), layers, starts, strict=False)
        )
        self.ranges = _ranges(self.slots)
        self.preceding: tuple[Shape, ...] = ()
        self.momentum: LowRankMomentum | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether the parameters are still views of `flat`.  A copied or converted module has separate
        parameters.
        """
        return self.flat is None or all(
            parameter.data_ptr() == self.flat[slot.start :].data_ptr()
            for slot, parameter in zip(self.slots, self.parameters.values(), strict=True)
        )

    @property
    def num_values(self) -> int:
        """Return d, the number of values of this stage."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of values of each parameter."""
        return tuple(slot.size for slot in self.slots)

    def bind(self, copies: Tensor | None, start: int = 0) -> None:
        """Make the next passes compute with perturbed copies (P, values) of theta from `start`.  None: with theta
        itself.
        """
        self.binding.copies, self.binding.start = copies, start

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Return the shape of each parameter."""
        return tuple(slot.shape for slot in self.slots)

    def draw(self, seed: int, directions: Directions = NORMAL) -> Draw:
        """Return a query's draw, advanced past the parameters of earlier stages."""
        return directions.draw(seed, self.preceding)

    def noise(self, seed: int, directions: Directions = NORMAL) -> Tensor:
        """Return a query's direction (d,) float32."""
        drawn = torch.empty(self.num_values)
        self.draw(seed, directions).fill(drawn, self.shapes)
        return drawn

    @torch.no_grad()
    def move(self, seed: int, scale: float, directions: Directions = NORMAL) -> None:
        """Add scale times a query's direction to theta, in place (Algorithm 3, PerturbParameters)."""
        draw = self.draw(seed, directions)
        for parameter in self.parameters.values():
            values = parameter.detach()
            # A view even of a column-major matrix: noise follows the memory order.
            values = values if values.is_contiguous() else values.t()
            flat = values.view(-1)
            for place, piece in draw.pieces(tuple(values.shape)):
                flat[place].add_(piece, alpha=scale)

    def apply(self, log: StepLog) -> None:
        """Apply a step (Algorithm 1, line 14), with momentum if its directions have one (see momentum.py).  The
        arithmetic is the same, bit for bit, however the gradients were computed.
        """
        if log.directions.momentum is not None:
            self._apply_momentum(log)
            return
        for seed, gradient in zip(log.seeds, log.gradients, strict=True):
            self.move(seed, -log.learning_rate * gradient / len(log.seeds), log.directions)

    @torch.no_grad()
    def _apply_momentum(self, log: StepLog) -> None:
        # Noise follows the memory order of a matrix, as in move().
        values = [parameter.detach() for parameter in self.parameters.values()]
        values = [value if value.is_contiguous() else value.t() for value in values]
        if self.momentum is None:
            self.momentum = LowRankMomentum([tuple(value.shape) for value in values], self.preceding)
        for value, move in zip(values, self.momentum.step(log.seeds, log.gradients, log.directions), strict=True):
            value.add_(move, alpha=-log.learning_rate)

    def state(self) -> dict[str, Tensor]:
        """Return copies of the values by name."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set the values.  Raises ConfigError unless names and shapes match."""
        expected = {slot.name: slot.shape for slot in self.slots}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != expected:
            wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
            raise ConfigError(
                f"Trained values of {len(shapes)} parameters were to be loaded.",
                f"They are not this model's: {wrong[0]} differs, and {len(wrong) - 1} more.",
                "Give the values of the same model, technique and rank.",
            )
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])


def flatten(modules: Sequence[tuple[str, int, nn.Module]], binding: Binding) -> Trainables:
    """Move the parameters of modules into one vector, of which they become views.

    modules: name, layer and module of each, in stack order.
    """
    entries = [
        (f"{name}.{parameter_name}", layer, module, parameter_name)
        for name, layer, module in modules
        for parameter_name in dict(module.named_parameters(recurse=False))
    ]
    flat = torch.empty(sum(module.get_parameter(parameter_name).numel() for _, _, module, parameter_name in entries))
    parameters, start = {}, 0
    for name, _, module, parameter_name in entries:
        old = module.get_parameter(parameter_name)
        piece = flat[start : start + old.numel()].view(old.shape)
        piece.copy_(old.detach())
        module.register_parameter(parameter_name, nn.Parameter(piece))
        parameters[name] = module.get_parameter(parameter_name)
        start += old.numel()
    return Trainables(parameters, [layer for _, layer, _, _ in entries], flat, binding)


def _ranges(slots: Sequence[Slot]) -> dict[int, tuple[int, int, tuple[Shape, ...]]]:
    ranges: dict[int, tuple[int, int, tuple[Shape, ...]]] = {}
    for slot in slots:
        first, _, shapes = ranges.get(slot.layer, (slot.start, slot.start, ()))
        ranges[slot.layer] = (first, slot.start + slot.size, (*shapes, slot.shape))
    return ranges
