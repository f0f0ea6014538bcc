"""Lab 'Cut a layer': a device's term of a feed-forward network and of attention, and its ring (see layer_ring).

Galaxy+ (section III-B: heads and columns; III-D: tiles, Fig. 9) cuts a layer like Megatron-LM (Shoeybi et al., 2019).
What a device has no part of is not a number in the judge's cases, so a term that uses it is not a number either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.costs import sent_bytes
from workbench.core.job import Fidelity
from workbench.core.schedule import ALLGATHER, REDUCESCATTER
from workbench.runtime.engine_starter import share_module
from workbench.runtime.engines import default_pool
from workbench.widgets.tables import Table
from workbench_labs import gathering
from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    comparison,
    number_of,
    require_list,
    require_number,
    usable,
)
from workbench_labs.exercises.judging import Function, code_exercise, in_virtual_time
from workbench_labs.exercises.layer_ring import (
    CASES,
    gathering_of,
    judge_ring,
    judge_tile_order,
    plain_order,
    plain_ring,
)
from workbench_labs.gathering import GatherRun
from workbench_labs.planning import with_bandwidth

share_module(__name__)  # its functions run on devices

CLOSE = 1e-5
HIDDEN = 0.8
"""The share of the messages' time that products have to hide."""
MEGABITS = 4.0
"""Megabits per second of the executed ring's links."""
COLLECTIVES = {"scheme 1": (ALLGATHER, REDUCESCATTER) * 2, "scheme 2": (ALLGATHER, REDUCESCATTER)}
"""The synchronisations of one layer (Galaxy+, Table II)."""
Term = Function


def _matrix(draws: Random, rows: int, columns: int) -> Tensor:
    return torch.tensor([[draws.uniform(-1, 1) for _ in range(columns)] for _ in range(rows)], dtype=torch.float64)


def _only(matrix: Tensor, part: slice, dim: int, other: float) -> Tensor:
    """Return a matrix in which everything but some columns (dim 1) or rows (dim 0) is another number."""
    changed = torch.full_like(matrix, other)
    place = (slice(None), part) if dim else (part,)
    changed[place] = matrix[place]
    return changed


def _require_term(term: Any, expected: Tensor, case: str) -> None:
    """Raise WrongAnswerError unless a term, given as lists or as a tensor, is the expected matrix."""
    rows = [
        [_entry(value) for value in require_list(row, "A row of the term", expected.shape[1])]
        for row in require_list(term, "The term", expected.shape[0])
    ]
    if any(math.isnan(value) for row in rows for value in row):
        raise WrongAnswerError(
            f"{case}: the term uses weights that the device does not have. In the case they are not numbers (nan)."
        )
    difference = (torch.tensor(rows, dtype=torch.float64) - expected).abs()
    if difference.max() > CLOSE:
        first = int(difference.max(dim=1).values.argmax())
        columns = ("", *(f"column {column}" for column in range(expected.shape[1])))
        shown = [
            ("yours", *(f"{value:.3f}" for value in rows[first])),
            ("of the whole layer", *(f"{value:.3f}" for value in expected[first].tolist())),
        ]
        raise WrongAnswerError(
            f"{case}: row {first} of the term differs by up to {float(difference[first].max()):.2g}.",
            comparison(f"Row {first} of the term", columns, shown),
        )


def _entry(value: Any) -> float:
    return math.nan if isinstance(value, float) and math.isnan(value) else number_of(value)


def judge_mlp_term(answer: Term, draws: Random) -> str:
    """Compare with the whole network in which all other rows of W2 are zero: that is the device's term."""
    for _ in range(CASES):
        tokens, hidden, columns = draws.randint(2, 5), draws.randint(2, 5), draws.randint(3, 9)
        start = draws.randint(0, columns - 2)
        own_columns = slice(start, draws.randint(start + 1, columns))
        x, w1, w2 = _matrix(draws, tokens, hidden), _matrix(draws, hidden, columns), _matrix(draws, columns, hidden)
        expected = torch.relu(x @ w1) @ _only(w2, own_columns, 0, 0.0)
        parts = (_only(w1, own_columns, 1, math.nan), _only(w2, own_columns, 0, math.nan))
        term = answer(x.tolist(), *(weights.tolist() for weights in parts), own_columns.start, own_columns.stop)
        case = f"{tokens} tokens, W1 of {hidden} x {columns}, columns {own_columns.start} to {own_columns.stop - 1}"
        _require_term(term, expected, case)
    return f"It is the device's term in {CASES} random networks, and uses only the device's own weights."


