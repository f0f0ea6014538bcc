"""Homes of tensors under a plan, their copies at neighbours, and what is said of tensors that nobody holds."""

from __future__ import annotations

from tests.plans import staged_plan
from workbench.core import Plan
from workbench.core.plan import held_by, homes_of, whole_states, with_neighbours

LAYERS = {"embedding": (0,), "layer.1": (1,), "layer.2": (2,), "words": (0, 2), "step": ()}


def plan_of(*groups: tuple[int, tuple[int, ...]]) -> Plan:
    """Stages of (layers, ranks)."""
    return staged_plan(*((layers, dict.fromkeys(ranks, 1)) for layers, ranks in groups))


def test_a_tensor_lives_where_its_layers_are() -> None:
    """On every rank of the group, with each stage that shares it, and on all ranks if it belongs to no layer."""
    assert homes_of(plan_of((1, (2,)), (2, (0, 3))), LAYERS) == {
        "embedding": (2,),
        "layer.1": (0, 3),
        "layer.2": (0, 3),
        "words": (0, 2, 3),
        "step": (0, 2, 3),
    }


def test_only_single_copies_get_a_backup() -> None:
    """On the next device, round the ring; a lone device has no neighbour."""
    assert with_neighbours({"a": (0,), "b": (3,), "c": (1, 2)}, (0, 1, 3)) == {"a": (0, 1), "b": (3, 0), "c": (1, 2)}
    assert with_neighbours({"a": (0,)}, (0,)) == {"a": (0,)}


def test_homes_are_put_together_from_what_ranks_hold() -> None:
    """In the order of the ranks."""
    assert held_by({2: ("a",), 0: ("a", "b")}) == {"a": (0, 2), "b": (0,)}


def test_the_steps_that_are_held_whole() -> None:
    """A backup that a lost device took half of with it does not count."""
    values = {10: {"a": (0,), "b": (1,)}, 20: {"a": (0,)}}
    assert whole_states(values, ("a", "b")) == {10: values[10]}
    assert whole_states(values, "a") == values
    assert whole_states({}, "a") == {}
