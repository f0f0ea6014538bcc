"""A job that is done in seconds: a tiny model on made-up sentences, on two emulated devices."""

from __future__ import annotations

import random
from pathlib import Path

from tests.clusters import cluster_of
from workbench.core import Cluster, Job

TRAIN_SAMPLES, TEST_SAMPLES, EPOCHS = 64, 24, 3
CLUSTER_FILE = """\
name = "two"
[defaults]
gflops = 30
memory_mb = 600
[[device]]
name = "alpha"
host_share = 0.5
[[device]]
name = "beta"
host_share = 0.4
"""


def write_data(folder: Path, *, train: int = TRAIN_SAMPLES) -> Path:
    """Write a data folder that reads as SST-2 and return it."""
    chance = random.Random(0)
    place = folder / "SST-2"
    place.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("dev", TEST_SAMPLES)):
        lines = ["sentence\tlabel"]
        for _ in range(count):
            label = chance.randrange(2)
            words = [chance.choice(("film", "story", "town", "news", "people")) for _ in range(chance.randrange(2, 12))]
            lines.append(" ".join([*words, ("bad", "good")[label]]) + f"\t{label}")
        (place / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def two_devices(memory_bytes: int = 600_000_000, *, share: float | None = 1.0) -> Cluster:
    """Return two devices whose links do not slow a test down."""
    names = ("alpha", "beta")
    return cluster_of(names, name="two", flops_per_s=3e10, memory_bytes=memory_bytes, host_share=share)


def tiny_job(data: Path, **changes: object) -> Job:
    """Return the job."""
    settings: dict = {
        "model": "tiny-bert",
        "task": "sst2",
        "data": str(data),
        "epochs": EPOCHS,
        "batch_size": 16,
        "micro_batches": 2,
    }
    return Job(**settings | changes)
