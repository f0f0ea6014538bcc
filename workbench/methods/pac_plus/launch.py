"""The parent's side of a PAC+ run: make the initial adapter, start the ranks, put together what they send back."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors.torch import load_file

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.serial import to_json
from workbench.methods.common.digest import weights_digest
from workbench.methods.common.folder import INITIAL
from workbench.methods.pac_plus.folder import checkpoint_path
from workbench.methods.pac_plus.prepare import PreparedJob
from workbench.methods.pac_plus.session import RankJob
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.stack import LayerStack
from workbench.models.tensor_files import save_tensors
from workbench.runtime.kept_caches import KeptCaches


def fingerprint(prepared: PreparedJob, stack: LayerStack, plan: Plan) -> str:
    """Return what a run is: the backbone's weights, the tokens, the plan, and every setting of the job."""
    digest = hashlib.sha256(weights_digest(stack).encode())
    job = prepared.job
    digest.update(prepared.data_digest().encode())
    digest.update(b"from a kept cache" if prepared.from_kept else b"")
    digest.update(to_json(job).encode())
    digest.update(to_json(plan).encode())
    return digest.hexdigest()


def rank_job(
    prepared: PreparedJob,
    cluster: Cluster,
    plan: Plan,
    profile: Profile,
    *,
    folder: Path,
    identity: str,
    start_epoch: int,
    resumes: bool = False,
) -> RankJob:
    """Return the message that starts every rank."""
    return RankJob(
        job=prepared.job,
        cluster=cluster,
        plan=plan,
        profile=profile,
        adapter=prepared.adapter,
        split=prepared.train,
        folder=folder,
        fingerprint=identity,
        cache_dtype=prepared.options.cache_dtype,
        quantization=prepared.options.quantization,
        start_epoch=start_epoch,
        resumes=resumes,
        kept=(KeptCaches().root, prepared.activation_key) if prepared.from_kept else None,
    )


def save_initial(adapter: ParallelAdapter, folder: Path) -> None:
    """Write the adapter with which every rank begins."""
    save_tensors(folder / INITIAL, adapter.state_dict())


def load_checkpoint(prepared: PreparedJob, folder: Path, epoch: int) -> ParallelAdapter:
    """Return the adapter as it was after an epoch."""
    adapter = ParallelAdapter(prepared.adapter)
    state = load_file(folder / INITIAL)
    tensors = load_file(checkpoint_path(folder, epoch))
    state |= {name.removeprefix("weight/"): tensor for name, tensor in tensors.items() if name.startswith("weight/")}
    adapter.load_state_dict(state)
    return adapter.eval()
