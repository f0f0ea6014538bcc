"""Inference schedules: exact in whole numbers for any split, as fast as the closed forms say, overlapped as section
III-D promises."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from inference_algebra import run, shape, whole
from schedule_plans import timed

from tests.plans import inference_plan
from workbench.core.errors import ScheduleError
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.schedule import SEND, Op, Schedule
from workbench.methods.galaxy_plus.schedules import InferenceLayout, inference_schedule
from workbench.schedules import check

ENCODER_DECODER = (shape(2, 6, 12), shape(1, 3, 7, has_cross_attention=True))


def parts(chance: random.Random, total: int, count: int) -> tuple[int, ...]:
    """Cut a number into parts of at least 0."""
    cuts = sorted(chance.choices(range(total + 1), k=count - 1))
    return tuple(end - start for start, end in zip((0, *cuts), (*cuts, total), strict=True))


def random_plan(chance: random.Random, paradigm: str, stacks: tuple[StackShape, ...]) -> InferencePlan:
    """Return any plan: positions without units, columns or tokens, ranks in any order and left out, pieces of any
    size."""
    count = chance.randint(1, 5)
    layers = sum(stack.num_layers for stack in stacks)
    return inference_plan(
        paradigm,
        ranks=tuple(chance.sample(range(6), count)),
        units=parts(chance, stacks[0].num_units, count),
        columns=parts(chance, stacks[0].columns, count),
        shares=parts(chance, 10, count),
        schemes=tuple(chance.choices((1, 2), k=layers)),
        layers=parts(chance, layers, count),
        overlap=chance.random() < 0.7,
        both_ways=chance.random() < 0.5,
        tile_tokens=chance.choice((0, 0, 1, 2, 5)),
    )


@pytest.mark.parametrize("stacks", [(shape(),), ENCODER_DECODER], ids=["one stack", "encoder-decoder"])
@pytest.mark.parametrize("paradigm", ["hybrid", "tensor", "sequence", "pipeline"])
def test_any_split_gives_the_unsplit_result(paradigm: str, stacks: tuple[StackShape, ...]) -> None:
    """The schedule ends, every value is there once, and the sum over ranks is that of one device, to the last digit."""
    for seed in range(60 if paradigm == "hybrid" else 12):
        chance = random.Random(seed)
        plan = random_plan(chance, paradigm, stacks)
        lengths = tuple(chance.randint(1, 13) for _ in stacks)
        layout = InferenceLayout.build(plan, stacks, lengths)
        schedule = check(inference_schedule(layout, world_size=6))
        ids = tuple(tuple(chance.randrange(1000) for _ in range(length)) for length in lengths)
        assert run(schedule, layout, ids) == whole(stacks, ids), (seed, plan)
        assert all(not ops for rank, ops in enumerate(schedule.ops) if rank not in plan.ranks)


@pytest.mark.parametrize("paradigm", ["hybrid", "pipeline"])
def test_decoding_continues_from_the_cache(paradigm: str) -> None:
    """Token by token with the keys of every position, as one causal pass would have it; of an encoder-decoder the
    decoder alone."""
    for seed in range(10):
        chance = random.Random(seed)
        for stacks in ((shape(),), ENCODER_DECODER):
            plan = random_plan(chance, paradigm, stacks)
            ids = [chance.randrange(1000) for _ in range(4)]
            memory = tuple(chance.randrange(1000) for _ in range(3))
            caches: dict[str, dict] = {"split": {"memory": memory}, "one": {"memory": memory}}
            for past, token in enumerate(ids):
                layout = InferenceLayout.decode(plan, stacks, past=past, memory_length=3)
                step = check(inference_schedule(layout))
                local = replace(
                    plan,
                    paradigm="pipeline",
                    ranks=(0,),
                    units=(),
                    columns=(),
                    shares=(),
                    layers=(sum(s.num_layers for s in stacks),),
                )
                alone = InferenceLayout.decode(local, stacks, past=past, memory_length=3)
                tokens = ((),) * (len(stacks) - 1) + ((token,),)
                assert run(step, layout, tokens, caches["split"]) == run(
                    inference_schedule(alone), alone, tokens, caches["one"]
                )


def even(count: int, **given) -> InferencePlan:
    """Return an even split of one layer of scheme 1, each position with a tile of one token."""
    settings = {"schemes": (1,), "overlap": True} | given
    each = (1,) * count
    return inference_plan(units=each, columns=each, shares=each, **settings)


def feed_forward_block(plan: InferencePlan, *, up: float, down: float, send: float) -> float:
    """Return the seconds of the feed-forward block alone, with its ring: everything in front of it is free."""
    count = plan.num_positions
    layout = InferenceLayout.build(plan, (shape(1, count, count),), count)

    def seconds_of(kind_s: float, per_tile: bool):
        def seconds(rank: int, op: Op) -> float:
            tiles = len(op.reads if op.kind == "UP" else op.writes)
            return kind_s * (tiles if per_tile else 1) if op.stage == 1 else 0.0

        return seconds

    costs = {"UP": seconds_of(up, True), "DOWN": seconds_of(down, True), "SEND": seconds_of(send, False)}
    return timed(check(inference_schedule(layout)), **costs).makespan_s


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_closed_forms_of_the_ring(count: int) -> None:
    """All-gather beside GEMM1: N g against (N - 1) s + N g; reduce-scatter behind GEMM2 alike; both rings: 2 N g, or
    the links' time."""
    overlapped, waiting = even(count), even(count, overlap=False)
    rounds = count - 1
    assert feed_forward_block(overlapped, up=1.0, down=0.0, send=0.0) == count
    for plan, up, down, send, expected in (
        (overlapped, 1.0, 1.0, 0.5, 2 * count),  # hidden: two sends under the two products of a tile
        (overlapped, 1.0, 1.0, 0.125, 2 * count),
        (overlapped, 0.0, 0.0, 1.0, 2 * rounds),  # nothing to hide behind: both rings in turn on each link
        (waiting, 1.0, 1.0, 0.5, 2 * (rounds * 0.5 + count)),
        (waiting, 1.0, 0.0, 0.8, rounds * 0.8 + count + rounds * 0.8),
    ):
        assert feed_forward_block(plan, up=up, down=down, send=send) == pytest.approx(expected), (
            plan.overlap,
            up,
            down,
            send,
        )


