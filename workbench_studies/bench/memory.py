"""`workbench bench memory`: peak memory and time of a training step by what happens to activations, next to
torch.utils.checkpoint, PAC+'s Parallel Adapters and P-RGE.

All sides train on the same tokens, in one process.  LoRA's steps are the operations of a one-device schedule.  Times:
the sides take turns; files are in the folder for temporary files.  Memory: each side in a separate process, the peak
resident memory above the libraries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from workbench.core.names import Technique
from workbench.core.plan import Activations, Plan, Share, Stage
from workbench.core.schedule import Value
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.fine_tuning.handlers import BackpropagationHandlers
from workbench.methods.p_rge.zeroth_order import TrainableConfig, load_causal_model
from workbench.models.loading import load_stack
from workbench.models.quantization import held_bytes
from workbench.models.stack import BackboneStage
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.profiler.timing import torch_threads
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule
from workbench.runtime.memory import measured_in_child
from workbench.schedules.pieces import StepLayout
from workbench.schedules.pipeline import backpropagation
from workbench.tasks.tokenize import Batch
from workbench_studies.bench.frame import (
    Figures,
    Progress,
    Step,
    interleaved,
    line_of,
    peak_bytes,
    ratios,
)
from workbench_studies.bench.p_rge import SMALL, batch_of, prge_step, prompts

Side = Literal["LoRA", "LoRA recomputing", "LoRA on disk", "LoRA torch.utils.checkpoint", "Parallel Adapters", "P-RGE"]
OURS, TORCH, ON_DISK = "LoRA recomputing", "LoRA torch.utils.checkpoint", "LoRA on disk"
MODEL, LENGTH, SAMPLES, QUERIES, THREADS, ROUNDS = "SmolLM2-135M", 64, 16, 4, 2, 7
STEPS = 2
ITS_MODEL: dict[str, Technique] = {"Parallel Adapters": "parallel"}


def bench(
    progress: Progress = print,
    *,
    model: str = MODEL,
    length: int = LENGTH,
    samples: int = SAMPLES,
    rounds: int = ROUNDS,
) -> Figures:
    """Return each side's step time, peak memory, and both over those of torch.utils.checkpoint.

    samples: number of samples in a step, each of `length` tokens; P-RGE divides them among its queries.
    """
    with torch_threads(THREADS), torch.random.fork_rng(devices=[]):
        models = {technique: trained_model(model, technique) for technique in ("lora", "parallel")}
        sides = {side: step_of(side, model, length, samples, models.get) for side in get_args(Side)}
        seconds = interleaved(sides, rounds)
        weights = {side: _weights_bytes(side, models) for side in get_args(Side)}
    del sides, models
    peaks = {side: measured_in_child(side_peak_bytes, side, model, length, samples) for side in get_args(Side)}
    points = []
    for side in get_args(Side):
        of_step = peaks[side] - weights[side]
        point = {
            "side": side,
            "step_ms": 1e3 * median(seconds[side]),
            **ratios(seconds[side], seconds[TORCH], "time_over_torch"),
            "peak_mb": peaks[side] / 1e6,
            "peak_over_torch": peaks[side] / peaks[TORCH],
            "above_weights_mb": of_step / 1e6,
        }
        points.append(point)
        progress(line_of(point))
    ours = next(point for point in points if point["side"] == OURS)
    return {
        "label": "measured on this machine, one process; memory in a child process for each side",
        "what": f"a step of {samples} samples of {length} tokens, float32: LoRA (rank 8, q and v) and Parallel "
        f"Adapters classify, P-RGE (q = {QUERIES}) predicts words; median of {rounds} interleaved rounds",
        "model": model,
        "threads": THREADS,
        "time_over_torch": ours["time_over_torch"],
        "peak_over_torch": ours["peak_over_torch"],
        "points": points,
    }


Trained = tuple[TechniqueStage, FlatAdamW]


def trained_model(name: str, technique: Technique) -> Trained:
    """Return a whole model with its trained parameters, and the optimizer."""
    stack = load_stack(name)
    config = TechniqueConfig(technique=technique, hidden_size=stack.hidden_size, num_layers=stack.num_layers)
    model = TechniqueStage(stack.stage(0, stack.num_layers), config)
    return model, FlatAdamW(model, learning_rate=LinearSchedule(peak=1e-5, num_steps=10**6), weight_decay=0.01)


def step_of(side: str, model: str, length: int, samples: int, loaded: Any = lambda technique: None) -> Step:
    """Return a function that does a side's step of a number.  loaded: returns a model that is loaded, by technique."""
    rows = prompts(model, length)
    if side == "P-RGE":
        causal = load_causal_model(model, TrainableConfig())
        return prge_step(causal, batch_of(rows, max(1, samples // QUERIES)), QUERIES)
    technique = ITS_MODEL.get(side, "lora")
    stage, optimizer = loaded(technique) or trained_model(model, technique)
    encoded = batch_of(rows, samples)
    ids = torch.arange(samples)
    batch = Batch(
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        labels=ids % 2,
        sample_ids=ids,
        indices=tuple(range(samples)),
    )
    choices: dict[str, Activations] = {OURS: "recompute", ON_DISK: "disk"}
    activations = choices.get(side, "memory")
    step = scheduled_step(stage, optimizer, batch, activations)
    return checkpointed(step, stage.backbone) if side == TORCH else step


def scheduled_step(model: TechniqueStage, optimizer: FlatAdamW, batch: Batch, activations: Activations) -> Step:
    """Return a step as the operations of a one-device schedule, each of whose values is freed after its last read."""
    count, layers = len(batch), model.backbone.num_layers
    stage = Stage(start=0, stop=layers, shares=(Share(rank=0, samples=count),), activations=activations)
    plan = Plan(method="bench", stages=(stage,), micro_batch_size=count, num_micro_batches=1)
    schedule = backpropagation(plan, (count,))
    uses = Counter(value for op in schedule.ops[0] for value in op.reads)
    layout = StepLayout(plan=plan, sizes=(count,), lengths=(batch.input_ids.shape[1],))
    compute = StageCompute(model)
    compute.folder = Path(gettempdir()) if activations == "disk" else None

    def step(number: int) -> Tensor:
        handlers = BackpropagationHandlers(
            rank=0,
            batches=[batch],
            total=count,
            compute=compute,
            optimizer=optimizer,
            epoch=0,
            layout=layout,
            shared=(),
        ).table()
        num_uses, values = Counter(uses), dict[Value, Any].fromkeys(schedule.inputs[0])
        for op in schedule.ops[0]:
            written = handlers[op.kind](op, tuple(values[value] for value in op.reads))
            for value in op.reads:
                num_uses[value] -= 1
                if not num_uses[value]:
                    del values[value]
            values.update(zip(op.writes, written, strict=True))
            del written
        return next(content for value, content in values.items() if value.name == "loss")

    return step


def checkpointed(step: Step, backbone: BackboneStage) -> Step:
    """Return a step during which torch.utils.checkpoint runs each layer, without re-entrance as torch recommends."""

    @contextmanager
    def by_torch() -> Iterator[None]:
        layers = list(backbone.layers.values())
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    return by_torch()(step)


def _weights_bytes(side: str, models: dict[str, Trained]) -> int:
    return held_bytes(models[ITS_MODEL.get(side, "lora")][0])


def side_peak_bytes(side: str, model: str, length: int, samples: int) -> int:
    """Return this process's peak above the memory of the libraries."""
    torch.set_num_threads(THREADS)
    step_of(side, SMALL, length, 4)(0)

    def run(step: Step) -> None:
        for number in range(STEPS):
            step(number)

    return peak_bytes(partial(step_of, side, model, length, samples), run)
