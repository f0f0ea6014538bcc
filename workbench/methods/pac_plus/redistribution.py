"""After the first epoch: every device gets the whole adapter and the activations of its own shard (section V-B)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.core.plan import Plan
from workbench.core.program import Program
from workbench.core.schedule import BROADCAST, Value
from workbench.core.timeline import Span
from workbench.methods.common.session import RankSession
from workbench.methods.pac_plus.layout import taped_samples
from workbench.methods.pac_plus.programs import Programs
from workbench.methods.pac_plus.taps import StageTaps, rank_taps
from workbench.methods.training.steps import PlannedStep
from workbench.runtime.activation_cache import ActivationCache
from workbench.runtime.activation_records import RecordLayout
from workbench.runtime.flat_optimizer import FlatAdamW

CHUNK_BYTES = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some samples' taps that one rank has and another needs.  nbytes: of the message."""

    source: int
    destination: int
    samples: tuple[int, ...]
    nbytes: int


def share_adapter(
    session: RankSession, programs: Programs, optimizer: FlatAdamW | None, slots: Sequence[Mapping[str, torch.Size]]
) -> tuple[dict[str, Tensor], list[Span]]:
    """Return the whole adapter's parameters and moments by name, on every rank, and the spans of the exchange.

    slots[stage]: the tensors that the stage contributes, by name, in an order that all ranks agree on.
    """
    plan = session.rank_job.plan
    mine = plan.stage_of(session.rank)
    own = optimizer.named_tensors() if optimizer is not None else {}
    buffers = {}
    for index, shapes in enumerate(slots):
        if index == mine:
            buffers[index] = torch.cat([own[name].reshape(-1) for name in shapes])
        else:
            buffers[index] = torch.empty(sum(shape.numel() for shape in shapes.values()))
    done = session.run(programs.adapter_broadcast(), {BROADCAST: lambda op, reads: (buffers[op.stage],)})
    tensors = {}
    for index, shapes in enumerate(slots):
        at = 0
        for name, shape in shapes.items():
            tensors[name] = buffers[index][at : at + shape.numel()].view(shape)
            at += shape.numel()
    return tensors, done.spans


def chunks_of(
    plan: Plan,
    steps: Sequence[PlannedStep],
    owners: Sequence[int],
    lengths: Sequence[int],
    *,
    world_size: int,
    layout: RecordLayout,
    num_encoder_layers: int | None = None,
) -> tuple[Chunk, ...]:
    """Return every message of the redistribution, the same on all ranks.  layout: of a whole record."""
    chunks = []
    for source, taps in sorted(rank_taps(plan, num_encoder_layers).items()):
        part = replace(layout, num_taps=taps.num_taps, num_target_taps=taps.num_target_taps)
        held = sorted(taped_samples(plan, source, steps))
        for destination in range(world_size):
            if destination == source:
                continue
            pending: list[int] = []
            nbytes = 0
            for sample in held:
                if owners[sample] != destination:
                    continue
                pending.append(sample)
                nbytes += part.nbytes(lengths[sample])
                if nbytes >= CHUNK_BYTES:
                    chunks.append(Chunk(source=source, destination=destination, samples=tuple(pending), nbytes=nbytes))
                    pending, nbytes = [], 0
            if pending:
                chunks.append(Chunk(source=source, destination=destination, samples=tuple(pending), nbytes=nbytes))
    return tuple(chunks)


def rounds_of(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, ...]]:
    """Deal the chunks into rounds in which every pair of ranks exchanges at most one: bounded memory, all links busy."""
    queues: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        queues.setdefault((chunk.source, chunk.destination), []).append(chunk)
    depth = max(map(len, queues.values()), default=0)
    for turn in range(depth):
        yield tuple(queue[turn] for queue in queues.values() if turn < len(queue))


def round_program(programs: Programs, turn: Sequence[Chunk]) -> Program:
    """Return one round's transfers; chunk i of the round is the value cache:_.i."""
    return programs.redistribution(tuple((chunk.source, chunk.destination) for chunk in turn), tuple(chunk.nbytes for chunk in turn))


def share_cache(
    session: RankSession,
    programs: Programs,
    chunks: Sequence[Chunk],
    tape: ActivationCache | None,
    cache: ActivationCache,
    *,
    num_encoder_layers: int | None = None,
) -> list[Span]:
    """Fill this rank's cache from its own tape and from the other ranks', and return the spans of the exchange.

    Records travel as the bytes that lie on the disk, whatever their storage type.
    """
    rank = session.rank
    taps = rank_taps(session.rank_job.plan, num_encoder_layers)
    spans: list[Span] = []
    if tape is not None:
        owned = set(cache.samples)
        for sample in tape.samples:
            if sample in owned:
                cache.raw_taps(sample, taps[rank].first, taps[rank].total).copy_(tape.raw(sample))
    for turn in rounds_of(chunks):
        inputs: dict[Value, Any] = {
            Value("cache", microbatch=index): torch.cat([tape.raw(sample).reshape(-1) for sample in chunk.samples])
            for index, chunk in enumerate(turn)
            if chunk.source == rank and tape is not None
        }
        done = session.run(round_program(programs, turn), {}, inputs)
        spans += done.spans
        for value, content in done.outputs.items():
            chunk = turn[value.microbatch]
            if chunk.destination == rank:
                _unpack(cache, chunk, content, taps[chunk.source])
    return spans


def _unpack(cache: ActivationCache, chunk: Chunk, content: Tensor, taps: StageTaps) -> None:
    at = 0
    for sample in chunk.samples:
        part = cache.raw_taps(sample, taps.first, taps.total)
        part.copy_(content[at : at + part.numel()].view(part.shape))
        at += part.numel()
