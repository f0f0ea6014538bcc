"""One rank of `make check-aarch64`: the same small jobs on two ranks, whatever their processors; rank 0 writes every
step's loss.

Usage, with torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) set: aarch64_trial.py FOLDER
Afterwards, to compare two folders' losses: aarch64_trial.py --compare FILE FILE
"""

import json
import platform
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from workbench.cli.output import say
from workbench.core.catalogue import load_cluster
from workbench.core.job import Job
from workbench.core.plan import Plan, Share, Stage
from workbench.experiment import run
from workbench.methods.calls import CALLS
from workbench.methods.pac_plus import measure, method
from workbench.runtime.torchrun import TorchrunEngines

CLUSTER = """
name = "two"
[defaults]
bandwidth_mbit_per_s = 1000
gflops = 30
memory_mb = 2000
[[device]]
name = "left"
[[device]]
name = "right"
"""
SIZES = {
    "task": "classification",
    "train_samples": 8,
    "validation_samples": 4,
    "test_samples": 4,
    "batch_size": 4,
    "max_length": 24,
}
LIMIT = 1e-4


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Provide a temporary folder without the process that looks after it.

    qemu tells a process another start time of itself than the kernel tells others, so such a process would take its
    owner for dead.
    """
    with TemporaryDirectory() as folder:
        yield Path(folder)


measure.scratch_folder = temporary_folder
# Each rank measures itself, but not for long.
measure.BATCH_SIZES, measure.SEQUENCE_LENGTHS = (1, 4), (16,)
method.measure_layers = partial(measure.measure_layers, budget_s=0.1)


def share(rank: int, **amount: int) -> Share:
    """Return what a rank takes of a stage."""
    return Share(rank=rank, **amount)


def write_reviews(file: Path) -> None:
    """Write some made-up reviews of two classes."""
    chance, words = random.Random(0), ("good", "bad", "film", "plot", "fine", "dull")
    lines = [
        f"{' '.join(chance.choices(words, k=chance.randrange(2, 12)))} {number},{number % 2}\n" for number in range(64)
    ]
    file.write_text("text,label\n" + "".join(lines))


def jobs(data: str) -> dict[str, tuple[Job, Plan]]:
    """Return jobs and plans by name.

    PAC+: the first epoch is a pipeline of both ranks, the second trains from the cache with the hand-written side
    network.
    P-RGE: each rank takes two of the four queries.
    """
    pipeline = (
        Stage(start=0, stop=1, shares=(share(0, samples=2),)),
        Stage(start=1, stop=2, shares=(share(1, samples=2),)),
    )
    cached = Stage(start=0, stop=2, shares=(share(0, samples=2), share(1, samples=2)))
    plan = Plan(method="pac_plus", stages=pipeline, micro_batch_size=2, num_micro_batches=2, cached=cached)
    made = {
        f"PAC+, {dtype} backbone": (
            Job(
                model="tiny-bert-2",
                data=data,
                epochs=2,
                micro_batches=2,
                options={"backbone_dtype": dtype, "cache_dtype": "float32"},
                **SIZES,
            ),
            plan,
        )
        for dtype in ("float32", "int8", "nf4")
    }
    whole = (Stage(start=0, stop=2, shares=(share(0, queries=2), share(1, queries=2))),)
    queries = Plan(method="p_rge", stages=whole, micro_batch_size=4, num_micro_batches=1)
    job = Job(
        method="p_rge",
        model="tiny-llama-2",
        data=data,
        micro_batches=1,
        options={"queries": 4, "steps": 3, "rank": 2},
        **(SIZES | {"max_length": 64}),
    )
    return made | {"P-RGE": (job, queries)}


def main(folder: Path) -> None:
    """Lead if this is rank 0, otherwise serve."""
    engines = TorchrunEngines.join(CALLS, timeout_s=600.0)
    say(f"rank {engines.rank}: {platform.machine()}, torch {torch.__version__}")
    ready = folder / "rank 1 is ready"
    if engines.rank:
        ready.touch()
        engines.serve()
        return
    losses = {}
    try:
        (folder / "two.toml").write_text(CLUSTER)
        cluster = load_cluster(folder / "two.toml")
        while (
            not ready.exists()
        ):  # an emulated processor takes minutes to import torch; whoever started this ends it if a rank dies
            time.sleep(0.2)
        engines.lead(cluster)
        write_reviews(folder / "reviews.csv")
        for name, (job, plan) in jobs(str(folder / "reviews.csv")).items():
            report = run(
                job, cluster, "execute", workdir=folder / name.replace(" ", "-"), chosen_plan=plan, engines=engines
            )
            losses[name] = [step.loss for step in report.steps]
            say(f"{name}: {losses[name]}")
    finally:
        engines.end()
    (folder / "losses.json").write_text(json.dumps(losses))


def compare(first: Path, second: Path) -> None:
    """Exit with an error if a loss differs by more than LIMIT between two runs."""
    expected, found = (json.loads(file.read_text()) for file in (first, second))
    assert expected.keys() == found.keys() and all(expected.values())
    for name in expected:
        worst = max(abs(a - b) for a, b in zip(expected[name], found[name], strict=True))
        say(f"{name}: {len(expected[name])} losses, largest difference {worst:.1e}")
        if not worst <= LIMIT:
            sys.exit(f"{name}: at most {LIMIT:g} was expected. {expected[name]} {found[name]}")


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        compare(*map(Path, sys.argv[2:]))
    else:
        main(Path(sys.argv[1]))
