"""A job for the tests of services: it echoes commands until it is told to stop."""

from __future__ import annotations

import os
import queue
from typing import Any

import torch
import torch.distributed as dist

from workbench.runtime.context import RankContext
from workbench.runtime.process_group import group


def echo(context: RankContext, payload: None) -> str:
    """Publish every command with this process's number; 'sum NAME RANKS' adds ranks up in a group of some devices."""
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    assert context.channel is not None
    context.channel.listen(commands.put)
    context.publish(("ready", os.getpid()))
    while (command := commands.get()) != "stop":
        if isinstance(command, tuple):
            name, ranks = command
            with group(_member(context, ranks), 200.0, name=name):
                tensor = torch.tensor([float(context.rank)])
                dist.all_reduce(tensor)
                context.publish(("sum", tensor.item()))
        else:
            context.publish((command, os.getpid()))
    return "stopped"


def _member(context: RankContext, ranks: tuple[int, ...]) -> RankContext:
    from dataclasses import replace

    return replace(context, rank=ranks.index(context.rank), world_size=len(ranks))
