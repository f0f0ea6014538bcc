"""The measurements of lab 03: PAC+ and LoRA on the same devices, initial weights, and the content of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import plotly.graph_objects as go
import torch

from workbench import experiment
from workbench.core.catalogue import load_cluster
from workbench.core.job import Fidelity, Job
from workbench.core.report import Report, busy_note
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.configuration import model_facts
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.quantization import dense_weight, is_linear
from workbench.models.stack import LayerStack
from workbench.tasks import load_task
from workbench.tasks.task import Task
from workbench.tasks.tokenize import TokenizedSplit, evaluation_batches, tokenize
from workbench.trainings.inputs import run_all
from workbench.trainings.techniques import Training, reached
from workbench.widgets import LiveProgress, Table, lines
from workbench_labs.precision import TechniqueCost, cache_errors, measure_techniques
from workbench_labs.side_network import Sentences

MOST_TOKENS = 64
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Setting:
    """The model and the sentences of a job of PAC+, whose sizes are the job's."""

    job: Job

    @property
    def model(self) -> str:
        """Return the model's name."""
        return self.job.model

    @property
    def samples(self) -> tuple[int, int, int]:
        """Return the number of sentences of the train, validation and test split."""
        job = self.job
        assert job.train_samples and job.validation_samples and job.test_samples
        return job.train_samples, job.validation_samples, job.test_samples

    @cached_property
    def fetched_task(self) -> Task:
        """Return the task."""
        return load_task(self.job.task).limited(*self.samples)

    @cached_property
    def max_length(self) -> int:
        """Return the tokens of the longest sentence that is taken whole."""
        return min(MOST_TOKENS, model_facts(self.model).max_length)

    def tokenized(self, split: str) -> TokenizedSplit:
        """Return the tokens of a split: train, validation or test."""
        return tokenize(getattr(self.fetched_task, split), load_tokenizer(self.model), max_length=self.max_length)

    @cached_property
    def stack(self) -> LayerStack:
        """Return the frozen backbone."""
        return load_stack(self.model)

    def sentences(self, split: str, most: int | None = None) -> Sentences:
        """Return at most so many sentences of a split, for a student's side network."""
        tokens = self.tokenized(split)
        return Sentences(stack=self.stack, split=tokens, every=-(-len(tokens) // (most or len(tokens))))

    @property
    def config(self) -> ParallelAdapterConfig:
        """Return the side network's sizes."""
        facts = model_facts(self.model)
        return ParallelAdapterConfig(
            hidden_size=facts.hidden_size,
            num_layers=facts.num_layers,
            reduction=self.job.options["reduction"],
            is_causal=facts.is_causal,
            seed=self.job.seed,
        )

    def technique_costs(self) -> tuple[TechniqueCost, ...]:
        """Return what a step of each technique costs in this process (see measure_techniques)."""
        return measure_techniques(
            self.model, next(evaluation_batches(self.tokenized("train"), self.job.batch_size)), self.config
        )

    def sizes(self) -> Table:
        """Return the model's and the data's sizes."""
        facts, tokens = model_facts(self.model), self.tokenized("train")
        rows = [
            ("model", f"{self.model}: {facts.num_layers} layers, {facts.hidden_size} wide"),
            ("its weights", f"{sum(parameter.numel() for parameter in self.stack.parameters()):,}, all frozen"),
            ("sentences", f"{len(tokens)} to train on, {sum(tokens.lengths) / len(tokens):.0f} tokens each (mean)"),
        ]
        return Table(("", ""), rows)

    def first_block(self, size: int = 64) -> list[float]:
        """Return the first weights of the backbone's first matrix."""
        weights: list[float] = dense_weight(next(filter(is_linear, self.stack.modules()))).reshape(-1)[:size].tolist()
        return weights

    def cache_table(self) -> Table:
        """Return what the activation cache of the training sentences takes in each storage type, and its error."""
        split, width, taps = self.tokenized("train"), self.stack.hidden_size, self.stack.num_taps
        batch = next(evaluation_batches(split, self.job.batch_size))
        with torch.no_grad():
            last, _ = self.stack(batch.input_ids, batch.attention_mask)
        errors = cache_errors(last.reshape(-1, width), dtypes=("float32", "bfloat16", "int8"))
        rows = [
            (dtype, f"{row * taps:,}", f"{row * taps * sum(split.lengths) / 1e6:.1f}", f"{error:.1e}")
            for dtype, (row, error) in errors.items()
        ]
        columns = ("stored as", "bytes a token", f"MB for {len(split)} sentences", "error, share of the activation")
        return Table(columns, rows, title=f"The cache of {taps} taps, each {width} wide")

    def initial_weights(self, ways: Sequence[str], target: float) -> tuple[Table, go.Figure]:
        """Return the validation scores of trainings that begin with different weights.  target: % of right answers."""
        options: dict[str, Any] = {"task": self.job.task, "model": self.model, "technique": "parallel_adapters"}
        options |= {"samples": self.samples, "max_length": self.max_length, "learning_rate": LEARNING_RATE}
        options |= {
            "batch_size": self.job.batch_size,
            "reduction": self.config.reduction,
            "epochs": 2,
            "score_every": 4,
        }
        trainings = [Training(initialization=way, seed=self.job.seed, **options) for way in ways]
        outcomes = run_all(trainings, None, None, lambda text: print(f"{text:<90}", end="\r"))  # noqa: T201
        print(" " * 90, end="\r")  # noqa: T201
        curves = {way.initialization: outcome.curve for way, outcome in outcomes.items()}
        rows = [(way, reached(curve, target) or "not reached", f"{curve[-1][1]:.1f}") for way, curve in curves.items()]
        table = Table(
            ("initial weights", f"steps to {target:g} %", "last score, %"),
            rows,
            title="Training from different initial weights, one seed (validation sentences that are right)",
        )
        figure = lines(
            curves,
            title="Does the start matter?",
            label="measured, one seed",
            x_title="steps",
            y_title="validation sentences right, %",
            subtitle=f"{self.samples[1]} sentences: a difference below {100 / self.samples[1] ** 0.5:.0f} points "
            "may be chance",
        )
        return table, figure

    def on_devices(self, cluster_name: str, *, fidelity: Fidelity) -> dict[str, Report]:
        """Return PAC+'s and LoRA's runs on the same emulated devices, with the same sentences."""
        cluster = load_cluster(cluster_name)
        lora = replace(self.job, method="fine_tuning", options={"technique": "lora"})
        jobs = {"PAC+": self.job, "LoRA": lora}
        reports = {}
        for name, job in jobs.items():
            with LiveProgress(job, cluster) as live:
                reports[name] = experiment.run(job, cluster, fidelity=fidelity, progress=live.update)
        return reports


MOVED = ("sharing the activations", "sharing the adapter")
"""A report's names for the phases between the first epoch and the cached ones."""


def training_s(report: Report) -> float:
    """Return the seconds of all epochs, and of the cache's way to where it is needed."""
    return sum(epoch.seconds for epoch in report.epochs) + moved_s(report)


def moved_s(report: Report) -> float:
    """Return the measured seconds in which the cache and the adapter were divided among the devices."""
    return sum(report.phases_s.get(phase, 0.0) for phase in MOVED)


def devices_table(reports: dict[str, Report]) -> Table:
    """Return time, memory and score of runs on the same devices, next to each other."""
    rows = []
    for name, report in reports.items():
        first, *later = (epoch.seconds for epoch in report.epochs)
        measured = [timeline for title, timeline in report.timelines.items() if title.endswith("measured")]
        most = max(timeline.highest_peak_bytes for timeline in measured)
        seconds = (first, moved_s(report), sum(later), training_s(report))
        rows.append(
            (
                name,
                report.plan.grouping(),
                *(f"{phase_s:.2f}{report.mark}" if phase_s else "-" for phase_s in seconds),
                f"{most / 1e6:.0f}",
                f"{100 * report.metrics['accuracy']:.1f}",
            )
        )
    any_report = next(iter(reports.values()))
    columns = (
        "",
        "devices by stage",
        "first epoch, s",
        "moving the cache, s",
        "later epochs, s",
        "together, s",
        "most values in a step, MB",
        "right, %",
    )
    notes = dict.fromkeys(filter(None, (busy_note(report) for report in reports.values())))
    share = moved_s(any_report) / training_s(any_report)
    note = " ".join([f"Moving the cache is {share:.1%} of PAC+'s training.", *notes])
    return Table(columns, rows, title=f"The same sentences on the same devices ({any_report.label})", note=note)
