"""Whole jobs on processes that torchrun started: two local ones stand for two machines."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.methods.builders import write_sentences
from tests.methods.p_rge.worlds import in_one_process, shared
from tests.methods.p_rge.worlds import prepared_job as p_rge_job
from tests.models.plain_training import train_reference
from tests.plans import stage, staged_plan
from tests.waiting import LIMIT_S
from workbench.core.job import Job
from workbench.core.report import Report
from workbench.core.run_folder import child_environment
from workbench.core.serial import to_json
from workbench.methods.pac_plus.epochs import initial_adapter
from workbench.methods.pac_plus.prepare import prepare
from workbench.methods.pac_plus.rank_job import cached_steps, shard_owners
from workbench.models.loading import load_stack
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import collate

CLUSTER = """
name = "two"
[defaults]
bandwidth_mbit_per_s = 1000
gflops = 30
memory_mb = 2000
[[device]]
name = "left"
[[device.processor]]
name = "cores FIRST"
gflops = 15
[[device.processor]]
name = "cores LAST"
gflops = 15
[[device]]
name = "right"
"""

# The same processes run further jobs: to start others would mean to import torch three times more.
MAIN = """
from pathlib import Path
from workbench.cli import torchrun
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import Grid
from workbench.core.serial import from_json
from workbench.experiment import run
from workbench.methods.confidant.method import Confidant
equal = Grid(batch_sizes=(1,), sequence_lengths=(8,), seconds=((1.0,),))
Confidant.host_parts = lambda *given, **settings: {one + way: equal for one in "HC" for way in "FB"}
command = torchrun.app

def all_jobs(obj):
    command(obj=obj, standalone_mode=False)
    for name in ("queries", "whole", "shared"):
        job, plan = (from_json(Path(f"{name}_{kind.__name__}.json").read_text(), kind) for kind in (Job, Plan))
        done = run(job, obj.cluster, "execute", workdir=Path(f"folder_{name}"), chosen_plan=plan, engines=obj)
        done.write(f"{name}_report.json")

torchrun.app = all_jobs
torchrun.main()
"""


def torchrun(*words: str, folder: Path) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
    ]
    temporary = folder / "temporary"  # torchrun leaves an empty folder of its own in there
    temporary.mkdir(exist_ok=True)
    environment = child_environment() | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORKBENCH_CACHE": str(folder / "cache"),
        "TMPDIR": str(temporary),
    }
    return subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder
    )


@pytest.mark.slow
def test_jobs_under_torchrun_give_the_losses_of_one_process(tmp_path: Path) -> None:
    """A job file and a plan file, two processes, shared and local folder; every loss against training in this process.

    PAC+ by the command, then P-RGE, whose steps are reported as they are made, and Confidant, whose first device has
    two processors: on one and on both the losses are the same.
    """
    options = {"cache_dtype": "float32"}
    data = str(write_sentences(tmp_path / "data"))
    sizes = {
        "train_samples": 22,
        "validation_samples": 8,
        "test_samples": 8,
        "batch_size": 8,
        "micro_batches": 2,
        "epochs": 2,
    }
    job = Job(model="tiny-bert", learning_rate=5e-4, max_length=24, data=data, options=options, **sizes)
    cached = stage(0, 6, {0: 5, 1: 3})
    plan = staged_plan((4, {1: 4}), (2, {0: 4}), method="pac_plus", micro_batches=2, cached=cached)
    queries, queries_plan = p_rge_job(data=data), shared(3, 1)
    pipeline = staged_plan((3, {0: 8}), (3, {1: 8}), method="confidant")
    divided = replace(job, method="confidant", options={"split": "heads_and_columns", "heads": "optimal"})
    kinds = {"job": job, "plan": plan, "queries_Job": queries.job, "queries_Plan": queries_plan}
    kinds |= {
        "whole_Job": replace(divided, options={"split": "none"}),
        "shared_Job": divided,
        "whole_Plan": pipeline,
        "shared_Plan": pipeline,
    }
    for name, one in kinds.items():
        (tmp_path / f"{name}.json").write_text(to_json(one))
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    (tmp_path / "two.toml").write_text(CLUSTER.replace("FIRST", str(min(cores))).replace("LAST", str(max(cores))))
    (tmp_path / "main.py").write_text(MAIN)
    files = ("--job=job.json", "--plan=plan.json", "--cluster=two.toml", "--report=report.json")
    done = torchrun("main.py", *files, "--workdir=shared", "--local-folder=local", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "epoch 2 done" in done.stderr  # live progress of both ranks came to rank 0
    assert "(real)" in done.stdout

    report = Report.read(tmp_path / "report.json")
    assert (report.source, report.fidelity, report.plan, report.job, report.valid) == ("real", "", plan, job, True)
    assert {timeline.source for name, timeline in report.timelines.items() if name.endswith("measured")} == {"real"}
    assert all(step.measured_s and step.predicted_s for step in report.steps)
    assert not list((tmp_path / "local").glob("*/*"))  # the cache went with the run
    assert (tmp_path / "shared" / "adapter").is_dir()

    report_of_queries = Report.read(tmp_path / "queries_report.json")
    assert (report_of_queries.source, report_of_queries.plan) == ("real", queries_plan)
    _, _, expected_losses = in_one_process(queries)
    assert [step.loss for step in report_of_queries.steps] == pytest.approx(
        [loss.mean().item() for loss in expected_losses], rel=1e-5
    )

    on_one, on_both = (Report.read(tmp_path / f"{name}_report.json") for name in ("whole", "shared"))
    assert [step.loss for step in on_both.steps] == pytest.approx([step.loss for step in on_one.steps], rel=1e-5)
    timeline = next(timeline for name, timeline in on_both.timelines.items() if name.endswith("measured"))
    assert {span.op.stream for span in timeline.spans if span.op.kind == "ATTN"} == {"compute", "compute1"}

    prepared = prepare(job)
    stack, split = load_stack(job.model), prepared.train

    def batches(epoch: int) -> list:
        if epoch == 0:
            return [collate(split, batch) for batch in epoch_batches(split.lengths, job.batch_size, job.seed, 0)]
        owners = shard_owners(cached, split.lengths, 2, job.seed)
        steps = cached_steps(cached, owners, split.lengths, 2, seed=job.seed, epoch=epoch)
        return [collate(split, [sample for samples in step.samples for sample in samples]) for step in steps]

    expected = [
        loss
        for _, loss in train_reference(
            stack, initial_adapter(prepared, stack), batches, 2, learning_rate=job.learning_rate
        )
    ]
    losses = [step.loss for step in report.steps]
    assert losses[:3] == pytest.approx(expected[:3], rel=1e-5)
    assert losses[3:] == pytest.approx(expected[3:], rel=1e-4)
