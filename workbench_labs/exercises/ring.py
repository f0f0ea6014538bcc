"""Lab 'Data that stay': a ring of devices, what travels on it, what a hidden state gives away (RingAda, section IV-B).

The judges run the workbench's ring in virtual time, try all devices, or know the truth because they have made it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from random import Random
from typing import Any

from workbench.core.catalogue import MB
from workbench.core.cluster import Cluster, Device, Link
from workbench.methods.ringada.rank_job import initiator_order
from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    comparison,
    require_number,
    whole_number,
)
from workbench_labs.exercises.judging import Function, code_exercise, require_close
from workbench_labs.exercises.looking import contains, judge_invert, judge_leak, nearest
from workbench_labs.exercises.unfreezing import every, judge_unfreeze
from workbench_labs.ring import ring_memory_bytes, ring_plan, ring_timeline

CASES, MEMORY_CASES = 50, 12


def _blocks(draws: Random) -> list[int]:
    return [draws.randint(1, 6) for _ in range(draws.randint(2, 5))]


def _spans(blocks: Sequence[int]) -> list[list[int]]:
    """Return each device's first and last block, counted from 1."""
    return [[start + 1, stop] for start, stop in pairwise(accumulate(blocks, initial=0))]


def judge_terminator(answer: Function, draws: Random) -> str:
    """Compare with the ring's schedule: the terminator is the lowest device that does a backward pass."""
    for _ in range(CASES):
        blocks = _blocks(draws)
        depth, spans = draws.randint(1, sum(blocks)), _spans(blocks)
        timeline = ring_timeline(tuple(blocks), depth, count=1)
        expected = min(span.rank for span in timeline.spans if span.op.kind == "B")
        answered = whole_number(answer(spans, depth), 0, len(blocks) - 1, "A place on this ring")
        if answered != expected:
            trained = sum(blocks) - depth + 1
            rows = [
                (place, f"{first} to {last}", max(0, last - max(first, trained) + 1), "yours" * (place == answered))
                for place, (first, last) in enumerate(spans)
            ]
            raise WrongAnswerError(
                f"With the top {depth} of {sum(blocks)} adapters trained, the gradient stops at place {expected}.",
                comparison("The case", ("place", "blocks", "trained adapters", ""), rows),
            )
    return f"It is the last device that does a backward pass, in {CASES} random rings (simulated)."


def judge_next_initiator(answer: Function, draws: Random) -> str:
    """Compare a whole round with the workbench's order of initiators, on links of which no two are equally fast."""
    for _ in range(CASES):
        size = draws.randint(3, 6)
        pairs = list(combinations(range(size), 2))
        rates = [[0] * size for _ in range(size)]
        for (a, b), rate in zip(pairs, draws.sample(range(1, 100), len(pairs)), strict=True):
            rates[a][b] = rates[b][a] = rate
        expected, order, left = _initiators(rates), [0], list(range(1, size))
        while left:
            answered = whole_number(answer(order[-1], left, rates), 0, size - 1, "A device of this ring")
            if answered not in left:
                raise WrongAnswerError(f"The devices {left} are left; your function chose {answered}.")
            if answered != expected[len(order)]:
                rows = [(device, rates[order[-1]][device]) for device in left]
                raise WrongAnswerError(
                    f"After device {order[-1]} comes device {expected[len(order)]}, your function chose {answered}.",
                    comparison(f"From device {order[-1]}", ("device that is left", "rate (Mbit/s)"), rows),
                )
            order.append(answered)
            left.remove(answered)
    return f"The head travels as the workbench's does, around {CASES} random rings."


