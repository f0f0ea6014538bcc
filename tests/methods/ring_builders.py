"""Small RingAda runs on made-up token ids, and the plain loop that they must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.methods.builders import LEARNING_RATE, free_profile, split_for
from tests.methods.one_process import run_program
from tests.models.helpers import technique_part
from tests.plans import staged_plan
from workbench.core import Cluster, Job, Link, Plan
from workbench.core.names import TrainedKind
from workbench.core.schedule import Value
from workbench.methods.common.rank_results import RankResult
from workbench.methods.ringada.options import RingAdaOptions, Unfreezing
from workbench.methods.ringada.phases import RingPhase
from workbench.methods.ringada.prepare import Policy
from workbench.methods.ringada.rank_job import RingRankJob, Round, RoundShape
from workbench.methods.ringada.schedule import Iteration
from workbench.models.configuration import model_facts
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.optimization import learning_rate_at
from workbench.models.parallel_adapter import ParallelAdapterStage, task_loss
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.tasks import load_task
from workbench.tasks.tokenize import Batch, collate, tokenize


def ring_plan(*blocks: tuple[int, int], micro_batches: int = 2) -> Plan:
    """Return the ring of (rank, number of layers), in its order."""
    parts = ((count, {rank: 8 // micro_batches}) for rank, count in blocks)
    return staged_plan(*parts, method="ringada", micro_batches=micro_batches)


def whole_plan(model: str, samples: int = 8, micro_batches: int = 1) -> Plan:
    """Return the plan of a federated run: the whole model on each of four devices, with so many samples."""
    settings = {"method": "ringada", "micro_batch_size": samples, "micro_batches": micro_batches}
    return staged_plan((load_stack(model).num_layers, dict.fromkeys(range(4), samples)), **settings)


def ring_job(
    model: str,
    plan: Plan,
    cluster: Cluster,
    folder: Path,
    *,
    every: int = 3,
    unfreezing: Unfreezing = "steps",
    epochs: int = 2,
    samples: int = 45,
    local_iterations: int = 2,
    kind: TrainedKind = "classification",
    cache: bool = False,
    federated: bool = False,
    parallel: bool = False,
) -> RingRankJob:
    """Return a run whose adapters are unfrozen one after the other, by a policy."""
    stack, facts = load_stack(model), model_facts(model)
    sizes: dict[str, Any] = {"hidden_size": stack.hidden_size, "num_layers": stack.num_layers, "kind": kind}
    if stack.family.reads_images:
        split, sizes = (
            tokenize(load_task("digits").train.take(range(samples)), load_tokenizer(model), max_length=1),
            sizes | {"num_outputs": 10},
        )
    else:
        split = split_for(stack, samples, kind)
    job = Job(
        model=model, epochs=epochs, batch_size=8, micro_batches=plan.num_micro_batches, learning_rate=LEARNING_RATE
    )
    return RingRankJob(
        job=job,
        cluster=cluster,
        plan=plan,
        profile=free_profile(stack.num_layers, cluster.world_size),
        is_paced=False,
        split=split,
        config=TechniqueConfig(technique="parallel" if parallel else "serial", bottleneck=8, reduction=4, **sizes),
        facts=facts,
        options=RingAdaOptions(local_iterations=local_iterations, cache=cache, federated=federated),
        policy=Policy(num_layers=stack.num_layers, every=every, unfreezing=unfreezing, patience=1, threshold=0.05),
        owned={
            device.name: tuple(range(rank, samples, cluster.world_size)) for rank, device in enumerate(cluster.devices)
        },
        typical_length=16,
        folder=folder,
    )


def train_plainly(job: RingRankJob) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return each mini-batch's loss and the final weights of one process that does one mini-batch after the other."""
    trained, logits_of = _whole(job)
    groups = [
        {"params": [parameter], "weight_decay": job.job.weight_decay if parameter.ndim >= 2 else 0.0}
        for parameter in trained.values()
    ]
    optimizer, policy, losses, step = torch.optim.AdamW(groups, lr=1.0), job.policy, [], 0
    brought: list[float] = []
    for epoch in range(job.job.epochs):
        for planned in job.planned_epoch(epoch):
            squared = []
            for start, one in begun(planned):
                first = policy.adapted(brought)[-1] if policy.is_adaptive else one.first_unfrozen
                samples = [sample for part in planned.samples[start : start + one.num_micro_batches] for sample in part]
                batch = collate(job.split, samples)
                loss = task_loss(logits_of(batch, epoch), batch.labels, job.config.kind)
                loss.backward()
                for name, parameter in trained.items():
                    if _layer_of(name) < first:
                        parameter.grad = None
                of_adapters = [
                    parameter.grad
                    for name, parameter in trained.items()
                    if _layer_of(name) < 99 and parameter.grad is not None
                ]
                squared.append(sum(float(gradient.square().sum()) for gradient in of_adapters))
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate_at(step, job.num_steps, job.job.learning_rate, job.job.warmup_fraction)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                step += 1
            size = len(squared)
            brought.append(
                sum(losses[-size:]) / size if policy.unfreezing == "plateau" else (sum(squared) / size) ** 0.5
            )
    assert not policy.is_adaptive or len(set(policy.adapted(brought))) > 1
    return losses, {name: parameter.detach() for name, parameter in trained.items()}


def begun(planned: Round) -> list[tuple[int, Iteration]]:
    """Return a round's mini-batches, each with its first micro-batch."""
    assert isinstance(planned.shape, RoundShape)
    iterations = planned.shape.iterations
    return list(
        zip(accumulate((iteration.num_micro_batches for iteration in iterations), initial=0), iterations, strict=False)
    )