def judge_heads_term(answer: Term, draws: Random) -> str:
    """Compare with torch's whole attention in which the rows of W_O of all other heads are zero."""
    for _ in range(CASES):
        tokens, heads, size = draws.randint(2, 5), draws.randint(2, 5), draws.randint(2, 3)
        hidden = heads * size
        first = draws.randint(0, heads - 1)
        last = draws.randint(first + 1, heads)
        own_rows = slice(first * size, last * size)
        x = _matrix(draws, tokens, hidden)
        *inner, w_o = [2 * _matrix(draws, hidden, hidden) for _ in range(4)]
        q, k, v = ((x @ weights).view(tokens, heads, size).transpose(0, 1) for weights in inner)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(tokens, hidden)
        parts = [*(_only(weights, own_rows, 1, math.nan) for weights in inner), _only(w_o, own_rows, 0, math.nan)]
        term = answer(x.tolist(), *(weights.tolist() for weights in parts), size, first, last)
        case = f"{tokens} tokens, {heads} heads of {size}, heads {first} to {last - 1}"
        _require_term(term, mixed @ _only(w_o, own_rows, 0, 0.0), case)
    return f"It is the term of the device's heads in {CASES} random attentions, and uses only its own weights."


def judge_travelling(answer: Any, numbers: Numbers) -> str:
    """Compare with the bytes that all devices send in a layer's ring collectives (Galaxy+, Table II)."""
    size, tokens, hidden = numbers["devices"], numbers["tokens"], numbers["hidden"]
    state_bytes = 4 * tokens * hidden
    kinds = COLLECTIVES[numbers["scheme"]]
    total = size * sum(sent_bytes(kind, size, state_bytes) for kind in kinds)
    right = f"{len(kinds)} x ({size} - 1) x {tokens} tokens x {hidden} numbers x 4 bytes = {total:,} bytes."
    return require_number(answer, total, 0.005, right)


def judge_tiles(answer: Any, numbers: Numbers) -> str:
    """Do so many tiles hide at least 80 % of the messages' time (simulated)?"""
    count = number_of(answer)
    if count != int(count):
        raise WrongAnswerError(f"A whole number of tiles is asked for; this is {count:g}.")
    hidden = _hidden(numbers["megabits"], numbers["product_ms"], int(count))
    if hidden < HIDDEN:
        raise WrongAnswerError(f"With {count:g} tiles a share {hidden:.0%} of the messages' time are hidden.")
    return f"{count:g} tiles a share hide {hidden:.0%} of the messages' time (simulated)."


@cache
def _hidden(megabits: float, product_ms: float, tiles: int) -> float:
    """Return the share of the messages' time that is hidden with so many tiles, on the executed ring's links."""
    shared = gathering_of(plain_ring, plain_order, product_s=product_ms / 1e3, tiles=tiles)
    cluster = slow_cluster("laptop-equal", megabits)
    together, alone = (
        in_virtual_time(rounds.schedule(), rounds.on(cluster).costs) for rounds in (shared, shared.alone)
    )
    return gathering.hidden_share(together, alone)


def slow_cluster(name: str, megabits: float) -> Cluster:
    """Return a cluster of the catalogue with links of so many Mbit/s."""
    return with_bandwidth(load_cluster(name), megabits)


def _layer(draws: Random) -> Numbers:
    devices = draws.randint(3, 8)
    return {
        "devices": devices,
        "tokens": devices * draws.randint(8, 60),
        "hidden": draws.choice([256, 384, 512, 768, 1024]),
        "scheme": draws.choice(list(COLLECTIVES)),
    }


def _tiles(draws: Random) -> Numbers:
    """Return products and links with which one tile a share hides too little, and so do 32."""
    while True:
        numbers = {"megabits": draws.choice([1.5, 2.0, 2.5, 3.0, 4.0]), "product_ms": draws.randint(10, 40)}
        hidden = {count: _hidden(**numbers, tiles=count) for count in (1, 2, 4, 8, 32)}
        if max(hidden[1], hidden[32]) < HIDDEN - 0.03 and max(hidden.values()) > HIDDEN + 0.01:
            return numbers


def _plain_term(x: Any, w1: Any, w2: Any, start: int, stop: int) -> Tensor:
    first, second = (torch.tensor(matrix) for matrix in (w1, w2))
    return torch.relu(torch.tensor(x) @ first[:, start:stop]) @ second[start:stop]