def sent(schedule: Schedule, name: str) -> list[tuple[int, int]]:
    """Return the (source, destination) of every transfer of a value's name."""
    return [op.ranks for ops in schedule.ops for op in ops if op.kind == SEND and op.reads[0].name == name]


def test_positions_without_a_part_stand_aside() -> None:
    """No units: not in the ring of attention, but its own tile's sum comes and the tile starts there; no tokens: no
    tile, no connection."""
    plan = replace(even(3), units=(2, 0, 1), columns=(1, 1, 1), shares=(1.0, 1.0, 0.0))
    schedule = check(inference_schedule(InferenceLayout.build(plan, (shape(1, 3, 3),), 6)))
    kinds = [[op.kind for op in ops] for ops in schedule.ops]
    assert "QKV" not in kinds[1] and kinds[1].count("CONN") == 2
    assert "QKV" in kinds[2] and "CONN" not in kinds[2]
    attention = [op.ranks for ops in schedule.ops for op in ops if op.kind == SEND and op.reads[0][:2] == ("sum", 0)]
    assert set(attention) == {(2, 0), (0, 1)} and len(attention) == 3  # both tiles begin at 2; that of 1 goes on from 0


def test_pieces_are_dealt_to_both_directions() -> None:
    """Tiles are cut into at most tile_tokens and cover the sequence; halves go either way."""
    plan = replace(even(3, both_ways=True, tile_tokens=4), shares=(10.0, 3.0, 0.0))
    tiles = InferenceLayout.build(plan, (shape(1, 3, 3),), 13).tiles[0]
    assert [(tile.position, tile.tokens, tile.direction) for tile in tiles] == [
        (0, 2, 1),
        (0, 3, -1),
        (0, 2, 1),
        (0, 3, -1),
        (1, 1, 1),
        (1, 2, -1),
    ]
    assert [tile.start for tile in tiles[1:]] == [tile.stop for tile in tiles[:-1]]


def test_bad_input_is_answered() -> None:
    """A plan without its parts, of another model, for a smaller cluster, or one that cannot decode."""
    stacks = (shape(2, 4, 8),)
    with pytest.raises(ScheduleError, match="does not say its columns"):
        InferenceLayout.build(replace(even(4, schemes=(1, 1)), columns=()), stacks, 8)
    with pytest.raises(ScheduleError, match="speaks of 1 layers, the model has 2"):
        InferenceLayout.build(even(4), stacks, 8)
    with pytest.raises(ScheduleError, match="at least one token"):
        InferenceLayout.build(even(4, schemes=(1, 1)), stacks, 0)
    with pytest.raises(ScheduleError, match="schedule for 2 ranks"):
        inference_schedule(InferenceLayout.build(even(4, schemes=(1, 1)), stacks, 8), 2)
    with pytest.raises(ScheduleError, match="cannot be divided"):
        InferenceLayout.decode(replace(even(4, schemes=(1, 1)), paradigm="sequence"), stacks, past=3)