def _whole(job: RingRankJob) -> tuple[dict[str, torch.nn.Parameter], Callable[[Batch, int], torch.Tensor]]:
    """Return the trained parameters of a whole model by name, and a function that computes the logits of a batch in an
    epoch."""
    stack = load_stack(job.job.model)
    backbone = copy.deepcopy(stack.stage(0, stack.num_layers))
    model = TechniqueStage(backbone, job.config)
    side = model.adapters
    if not isinstance(side, ParallelAdapterStage):
        return model.trained(), model.batch_logits

    def beside(batch: Batch, epoch: int) -> torch.Tensor:
        with torch.no_grad():
            taps = backbone(batch.input_ids, batch.attention_mask)[1]
        return side.head(
            side(None, taps, batch.attention_mask), taps[-1], batch.attention_mask, batch.sample_ids, epoch
        )

    return model.trained(), beside


def _layer_of(name: str) -> int:
    """Return the layer with which a parameter is unfrozen; 99 for the head's."""
    numbers = [int(part) for part in name.split(".")[1:3] if part.isdigit()]
    return numbers[0] if numbers else 0 if name.startswith("adapters.first.") else 99


def train_federated(job: RingRankJob) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return each mini-batch's loss and the final weights of one process that trains each device's copy, round by
    round, and averages."""
    stack, losses = load_stack(job.job.model), list[float]()
    copies = [technique_part(stack, job.config) for _ in job.cluster.devices]
    optimizers = []
    for model in copies:
        decays = [
            (parameter, job.job.weight_decay if parameter.ndim >= 2 else 0.0) for parameter in model.trained().values()
        ]
        optimizers.append(
            torch.optim.AdamW([{"params": [one], "weight_decay": decay} for one, decay in decays], lr=1.0)
        )
    for number in range(job.num_rounds):
        epoch, planned = number // job.rounds_per_epoch, job.round(number)
        for at, (start, tensor) in enumerate(begun(planned)):
            model, optimizer = copies[tensor.initiator], optimizers[tensor.initiator]
            batch = collate(
                job.split, [row for part in planned.samples[start : start + tensor.num_micro_batches] for row in part]
            )
            logits = model.logits(
                model(batch.input_ids, batch.attention_mask)[1], batch.attention_mask, batch.sample_ids, epoch
            )
            loss = task_loss(logits, batch.labels, job.config.kind)
            loss.backward()
            step = number * job.steps_per_round + at
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, job.num_steps, job.job.learning_rate, job.job.warmup_fraction)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            for own in zip(*(model.trained().values() for model in copies), strict=True):
                moments = [optimizer.state[one] for optimizer, one in zip(optimizers, own, strict=True)]
                for tensors in (
                    [one.data for one in own],
                    *([moment[name] for moment in moments] for name in ("exp_avg", "exp_avg_sq")),
                ):
                    mean = torch.stack(tensors).mean(dim=0)
                    for tensor in tensors:
                        tensor.copy_(mean)
    return losses, {name: parameter.detach() for name, parameter in copies[0].trained().items()}


def train_on_ring(job: RingRankJob) -> tuple[list[float], dict[str, torch.Tensor], list[dict[Value, Any]]]:
    """Return the same of the ring's programs, every rank's operations in this process, and every value that was held at
    the end.

    Where the plan's layers are moved, other phases begin with all that the former ones have trained; their caches are
    filled again.
    """
    phases: list[RingPhase] = []
    losses: list[float] = []
    values: list[dict[Value, Any]] = []
    for epoch in range(job.job.epochs):
        for step in range(job.rounds_per_epoch):
            number = epoch * job.rounds_per_epoch + step
            if number in dict(job.plan.assignments):
                job = replace(job, start_epoch=epoch, start_step=step)
                trained = {name: tensor for phase in phases for name, tensor in phase.optimizer.named_tensors().items()}
                phases = [_phase(job.on_rank(rank), rank) for rank in range(job.cluster.world_size)]
                for phase in phases if number else ():
                    for name, view in phase.optimizer.named_tensors().items():
                        view.copy_(trained[name])
                    phase.optimizer.set_num_steps(number)
            planned = job.round(number)
            programs = [phase.phase.program(phase.shape(planned)) for phase in phases]
            [program] = {program.digest: program for program in programs}.values()
            values = run_program(program, {rank: phase.handlers(epoch, planned) for rank, phase in enumerate(phases)})
            results = {
                value.microbatch: float(loss) for own in values for value, loss in own.items() if value.name == "loss"
            }
            for start, one in begun(planned):
                losses.append(sum(results[start + m] for m in range(one.num_micro_batches)) * len(begun(planned)))
    weights = {
        name.removeprefix("weight/"): tensor.detach()
        for phase in phases
        for name, tensor in phase.optimizer.named_tensors().items()
        if name.startswith("weight/")
    }
    return losses, weights, values


def _phase(job: RingRankJob, rank: int) -> RingPhase:
    context = SimpleNamespace(own_folder=lambda folder: folder / f"rank-{rank}")
    session: Any = SimpleNamespace(
        rank=rank, rank_job=job, progress=SimpleNamespace(phase=lambda name: None), context=context
    )
    phase = RingPhase(session, job.phases()[0], RankResult(rank=rank))
    phase.load(0)
    return phase


def unequal_links(cluster: Cluster) -> Cluster:
    """Return the cluster with one fast pair, so that the initiators' order is not the ring's."""
    names = [device.name for device in cluster.devices]
    return Cluster(name="unequal", devices=cluster.devices, pairs={f"{names[0]}>{names[-1]}": Link(bytes_per_s=1e10)})
