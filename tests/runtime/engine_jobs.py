"""Functions that the tests run on engines (importable there, because pytest puts this folder on sys.path)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from workbench.core.errors import GroupNotFormedError, PlanError
from workbench.runtime.context import RankContext
from workbench.runtime.memory import MemoryBudget
from workbench.runtime.process_group import Meeting, group, open_group


def who_am_i(context: RankContext, payload: Any) -> tuple[int, int, str, int, Any]:
    return context.rank, context.world_size, context.device.name, os.getpid(), payload


def count(context: RankContext, num_events: int) -> int:
    for step in range(num_events):
        context.publish({"epoch": 0, "step": step})
    return context.rank


def all_reduce(context: RankContext, num_groups: int) -> list[float]:
    sums = []
    for index in range(num_groups):
        with group(context, 200.0, name=f"group-{index}"):
            tensor = torch.full((4,), float(context.rank + 1))
            dist.all_reduce(tensor)
            sums.append(tensor[0].item())
    return sums


def leave_group_open(context: RankContext, _: Any) -> bool:
    open_group(context, 200.0)
    return dist.is_initialized()


def group_that_forms_elsewhere(context: RankContext, unable: Sequence[int] | None) -> float:
    """Form a group, unless this is one of the processes that are unable to (None: all are)."""
    if unable is None or os.getpid() in unable:
        raise GroupNotFormedError("A group was asked for.", "It did not form.", "Run again.")
    return all_reduce(context, 1)[0]


def meet_later(context: RankContext, _: Any) -> None:
    """Meet the others; the last one says so and does not come."""
    names = [device.name for device in context.cluster.devices]
    with group(context, 200.0):
        meeting = Meeting(names)
        context.publish({"phase": "loading"})
        if context.rank == 2:
            threading.Event().wait()
        meeting.sum(torch.zeros(1))


def group_is_open(context: RankContext, _: Any) -> bool:
    return dist.is_initialized()


def fail_clearly(context: RankContext, failing: int) -> None:
    if context.rank == failing:
        raise PlanError("A plan was asked for.", "None fits.", "Add a device.")


def fail_otherwise(context: RankContext, failing: int) -> None:
    if context.rank == failing:
        raise LookupError("nothing there")


def fail_while_others_wait(context: RankContext, failing: int) -> None:
    with group(context, 200.0):
        if context.rank == failing:
            raise PlanError("A plan was asked for.", "None fits.", "Add a device.")
        dist.all_reduce(torch.ones(1))


def train_for_ever(context: RankContext, timeout_s: float) -> str:
    with group(context, timeout_s):
        step = 0
        while True:
            stop = torch.tensor(float(context.should_stop()))
            dist.all_reduce(stop)
            if stop:
                return "stopped"
            context.publish({"epoch": 1, "step": step})
            step += 1
            time.sleep(0.01)


def freeze_in_a_step(context: RankContext, freezing: int) -> None:
    """Add up twice.  One device freezes in between; the others wait for it until the group's time-out."""
    with group(context, 200.0):
        dist.all_reduce(torch.ones(1))
        if context.rank == freezing:
            os.kill(os.getpid(), signal.SIGSTOP)
        distributed_c10d._set_pg_timeout(timedelta(seconds=2.0))
        dist.all_reduce(torch.ones(1))


def sleep_deaf(context: RankContext, seconds: float) -> None:
    context.publish({"epoch": 2, "step": 5})
    time.sleep(seconds)


def fill_memory(context: RankContext, nbytes: int) -> int:
    with MemoryBudget(context.device.name, context.device.memory_bytes):
        return torch.ones(nbytes // 4).numel()


def eat(context: RankContext, nbytes: int) -> int:
    kept = []
    for step in range(nbytes // 10_000_000):
        context.publish({"epoch": 0, "step": step})
        kept.append(bytearray(10_000_000))
        time.sleep(0.002)
    return len(kept)
