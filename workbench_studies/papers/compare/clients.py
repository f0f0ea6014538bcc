"""The local training of a client of federated averaging, in any framework: the mini-batches of one device of a RingAda
job (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1).

It is an independent implementation with torch's AdamW over a whole model; the methods' runtime computes layer by layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import accumulate
from statistics import fmean

import torch
from torch import Tensor

from workbench.methods.ringada.rank_job import RingRankJob, RoundShape
from workbench.models.loading import load_stack
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.techniques import TechniqueStage
from workbench.tasks.tokenize import collate
from workbench.trainings.common import batch_loss

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
State = dict[str, Tensor]
"""Trained weights and AdamW's moments by name: 'weight/...', 'exp_avg/...', 'exp_avg_sq/...'."""


class Client:
    """A model with adapters and its optimizer, for the rounds of any device.

    job: what the device knows (see RankJob.on_rank).
    """

    def __init__(self, job: RingRankJob) -> None:
        self.job = job
        self.model = TechniqueStage(copy.deepcopy(load_stack(job.job.model)).stage(0, job.plan.num_layers), job.config)
        self._optimizer = make_optimizer(self.model, job.job.weight_decay)

    def state(self) -> State:
        """Return copies of weights and moments; zeros before the first update."""
        state = {f"{WEIGHT}/{name}": parameter.detach().clone() for name, parameter in self.model.trained().items()}
        for name, parameter in self.model.trained().items():
            moments = self._optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                state[f"{moment}/{name}"] = moments[moment].clone() if moments else torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Continue from a state after so many updates; without moments the optimizer begins again."""
        for name, parameter in self.model.trained().items():
            parameter.copy_(state[f"{WEIGHT}/{name}"])
            moments = {moment: state.get(f"{moment}/{name}") for moment in MOMENTS}
            if updates and None not in moments.values():
                self._optimizer.state[parameter] = {"step": torch.tensor(float(updates))} | {
                    moment: value.clone() for moment, value in moments.items() if value is not None
                }
            else:
                self._optimizer.state.pop(parameter, None)

    def train(self, rank: int, number: int) -> tuple[int, float]:
        """Train the mini-batches of a device in a round.  Returns the samples and the mean loss of the mini-batches.

        The learning rate is that of the mini-batch's number in the whole run, devices one after the other.
        """
        job, planned = self.job, self.job.round(number)
        assert isinstance(planned.shape, RoundShape)
        iterations, losses, count = planned.shape.iterations, list[float](), 0
        firsts = accumulate((iteration.num_micro_batches for iteration in iterations), initial=0)
        self.model.train()
        for place, (first, iteration) in enumerate(zip(firsts, iterations, strict=False)):
            if iteration.initiator != rank:
                continue
            parts = planned.samples[first : first + iteration.num_micro_batches]
            rows = [row for part in parts for row in part]
            loss = batch_loss(self.model, collate(job.split, rows), number // job.rounds_per_epoch)
            loss.backward()
            step = number * job.steps_per_round + place
            rate = learning_rate_at(step, job.num_steps, job.job.peak_learning_rate, job.job.warmup_fraction)
            set_learning_rate(self._optimizer, rate)
            self._optimizer.step()
            self._optimizer.zero_grad()
            losses.append(loss.item())
            count += len(rows)
        return count, fmean(losses)
