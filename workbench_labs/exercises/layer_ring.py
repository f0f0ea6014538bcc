"""The ring of the lab "Cut a layer": replays a student's all-gather, judges its rounds and the order of products.

Galaxy+, section III-D: tiles that travel while others are multiplied, Fig. 9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from workbench_labs.course.verdict import WrongAnswerError, comparison, number_of, require_list
from workbench_labs.gathering import Gathering

CASES = 20
DEVICES = 4
"""Number of devices in the executed ring."""


def rounds_of(answer: Callable[[int], Any], size: int) -> list[list[list[int]]]:
    """Return a student's ring all-gather after it was replayed.  Raises WrongAnswerError at the first message that
    cannot be, and if somebody lacks a share in the end.
    """
    rounds = [require_list(messages, "A round", size) for messages in require_list(answer(size), "The ring", size - 1)]
    holds = [{device} for device in range(size)]
    played: list[list[list[int]]] = []
    for number, messages in enumerate(rounds):
        triples: list[list[int]] = []
        for message in messages:
            triple = [number_of(value) for value in require_list(message, "A message", 3)]
            if any(value != int(value) or not 0 <= value < size for value in triple):
                raise WrongAnswerError(f"A message is [source, destination, share], each from 0 to {size - 1}.")
            triples.append([int(value) for value in triple])
        why = _fault(triples, holds)
        if why:
            rows = [(device, ", ".join(map(str, sorted(shares)))) for device, shares in enumerate(holds)]
            title = f"{size} devices, before round {number}"
            raise WrongAnswerError(
                f"{size} devices, round {number}: {why}", comparison(title, ("device", "has the shares"), rows)
            )
        for _, destination, share in triples:
            holds[destination].add(share)
        played.append(triples)
    return played


def _fault(messages: Sequence[Sequence[int]], holds: Sequence[set[int]]) -> str:
    """Return why a round is impossible or useless; an empty text if it is neither."""
    for source, destination, share in messages:
        if destination != (source + 1) % len(holds):
            return f"device {source} sends to device {destination}; its neighbour is {(source + 1) % len(holds)}."
        if share not in holds[source]:
            return f"device {source} sends share {share}, which it does not have yet."
        if share in holds[destination]:
            return f"device {destination} gets share {share}, which it has already."
    if len({source for source, *_ in messages}) < len(messages):
        return "a device sends twice in one round."
    return ""


def judge_ring(answer: Callable[[int], Any], draws: Random) -> str:
    """Replay the ring on two to eight devices: n messages of new shares in n - 1 rounds give everybody everything."""
    for size in range(2, 9):
        rounds_of(answer, size)
    return "On 2 to 8 devices everybody has everything after n - 1 rounds, and every message brings something new."


def judge_tile_order(answer: Callable[[int, int], Any], draws: Random) -> str:
    """Simulate the ring with each device's order: no order takes less than (n - 1) max(p, t) + p."""
    for _ in range(CASES):
        size, product_s, transfer_s = draws.randint(2, 6), draws.randint(1, 9), draws.randint(1, 9)
        orders = orders_of(answer, size)
        together = Gathering(rounds=plain_ring(size), orders=orders, product_s=product_s).timeline(transfer_s)
        least_s = (size - 1) * max(product_s, transfer_s) + product_s
        if together.makespan_s > least_s + 1e-9:
            rows = [
                (rank, ", ".join(map(str, orders[rank])), _arrivals(rank, size, transfer_s)) for rank in range(size)
            ]
            raise WrongAnswerError(
                f"{size} devices, a product {product_s} s, a transfer {transfer_s} s: it takes "
                f"{together.makespan_s:g} s; {least_s} s are possible.",
                comparison("The case", ("device", "your order", "share and second of its arrival"), rows),
            )
    return f"No order is faster in {CASES} random rings: (n - 1) max(p, t) + p."


def orders_of(answer: Callable[[int, int], Any], size: int) -> list[list[int]]:
    """Return each device's order, every share once.  Raises WrongAnswerError."""
    orders = []
    for rank in range(size):
        numbers = [number_of(share) for share in require_list(answer(size, rank), "An order", size)]
        if sorted(numbers) != list(range(size)):
            shown = ", ".join(f"{number:g}" for number in numbers)
            raise WrongAnswerError(f"A device multiplies each of the shares 0 to {size - 1} once; this is [{shown}].")
        orders.append([int(number) for number in numbers])
    return orders


def _arrivals(rank: int, size: int, transfer_s: int) -> str:
    return ", ".join(f"{share} at {number * transfer_s} s" for number, share in enumerate(plain_order(size, rank)))


def plain_ring(size: int) -> list[list[list[int]]]:
    """Return the workbench's own ring all-gather."""
    return [[[rank, (rank + 1) % size, (rank - number) % size] for rank in range(size)] for number in range(size - 1)]


def plain_order(size: int, rank: int) -> list[int]:
    """Return the shares in the order in which they come."""
    return [(rank - number) % size for number in range(size)]


def gathering_of(
    ring: Callable[[int], Any], tile_order: Callable[[int, int], Any], *, size: int = DEVICES, **settings: Any
) -> Gathering:
    """Return a student's ring and orders as a gathering.  settings: see Gathering."""
    return Gathering(rounds=rounds_of(ring, size), orders=orders_of(tile_order, size), **settings)
