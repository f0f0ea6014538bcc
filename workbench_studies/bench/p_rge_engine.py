"""`workbench bench p_rge_engine`: an ExecuTorch program against the same model in PyTorch: steps, losses, memory, file
(section 3.3).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from workbench.core.run_folder import scratch_folder
from workbench.core.units import size_words
from workbench.methods.p_rge.inference_engine import EngineConfig, EngineTrainer, export_program, philox_noise
from workbench.methods.p_rge.inference_engine.config import bindings
from workbench.methods.p_rge.zeroth_order import CausalModel, TrainableConfig, gradients_of, load_causal_model
from workbench.models.matmul import matmul_backend
from workbench.profiler.timing import torch_threads
from workbench.runtime.memory import measured_in_child
from workbench.tasks.prompts import EncodedPrompts, PromptBatch
from workbench_studies.bench.frame import Figures, Progress, peak_bytes
from workbench_studies.bench.p_rge import batch_of, prompts

POINTS = (
    ("tiny-llama", 32, 2, 2, 100, "vocabulary"),
    ("SmolLM2-135M", 64, 4, 4, 20, "vocabulary"),
    ("SmolLM2-135M", 64, 4, 4, 20, "label_words"),
)
"""Model, tokens, q, E, steps, and whether the loss covers the vocabulary or only the label words."""
THREADS, LEARNING_RATE = 2, 1e-3
MEMORY_STEPS = 3

Point = tuple[str, int, int, int, int, str]


def bench(progress: Progress = print, *, points: tuple[Point, ...] = POINTS) -> Figures:
    """Return a row for each model: export, file, step times, the largest relative deviation of a loss, peak memory.

    Both sides make the same steps with the same noise, in turns.  Raises ConfigError if ExecuTorch is not installed.
    """
    with torch_threads(THREADS), scratch_folder() as folder:
        rows = [_point(point, folder, progress) for point in points]
    return {
        "label": "measured on this machine, steps of both sides in turns; memory in child processes, above their "
        "runtimes' own",
        "what": "P-RGE with LoRA-FA in ExecuTorch (XNNPACK) beside the same steps in PyTorch, float32",
        "threads": THREADS,
        "eager_products": matmul_backend(),
        "points": rows,
    }


def _point(point: Point, folder: Path, progress: Progress) -> Figures:
    model, length, queries, batch, steps, loss = point
    path = folder / f"{model}-{loss}.pte"
    progress(f"Exporting {model}")
    causal = load_causal_model(model, TrainableConfig())
    rows = prompts(model, length, loss)
    config = EngineConfig(queries=queries, batch_size=batch, sequence_length=length, choices=rows.choices)
    exported = export_program(causal, path, config, name=model)
    description = f"{model}, loss over the {loss.replace('_', ' ')}"
    progress(
        f"{description}: {size_words(exported.file_bytes)} in {exported.export_s:.0f} s; {steps} steps of each side"
    )
    trainer, eager = EngineTrainer(path, threads=THREADS), Eager(causal, config)
    engine_s, eager_s, deviations = [], [], []
    for step in range(steps):
        batch_of_step = _batch(rows, batch, step)
        begin = time.perf_counter()
        engine_step = trainer.step(batch_of_step, LEARNING_RATE)
        between = time.perf_counter()
        assert engine_step.log is not None
        losses = eager.step(batch_of_step, engine_step.log.seeds)
        engine_s.append(between - begin)
        eager_s.append(time.perf_counter() - between)
        deviations.append(float(np.max(np.abs(losses.numpy() / np.array(engine_step.losses) - 1))))
    peaks = {
        side: measured_in_child(side_peak_bytes, side, str(path), model, length, queries, batch, loss)
        for side in ("engine", "eager")
    }
    return {
        "model": model,
        "loss": loss,
        "q": queries,
        "E": batch,
        "length": length,
        "steps": steps,
        "file_mb": exported.file_bytes / 1e6,
        "export_s": exported.export_s,
        "engine_ms": median(engine_s) * 1e3,
        "eager_ms": median(eager_s) * 1e3,
        "ratio": median(engine_s) / median(eager_s),
        "largest_relative_deviation": max(deviations),
        "engine_peak_mb": peaks["engine"] / 1e6,
        "eager_peak_mb": peaks["eager"] / 1e6,
    }


class Eager:
    """The same steps in PyTorch, with the program's noise and shapes."""

    def __init__(self, causal: CausalModel, config: EngineConfig) -> None:
        assert causal.trainables.flat is not None
        self.model, self.config, self.theta = causal, config, causal.trainables.flat
        causal.packs = False

    @torch.no_grad()
    def step(self, batch: PromptBatch, seeds: Sequence[int]) -> Tensor:
        """Make a step; return its losses (2q,) in the order +1 -1 +2 -2 ...."""
        noise = torch.from_numpy(np.stack([philox_noise(seed, len(self.theta)) for seed in seeds]))
        moved = self.config.epsilon * noise
        self.model.trainables.bind(torch.stack([self.theta + moved, self.theta - moved], dim=1).flatten(0, 1))
        losses = self.model.part_losses(batch, 2 * len(seeds))
        self.model.trainables.bind(None)
        self.theta -= LEARNING_RATE / len(seeds) * torch.tensor(gradients_of(losses, self.config.epsilon)) @ noise
        return losses


def side_peak_bytes(side: str, path: str, model: str, length: int, queries: int, batch: int, loss: str) -> int:
    """Return this process's peak memory minus its memory with libraries and no model; the program's file counts where
    it is resident.
    """
    torch.set_num_threads(THREADS)
    rows = prompts(model, length, loss)
    bindings()
    load_causal_model("tiny-llama", TrainableConfig()).part_losses(
        batch_of(prompts("tiny-llama", length), 1)
    )  # loads all libraries

    def in_engine(_: None) -> None:
        trainer = EngineTrainer(Path(path), threads=THREADS)
        for step in range(MEMORY_STEPS):
            trainer.step(_batch(rows, batch, step), LEARNING_RATE)

    def in_pytorch(causal: CausalModel) -> None:
        eager = Eager(causal, EngineConfig(queries=queries, choices=rows.choices))
        for step in range(MEMORY_STEPS):
            eager.step(_batch(rows, batch, step), range(queries))

    if side == "engine":
        return peak_bytes(lambda: None, in_engine)
    return peak_bytes(lambda: load_causal_model(model, TrainableConfig()), in_pytorch)


def _batch(rows: EncodedPrompts, count: int, step: int) -> PromptBatch:
    """Return the rows of one of a few steps."""
    return batch_of(rows, count, step % 5 * count)