def _initiators(rates: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return the workbench's order of initiators."""
    size = len(rates)
    devices = tuple(
        Device(name=f"d{rank}", flops_per_s=1e9, memory_bytes=1, link=Link(bytes_per_s=1.0)) for rank in range(size)
    )
    pairs = {f"d{a}>d{b}": Link(bytes_per_s=float(rates[a][b])) for a in range(size) for b in range(size) if a != b}
    return initiator_order(Cluster(name="ring", devices=devices, pairs=pairs), ring_plan((1,) * size))


def judge_memory(answer: Function, draws: Random) -> str:
    """Compare with the peak of each device's memory in the simulator, to a tenth of an MB."""
    for _ in range(MEMORY_CASES):
        blocks, block_mb, context_mb = _blocks(draws), draws.randint(5, 60), draws.randint(2, 80)
        depth = draws.randint(1, sum(blocks))
        expected = [nbytes / MB for nbytes in ring_memory_bytes(blocks, depth, block_mb * MB, context_mb * MB)]
        case = f"Blocks of {block_mb} MB with contexts of {context_mb} MB, {depth} adapters trained."
        answered, columns = answer(blocks, depth, block_mb, context_mb), {"place": range(len(blocks)), "blocks": blocks}
        require_close(answered, expected, "Megabytes", case, given=columns, right="simulated peak", absolute=0.1)
    return f"It is the simulator's peak on every device, in {MEMORY_CASES} random rings."


def judge_link_bytes(answer: Any, numbers: Numbers) -> str:
    """Compare with a float32 for each sample, token and hidden unit."""
    expected = 4 * numbers["samples"] * numbers["tokens"] * numbers["hidden"]
    right = f"4 x {numbers['samples']} x {numbers['tokens']} x {numbers['hidden']} = {expected:,} bytes."
    return require_number(answer, expected, 0.01, right)


def judge_least_time(answer: Any, numbers: Numbers) -> str:
    """Compare with the simulator's long run, on a device for each block and free links."""
    depth, blocks = numbers["depth"], numbers["blocks"]
    expected = (
        ring_timeline((1,) * blocks, depth, count=6).makespan_s
        - ring_timeline((1,) * blocks, depth, count=2).makespan_s
    ) / 4
    return require_number(answer, expected, 0.001, f"{depth} forward and {depth} backward passes, one after the other.")


EXERCISES = (
    code_exercise(
        name="terminator",
        question="""**Where does the gradient stop?** (5 points) `terminator(spans, depth)` gets the blocks of each \
device as `[first, last]`, counted from 1, in the order of the ring, and the number of trained adapters from the top. \
It returns the place of the terminator, counted from 0.""",
        points=5,
        hints=(
            "How many blocks are there in all? Which of them is the lowest with a trained adapter?",
            "The paper's condition: 1(beta(u) <= N - Dep + 1 <= epsilon(u)) > 0.",
            "Look for the place whose span holds block N - depth + 1.",
        ),
        judge=judge_terminator,
    ),
    code_exercise(
        name="next_initiator",
        question="""**Who is next?** (5 points) `next_initiator(now, left, rates)` gets the present initiator, the \
list of devices that were not initiator yet in this round, and `rates[a][b]` in Mbit/s. It returns the device with the \
best channel to the present one (section IV-B, step 3).""",
        points=5,
        hints=(
            "Only devices in `left` may be chosen.",
            "Which row of `rates` belongs to the present initiator?",
            "`max(left, key=...)`.",
        ),
        judge=judge_next_initiator,
    ),
    Exercise(
        name="least_time",
        question="""**The least time** (2 points). Whole mini-batches, {blocks} blocks on as many devices as you \
like, free links, the top {depth} adapters trained, no stale weights: how many layer times does a mini-batch take in \
the long run?""",
        points=2,
        hints=(
            "Frozen blocks can take the next mini-batch at once. Which blocks cannot?",
            "A trained block takes the next mini-batch after its own update. What lies between the two?",
            "The next mini-batch waits until the gradient has come down to the lowest trained block.",
        ),
        draw=lambda draws: {"depth": draws.randint(3, 9), "blocks": draws.randint(10, 14)},
        judge=judge_least_time,
    ),
    code_exercise(
        name="memory",
        question="""**What must fit** (5 points). `memory(blocks, depth, block_mb, context_mb)` returns the megabytes \
that each device of the ring needs at its peak, as a list. `blocks` has the number of blocks of each device, the top \
`depth` adapters are trained. A block's weights take `block_mb`. A block that is trained also keeps its activations, \
`context_mb` for the mini-batch, until its backward pass. Adapters and messages are small: leave them out.""",
        points=5,
        hints=(
            "Does a frozen block have a backward pass?",
            "The lowest trained block is block N - depth + 1, counted from 1. How many of a device's blocks are above?",
            "A device with blocks from `first` to `last` trains max(0, last - max(first, N - depth + 1) + 1) of them.",
        ),
        judge=judge_memory,
    ),
    code_exercise(
        name="unfreeze",
        question="""**Write a policy** (10 points). `unfreeze(step, losses, depth)` is asked before each round of 10 \
mini-batches: `step` rounds are done, `losses` has the mean loss of each, `depth` adapters are trained so far (1 at \
first). It returns how many are trained in the next round: up to 12, never fewer than before. What counts is the time \
until the loss is 0.3, on 12 trainings whose pace differs. Be 5 % faster, on average, than any fixed interval.""",
        points=10,
        hints=(
            "Some trainings learn in 4 rounds what others learn in 64. One interval cannot suit both. What tells you "
            "the pace?",
            "With one adapter the loss falls as exp(-rounds / pace): two falls in a row have the ratio exp(-1 / pace).",
            "Wait three rounds, find the pace from the first three losses, then unfreeze one more every third or so of "
            "it.",
        ),
        judge=judge_unfreeze,
        stand_in=every(2),
    ),
    Exercise(
        name="link_bytes",
        question="""**Bytes on a link** (2 points). How many bytes does the hidden state of {samples} sentences of \
{tokens} tokens have, in float32, with {hidden} hidden units?""",
        points=2,
        hints=(
            "Which shape does a hidden state have?",
            "One number for each sentence, token and hidden unit.",
            "A float32 has 4 bytes.",
        ),
        draw=lambda draws: {
            "samples": draws.choice([4, 8, 16]),
            "tokens": draws.randint(10, 60),
            "hidden": draws.choice([256, 384, 768]),
        },
        judge=judge_link_bytes,
    ),
    code_exercise(
        name="leak",
        question="""**Write a detector** (5 points). `leak(message, ids)` gets the numbers of a message, as a list of \
floats, and a list of ids, such as a sentence's tokens. It returns whether all ids stand in the message one after the \
other.""",
        points=5,
        hints=(
            "At which places can the first id stand?",
            "`message[i : i + len(ids)] == ids` compares a piece; 101.0 == 101 in Python.",
            "Try every i from 0 to len(message) - len(ids), the last one included.",
        ),
        judge=judge_leak,
        stand_in=contains,
    ),
    code_exercise(
        name="invert",
        question="""**Read a hidden state** (10 points). `invert(states, embeddings)` gets the hidden states of a \
text's tokens and the embeddings of all words, each a list of vectors. It returns the number of a word for each state. \
Layer norms change the length of a vector; its direction stays about the same.""",
        points=10,
        hints=(
            "Which word's embedding is nearest to a state, if length does not count?",
            "The cosine: the dot product over both lengths.",
            "Divide every vector by its length, then take the word with the largest dot product.",
        ),
        judge=judge_invert,
        stand_in=nearest,
    ),
)
