"""The parent's side of a run: what it is, and what every rank is told."""

from __future__ import annotations

import hashlib
from pathlib import Path

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.serial import to_json
from workbench.methods.common.digest import weights_digest
from workbench.methods.fine_tuning.prepare import PreparedJob
from workbench.methods.fine_tuning.session import RankJob
from workbench.models.stack import LayerStack


def fingerprint(prepared: PreparedJob, stack: LayerStack, plan: Plan) -> str:
    """Return what a run is: the backbone's weights, the tokens, the plan, and every setting of the job."""
    digest = hashlib.sha256(weights_digest(stack).encode())
    for part in (prepared.data_digest(), to_json(prepared.job), to_json(plan)):
        digest.update(part.encode())
    return digest.hexdigest()


def rank_job(
    prepared: PreparedJob,
    cluster: Cluster,
    plan: Plan,
    profile: Profile,
    *,
    folder: Path,
    start_epoch: int = 0,
    resumes: bool = False,
) -> RankJob:
    """Return the message that starts every rank."""
    return RankJob(
        job=prepared.job,
        cluster=cluster,
        plan=plan,
        profile=profile,
        config=prepared.config,
        facts=prepared.facts,
        split=prepared.train,
        folder=folder,
        start_epoch=start_epoch,
        resumes=resumes,
    )
