"""Devices that a plan leaves idle for a whole epoch wait for it, however long it takes."""

from dataclasses import replace
from pathlib import Path

from stopped_run import train_rank

from tests.methods.builders import PLANS, losses_of, make_rank_job
from tests.methods.conftest import four_devices
from tests.plans import stage
from tests.profiles import grid
from tests.waiting import LIMIT_S
from workbench.core import LayerProfile
from workbench.models.loading import load_stack
from workbench.runtime.engines import EngineCluster


def test_idle_devices_outwait_epochs_longer_than_the_timeout(engines: EngineCluster, tmp_path: Path) -> None:
    """Each epoch lasts longer than a silent peer is waited for; three devices have nothing to do but wait.

    What they import and load at first, which takes a busy host as long, is no part of it: a job before this one does.
    """
    stack = load_stack("tiny-bert")
    job = make_rank_job(stack, "tiny-bert", PLANS["[6] on [1]"], four_devices(), tmp_path, samples=32, epochs=2)
    alone = stage(0, 6, {1: 8})
    # The paced side network alone makes four steps of two micro-batches take longer (4.8 s) than the timeout.
    layer = LayerProfile(name="slow", times={"SF": grid(0.1)}, frozen_bytes=0, trainable_bytes=0)
    slow = replace(
        job,
        plan=replace(job.plan, cached=alone),
        profile=replace(job.profile, layers=((layer,) * 6,) * 4),
        is_paced=True,
        timeout_s=4.0,
    )
    engines.run(train_rank, [replace(job, timeout_s=LIMIT_S)] * 4)
    losses = losses_of(engines.run(train_rank, [slow] * 4))
    assert sorted(losses) == [(epoch, step) for epoch in range(2) for step in range(4)]
