from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from file_channel import FileChannel
from forked import run_script

from tests.waiting import LIMIT_S, wait_for
from workbench.core.cluster import Cluster
from workbench.core.errors import GroupNotFormedError, RuntimeSetupError
from workbench.runtime.context import RankContext
from workbench.runtime.process_group import close_group, group, open_group

_AFTER_A_FAILURE = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from workbench.core.cluster import Cluster, Device, Link
from workbench.core.errors import GroupNotFormedError
from file_channel import FileChannel
from workbench.runtime.context import RankContext
from workbench.runtime.process_group import group, open_group
rank, folder = int(sys.argv[1]), sys.argv[2]
device = Device(name="pi", flops_per_s=1e9, memory_bytes=10**8, link=Link(bytes_per_s=1e6))
cluster = Cluster(name="pis", devices=(device,))
context = RankContext(
    rank=rank, world_size=2, device=device, cluster=cluster, fidelity="paced", interface="lo",
    channel=FileChannel(folder, 2),
)
if rank == 0:
    store = dist.FileStore(f"{folder}/other", 2)
    store.set_timeout(timedelta(seconds=0.5))
    try:
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.5))
    except RuntimeError:
        print("failed")
with group(context, 30.0, "first"):
    tensor = torch.tensor([context.rank + 1.0])
    dist.all_reduce(tensor)
    print(tensor.item())
"""


_MEETING = """
import signal, sys
from datetime import timedelta
import torch
from torch.distributed import distributed_c10d
from workbench.core.cluster import Cluster, Device, Link
from workbench.core.errors import DeviceLostError
from workbench.runtime import process_group
from file_channel import FileChannel
from workbench.runtime.context import RankContext

rank, folder, given_up = int(sys.argv[1]), sys.argv[2], []
device = Device(name="pi", flops_per_s=1e9, memory_bytes=10**8, link=Link(bytes_per_s=1e6))
channel = FileChannel(folder, 2)
context = RankContext(
    rank=rank, world_size=2, device=device, cluster=Cluster(name="pis", devices=(device,)), fidelity="paced",
    interface="lo", channel=channel,
)
with process_group.group(context, 30.0):
    meeting = process_group.Meeting(["left", "right"], lambda: given_up[0] if given_up else None)
    tensor = torch.ones(1)
    meeting.sum(tensor)
    print(tensor.item(), flush=True)
    if sys.argv[3] == "unwanted":
        given_up.append(DeviceLostError("A step was under way.", "The devices are changing.", "It is made again."))
    else:
        distributed_c10d._set_pg_timeout(timedelta(seconds=0.2), meeting._group)
    if rank == 1:
        signal.pause()  # comes to no second meeting
    else:
        try:
            meeting.sum(tensor)
        except DeviceLostError as error:
            print(error)
"""


LATE = r"Device 'left' \(rank 0\) waited .* meeting 2\. Device 'right' \(rank 1\) did not come"


@pytest.mark.parametrize(("why", "found"), [("late", LATE), ("unwanted", "The devices are changing")])
def test_a_meeting_ends_without_one_that_does_not_come(tmp_path: Path, why: str, found: str) -> None:
    waits, stays_away = tmp_path / "waits", tmp_path / "stays away"
    with (
        run_script(_MEETING, waits, "0", str(tmp_path), why) as waiting,
        run_script(_MEETING, stays_away, "1", str(tmp_path), why),
    ):
        waiting.join(LIMIT_S)
        assert waiting.exitcode == 0
        wait_for(lambda: stays_away.read_text() == "2.0\n", "the first meeting's sum")
    printed = waits.read_text()
    assert re.search(rf"2\.0\n.*{found}", printed), printed


def alone(cluster: Cluster, folder: Path, world_size: int = 1) -> RankContext:
    return RankContext(
        rank=0,
        world_size=world_size,
        device=cluster.devices[0],
        cluster=cluster,
        fidelity="paced",
        interface="lo",
        channel=FileChannel(folder, world_size),
    )


def test_a_group_of_one_opens_twice(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    context = alone(make_cluster(1), tmp_path)
    for name in ("a", "b"):
        with group(context, 5.0, name):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert tensor.item() == 1.0
        assert not dist.is_initialized()
    close_group()


def test_peers_that_do_not_come(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    with pytest.raises(RuntimeSetupError, match=r"'device-0' \(rank 0 of 2\).*0.5 s: rank 1 did not come"):
        open_group(alone(make_cluster(1), tmp_path, world_size=2), 0.5)
    assert not dist.is_initialized()


def test_what_is_not_wanted_any_more_is_not_waited_for(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    requests: list[None] = []

    def is_wanted() -> bool:
        requests.append(None)
        return len(requests) < 3

    with pytest.raises(GroupNotFormedError, match=r"given up.*\[1\]"):
        open_group(alone(make_cluster(1), tmp_path, world_size=2), 600.0, is_wanted=is_wanted)
    assert not dist.is_initialized()


def test_a_group_that_did_not_form_keeps_nobody_out_of_the_next(tmp_path: Path) -> None:
    outputs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    with (
        run_script(_AFTER_A_FAILURE, outputs[0], "0", str(tmp_path)) as failing,
        run_script(_AFTER_A_FAILURE, outputs[1], "1", str(tmp_path)) as other,
    ):
        for process in (failing, other):
            process.join(LIMIT_S)
    assert [output.read_text().split() for output in outputs] == [["failed", "3.0"], ["3.0"]]
