from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from file_channel import FileChannel
from forked import run_script

from tests.waiting import LIMIT_S
from workbench.core.cluster import Cluster
from workbench.core.errors import GroupNotFormedError, RuntimeSetupError
from workbench.core.run_folder import child_environment
from workbench.runtime.context import RankContext, torchrun_rank
from workbench.runtime.process_group import close_group, group, open_group

_UNDER_TORCHRUN = """
import torch, torch.distributed as dist
from workbench.core.cluster import Cluster, Device, Link
from workbench.runtime.context import RankContext, torchrun_rank
from workbench.runtime.process_group import group
device = Device(name="pi", flops_per_s=1e9, memory_bytes=10**8, link=Link(bytes_per_s=1e6))
rank, size = torchrun_rank()
context = RankContext(rank=rank, world_size=size, device=device, cluster=Cluster(name="pis", devices=(device,)), fidelity="real")
for name in ("first", "second"):
    with group(context, 20.0, name):
        tensor = torch.tensor([context.rank + 1.0])
        dist.all_reduce(tensor)
        assert tensor.item() == 3.0
open(f"{OUT}/rank-{context.rank}", "w").write(context.fidelity)
"""


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
    rank=rank, world_size=2, device=device, cluster=cluster, fidelity="paced", interface="lo", channel=FileChannel(folder, 2)
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

rank, folder, silent = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "silent"
device = Device(name="pi", flops_per_s=1e9, memory_bytes=10**8, link=Link(bytes_per_s=1e6))
channel = FileChannel(folder, 2)
context = RankContext(
    rank=rank, world_size=2, device=device, cluster=Cluster(name="pis", devices=(device,)), fidelity="paced", interface="lo",
    channel=channel,
)
with process_group.group(context, 30.0):
    meeting = process_group.Meeting(context, ["left", "right"])
    tensor = torch.ones(1)
    meeting.sum(tensor)
    print(tensor.item(), flush=True)
    if silent:
        channel.peers.append(1)
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


@pytest.mark.parametrize(("why", "found"), [("late", "did not come"), ("silent", "shows no sign of life")])
def test_a_meeting_names_whoever_it_waits_for(tmp_path: Path, why: str, found: str) -> None:
    waits, stays_away = tmp_path / "waits", tmp_path / "stays away"
    with (
        run_script(_MEETING, waits, "0", str(tmp_path), why) as waiting,
        run_script(_MEETING, stays_away, "1", str(tmp_path), why),
    ):
        waiting.join(LIMIT_S)
        assert waiting.exitcode == 0
        assert stays_away.read_text() == "2.0\n"
    printed = waits.read_text()
    assert re.search(rf"2\.0\nDevice 'left' \(rank 0\) waited .* meeting 2\. Device 'right' \(rank 1\) {found}", printed), printed


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
    asked: list[None] = []

    def is_wanted() -> bool:
        asked.append(None)
        return len(asked) < 3

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


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeSetupError, match="torchrun"):
        torchrun_rank()


def test_under_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"OUT = {str(tmp_path)!r}\n" + _UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    environment = child_environment() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert finished.returncode == 0, finished.stderr
    assert sorted(path.read_text() for path in tmp_path.glob("rank-*")) == ["real", "real"]
