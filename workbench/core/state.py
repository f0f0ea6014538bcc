"""State: named tensors and the ranks that hold each of them.

Weights, optimizer moments, heads and cached activations are named by layer, not by stage, so that a name means the same under every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from workbench.core.errors import StateError
from workbench.core.plan import Plan

Homes = Mapping[str, Sequence[int]]
"""The ranks that hold each tensor, by its name."""

_SHOWN_NAMES = 4


def homes_of(plan: Plan, layers: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return on which ranks the stages of a plan need each tensor.

    layers: those that a tensor belongs to; several if they share it, none if every rank of the plan needs it, such as a step count.
    """
    everyone = tuple(sorted({rank for stage in plan.stages for rank in stage.ranks}))
    ranks_of = [stage.ranks for stage in plan.stages for _ in range(stage.num_layers)]
    return {name: tuple(sorted({rank for layer in own for rank in ranks_of[layer]})) if own else everyone for name, own in layers.items()}


def with_backups(homes: Homes, ranks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the homes, and for each tensor with only one home a second one on the next of `ranks`."""
    following = dict(zip(ranks, (*ranks[1:], *ranks[:1]), strict=True))
    return {name: tuple(dict.fromkeys((own[0], following[own[0]]))) if len(own) == 1 else tuple(own) for name, own in homes.items()}


def held_by(names_of: Mapping[int, Iterable[str]]) -> dict[str, tuple[int, ...]]:
    """Return the homes of all tensors.  names_of: what each rank holds."""
    found: dict[str, list[int]] = {}
    for rank in sorted(names_of):
        for name in names_of[rank]:
            found.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in found.items()}


def last_whole_step(held: Mapping[int, Homes], names: Iterable[str]) -> int:
    """Return the last step of which every tensor has a holder.  held: by step, who holds the state as it was after it.

    Raises StateError naming the tensors that the last of the steps lacks.
    """
    needed = tuple(names)
    for step in sorted(held, reverse=True):
        if all(held[step].get(name) for name in needed):
            return step
    require_holders(held[max(held)] if held else {}, needed)
    return 0


def require_holders(held: Homes, names: Iterable[str]) -> None:
    """Raise StateError if there are tensors that nobody holds, naming them."""
    lost = [name for name in names if not held.get(name)]
    if lost:
        more = f" and {len(lost) - _SHOWN_NAMES} more" if len(lost) > _SHOWN_NAMES else ""
        raise StateError(
            "A state was to be moved to other devices.",
            f"No device holds {', '.join(lost[:_SHOWN_NAMES])}{more}.",
            "Resume from the last checkpoint.",
        )