EXERCISES = (
    code_exercise(
        name="mlp_term",
        question="""**Cut a feed-forward network** (8 points). `mlp_term(x, w1, w2, start, stop)` returns the term \
of a device that has the columns `start` to `stop - 1` of W1 and the same rows of W2: a matrix as large as `x`. All \
matrices are lists of rows. What the device does not have is `nan` in `w1` and `w2`: do not use it.""",
        points=8,
        hints=(
            "A column of W1 gives one column of the hidden activation. Which row of W2 does that column meet?",
            "relu works number by number, so it can be applied to the device's columns alone.",
            "With torch: `torch.tensor(w1)[:, start:stop]` and `torch.tensor(w2)[start:stop, :]`; `.tolist()` in the "
            "end.",
        ),
        judge=judge_mlp_term,
        stand_in=_plain_term,
    ),
    code_exercise(
        name="heads_term",
        question="""**Cut attention by heads** (10 points). `heads_term(x, w_q, w_k, w_v, w_o, head_size, first, \
last)` returns the term of a device that has the heads `first` to `last - 1`. Head *h* has the columns *h* x \
`head_size` to (*h* + 1) x `head_size` - 1 of W_Q, W_K and W_V, and the same rows of W_O. No mask, no bias.""",
        points=10,
        hints=(
            "Each head attends on its own. Write one head first, then add up the terms of the device's heads.",
            "The scores of a head are Q K^T / sqrt(head_size); softmax goes over each row.",
            "A head's term is softmax(scores) V times the head's rows of W_O.",
        ),
        judge=judge_heads_term,
    ),
    Exercise(
        name="travelling",
        question="""**How many bytes?** (3 points) A layer in {scheme} runs on {devices} equal devices: {tokens} \
tokens, hidden size {hidden}, numbers of 4 bytes. How many bytes do all devices together send for this layer?""",
        points=3,
        hints=(
            "In an all-gather every device gets the tokens of all others. How many bytes is that for one device?",
            "A reduce-scatter in a ring sends as many bytes as an all-gather.",
            "Scheme 1 has two all-gathers and two reduce-scatters a layer, scheme 2 one of each.",
        ),
        draw=_layer,
        judge=judge_travelling,
    ),
    code_exercise(
        name="ring",
        question="""**Write the ring** (8 points). `ring(num_devices)` returns the rounds of an all-gather. A round is \
a list of messages `[source, destination, share]`; share *i* is what device *i* has at the beginning. In each round \
every device sends one share to its neighbour: device *i* to *i* + 1, the last one to device 0. A device can only \
send what it had before the round. In the end everybody has all shares, and nobody has got one twice.""",
        points=8,
        hints=(
            "Draw three devices. What can each of them send in the first round?",
            "In the next round a device passes on what has just come.",
            "`%` wraps around: in round k device i sends share `(i - k) % num_devices`.",
        ),
        judge=judge_ring,
        stand_in=plain_ring,
    ),
    code_exercise(
        name="tile_order",
        question="""**Choose the order** (6 points). `tile_order(num_devices, device)` returns the shares in the order \
in which the device multiplies them, such as `[2, 0, 1]`. A product begins when its share is there. No device shall \
wait longer than it must.""",
        points=6,
        hints=(
            "Which share does a device have at the very beginning?",
            "Shares come from the device before: first its own, then the one of the device before that.",
            "Look at your ring: what does device i get in round k?",
        ),
        judge=judge_tile_order,
        stand_in=plain_order,
    ),
    Exercise(
        name="tiles",
        question="""**How many tiles?** (4 points) Links of {megabits} Mbit/s and products of {product_ms} ms a share: \
a transfer takes longer than a product. Into how many tiles must each share of 32 tokens be cut, so that 80 % of the \
messages' time is hidden? Each message costs 0.3 ms more, whatever its size.""",
        points=4,
        hints=(
            "What is still to be multiplied when the last tile has arrived?",
            "With T tiles the last product is T times shorter, but T times as many messages cost 0.3 ms each.",
            "Try 1, 2, 4, 8, 16 and 32 in the workbench: `layer_cuts.gathering_of(..., tiles=T)`.",
        ),
        draw=_tiles,
        judge=judge_tiles,
    ),
)


def run_ring(
    term: Term,
    ring: Callable[[int], Any],
    tile_order: Callable[[int, int], Any],
    *,
    cluster_name: str = "laptop-equal",
    megabits: float = MEGABITS,
    fidelity: Fidelity = "paced",
    **settings: Any,
) -> GatherRun:
    """Return a student's ring, simulated and executed by emulated devices (see gathering.run).

    A part that is not right yet is replaced by the workbench's own.  settings: see Gathering.
    """
    cluster = slow_cluster(cluster_name, megabits)
    answers: dict[str, Function] = {"ring": ring, "tile_order": tile_order, "mlp_term": term}
    functions = {name: usable(EXERCISES, name, answer) for name, answer in answers.items()}
    shared = gathering_of(functions["ring"], functions["tile_order"], size=cluster.world_size, **settings)
    engines = default_pool().acquire(cluster, fidelity)
    return gathering.run(shared, functions["mlp_term"], cluster, engines)


def runs_table(runs: Mapping[str, GatherRun]) -> Table:
    """Return what runs show: equality, bytes against the formula, and how much of the messages' time is hidden."""
    rows = [
        (
            name,
            f"{run.largest_error:.0e}",
            f"{run.sent_bytes:,}",
            f"{run.expected_bytes:,}",
            *(f"{1e3 * timeline.makespan_s:.0f}" for timeline in (run.simulated, run.executed)),
            *(f"{share:.0%}" for share in (run.hidden_simulated, run.hidden_executed)),
        )
        for name, run in runs.items()
    ]
    columns = (
        "ring",
        "terms differ from the whole by",
        "bytes sent",
        "by the formula",
        "ms, simulated",
        "ms, executed",
        "hidden, simulated",
        "hidden, executed",
    )
    first = next(iter(runs.values()))
    note = "Hidden: of the time that the messages take alone, in whole shares."
    return Table(columns, rows, title=f"Your ring ({first.simulated.label}; {first.executed.label})", note=note)
