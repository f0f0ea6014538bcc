"""Export a model to a program, and train with it in ExecuTorch's runtime (P-RGE, section 3.3, Figure 3).

The program computes; the host passes in noise and scalars.
Training uses no torch arithmetic: the runtime's Python bindings pass values as torch tensors, which here are views of
NumPy arrays.
The noise needs no torch either: each query has a counter-based generator (Philox; Salmon et al., SC 2011).  Two runs
are equal only if both use the same stream, either this one or torch's (`Trainables.noise`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import ConfigError, DivergedError
from workbench.core.files import whole_file
from workbench.core.serial import from_json, to_json
from workbench.methods.p_rge.inference_engine.config import (
    EngineConfig,
    EngineDescription,
    bindings,
    quiet,
    require_executorch,
    xnnpack_partitioner,
)
from workbench.methods.p_rge.inference_engine.modules import (
    STATE,
    ReadState,
    TrainStep,
    WriteState,
    engine_attention,
    exportable,
)
from workbench.methods.p_rge.zeroth_order.causal_model import CausalModel
from workbench.methods.p_rge.zeroth_order.directions import Directions
from workbench.methods.p_rge.zeroth_order.step_log import StepLog, make_log
from workbench.methods.p_rge.zeroth_order.trainables import Slot

NoiseOf = Callable[[int, int], Any]
"""(seed, D) -> standard normals (D,) float32, the same in every call."""


def philox_noise(seed: int, size: int) -> Any:
    """Return standard normals (size,) float32 for a query's seed."""
    return np.random.Generator(np.random.Philox(seed)).standard_normal(size, dtype=np.float32)


def direction(seed: int, directions: Directions, slots: Sequence[Slot], noise_of: NoiseOf = philox_noise) -> Any:
    """Return a query's direction (D,) float32, made from the stream's normals: they themselves, their signs, or U V^T.

    A slot's U and V take the next values of the query's stream and of the subspace's; a vector takes the former.
    """
    if directions.kind != "low_rank":
        drawn = noise_of(seed, sum(slot.size for slot in slots))
        return np.where(drawn < 0, np.float32(-1), np.float32(1)) if directions.kind == "rademacher" else drawn
    rank = directions.rank
    sizes_of_seed = [slot.size if len(slot.shape) != 2 else slot.shape[0] * rank for slot in slots]
    shared = [0 if len(slot.shape) != 2 else slot.shape[1] * rank for slot in slots]
    us, vs = (
        np.split(noise_of(number, sum(sizes)), np.cumsum(sizes)[:-1])
        for number, sizes in ((seed, sizes_of_seed), (directions.subspace, shared))
    )
    parts = [
        u if len(slot.shape) != 2 else (u.reshape(-1, rank) @ v.reshape(-1, rank).T).ravel()
        for slot, u, v in zip(slots, us, vs, strict=True)
    ]
    return np.concatenate(parts)


def replayed(theta: Any, logs: Sequence[StepLog], slots: Sequence[Slot], noise_of: NoiseOf = philox_noise) -> Any:
    """Return a new array with theta (D,) float32 after the logged steps (Algorithm 1, line 14)."""
    moved = np.array(theta, dtype=np.float32)
    for log in logs:
        for seed, gradient in zip(log.seeds, log.gradients, strict=True):
            scale = np.float32(log.learning_rate * gradient / len(log.seeds))
            moved -= scale * direction(seed, log.directions, slots, noise_of)
    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """Result of a step.

    losses: (P,) in the order +1 -1 +2 -2 ..., or 0 +1 +2 ....  log: None if the program draws its own noise.
    """

    step: int
    losses: tuple[float, ...]
    gradients: tuple[float, ...]
    log: StepLog | None

    @property
    def loss(self) -> float:
        """Return the mean loss."""
        return sum(self.losses) / len(self.losses)


class EngineTrainer:
    """A loaded program, with the state that it does not keep: the last step's scalars and the number of steps.

    path: a .pte file written by export_program.  seed: seed of the noise.  noise_of: the noise stream, to which the
    log's steps refer.
    threads: number of XNNPACK's threads in this process; None does not change the number.
    Raises ConfigError if ExecuTorch is not installed, or if the file is not such a program.
    """

    def __init__(
        self, path: Path | str, *, seed: int = 0, noise_of: NoiseOf = philox_noise, threads: int | None = None
    ) -> None:
        runtime = bindings()
        if threads is not None:
            runtime._unsafe_reset_threadpool(threads)
        self._program, self.description = _opened(runtime, Path(path))
        self._methods = {name: self._program.load_method(name) for name in ("train_step", "read_state", "write_state")}
        self.config = self.description.config
        self.seed, self.noise_of, self.step_number = seed, noise_of, 0
        self._inputs = example_inputs(self.config, self.description.num_values)
        self._arrays: tuple[Any, ...] = tuple(tensor.numpy() for tensor in self._inputs)
        self._initial = self.theta()

    def step(self, batch: Any, learning_rate: float) -> EngineStep:
        """Apply the last step and compute the losses of this step.

        batch: E prompts with input_ids (E, t), targets, positions, target_mask (E, k) as in PromptBatch, tensors or
        arrays; up to the program's t and k, padded on the right.  learning_rate: learning rate of the update that will
        use these losses.
        Raises ConfigError for a batch that does not fit, DivergedError if a loss is not finite.
        """
        if not 0 < learning_rate < float("inf"):
            raise ConfigError(
                f"A learning rate of {learning_rate} was asked for.", "It must be above 0.", "Give such a rate."
            )
        self._fill(batch)
        estimate = self.config.estimate(self.seed, learning_rate)
        if self.config.noise == "input":
            drawn, slots = estimate.directions(self.step_number), self.description.slots
            for row, seed in zip(self._arrays[6], self._seeds(self.step_number), strict=True):
                row[:] = direction(seed, drawn, slots, self.noise_of)
        [out] = self._methods["train_step"].call(self._inputs, True)
        losses = self._by_query(out.numpy()).ravel()
        if not np.isfinite(losses).all():
            raise DivergedError(
                f"Step {self.step_number} of a program was asked for.",
                f"Its losses are {', '.join(f'{loss:.4g}' for loss in losses)}.",
                "Lower the learning rate.",
            )
        log = make_log(estimate, self.step_number, losses.tolist())
        self._arrays[4][:], self._arrays[5][:] = log.gradients, learning_rate
        self.step_number += 1
        return EngineStep(
            step=log.step,
            losses=tuple(losses.tolist()),
            gradients=log.gradients,
            log=log if self.config.noise == "input" else None,
        )

    def _by_query(self, rows: Any) -> Any:
        """Return the program's rows (P, ...), which it orders by sign, in the log's order, by query."""
        if self.config.rule.has_base:
            return rows
        pairs = rows.reshape(2, self.config.queries, -1).swapaxes(0, 1)
        return np.ascontiguousarray(pairs).reshape(rows.shape)

    def copies(self) -> Any:
        """Return the program's copies of theta, (P, D) float32 in the order +1 -1 +2 -2 ..., or 0 +1 +2 ...."""
        [state] = self._methods["read_state"].call((), True)
        return self._by_query(np.array(state.numpy()))

    def theta(self) -> Any:
        """Return the trained values (D,) float32, including the last step."""
        copies, config = self.copies(), self.config
        if config.rule.has_base:
            middle, moved = copies[0], copies[1:] - copies[0]
        else:
            middle, moved = copies.mean(axis=0), (copies[0::2] - copies[1::2]) / 2
        scale = self._arrays[4] * self._arrays[5] * np.float32(1 / (config.epsilon * config.queries))
        return middle - scale @ moved

    def set_theta(self, theta: Any) -> None:
        """Set the trained values (D,), from which the program continues.  Raises ConfigError if their number
        is wrong.
        """
        size = self.description.num_values
        if np.shape(theta) != (size,):
            raise ConfigError(
                f"{np.size(theta)} trained values were to be set.",
                f"The program has {size}.",
                "Give those of its model.",
            )
        copies = np.tile(np.asarray(theta, np.float32), (self.config.num_copies, 1))
        self._methods["write_state"].call((torch.from_numpy(copies),), True)
        self._arrays[4][:] = 0

    def resume(self, logs: Sequence[StepLog]) -> None:
        """Continue after logged steps that began at the program's initial values.  Raises ConfigError for other queries
        or seeds.
        """
        if self.config.noise != "input":
            raise ConfigError(
                "A run was to be resumed.",
                "Its program draws noise that no log holds.",
                "Export with noise as an input.",
            )
        for number, log in enumerate(logs):
            if log.seeds != self._seeds(number):
                raise ConfigError(
                    "A run was to be resumed.",
                    f"Step {number} of its log has other seeds.",
                    "Give the seed and number of queries it began with.",
                )
        self.set_theta(replayed(self._initial, logs, self.description.slots, self.noise_of))
        self.step_number = len(logs)

    def named(self) -> dict[str, Any]:
        """Return the trained values by their names in the PyTorch model."""
        theta = self.theta()
        parts = np.split(theta, [slot.start for slot in self.description.slots[1:]])
        return {slot.name: part.reshape(slot.shape) for slot, part in zip(self.description.slots, parts, strict=True)}

    def _seeds(self, step: int) -> tuple[int, ...]:
        first = int(self.config.rule.has_base)
        return self.config.estimate(self.seed, 1.0).seeds(step, range(first, first + self.config.queries))

    def _fill(self, batch: Any) -> None:
        ids, targets, places = (np.asarray(getattr(batch, name)) for name in ("input_ids", "targets", "positions"))
        mask = np.asarray(batch.target_mask).astype(bool)
        config = self.config
        fits = (
            ids.ndim == targets.ndim == 2
            and len(ids) == config.batch_size
            and ids.shape[1] <= config.sequence_length
            and targets.shape == places.shape == mask.shape == (len(ids), targets.shape[1])
            and targets.shape[1] <= config.num_targets
        )
        if not fits:
            raise ConfigError(
                f"A step on input_ids {ids.shape} and targets {targets.shape} was asked for.",
                f"The program takes {config.batch_size} prompts of up to {config.sequence_length} tokens and "
                f"{config.num_targets} targets.",
                "Give such batches, or export a program for these.",
            )
        highest = max(int(ids.max()), int((targets * mask).max()))
        if (
            highest >= self.description.vocabulary_size
            or min(int(ids.min()), int(targets.min())) < 0
            or not mask.any(axis=1).all()
        ):
            raise ConfigError(
                f"A step on token {highest} was asked for.",
                f"The model knows {self.description.vocabulary_size} tokens, and each prompt needs a target.",
                "Tokenize with the model's own tokenizer.",
            )
        if config.choices:
            matches = targets[:, :, None] == np.array(config.choices)
            if not matches.any(axis=2)[mask].all():
                tokens = ", ".join(map(str, sorted(set(targets[mask].tolist()) - set(config.choices))))
                raise ConfigError(
                    f"A step towards token {tokens} was asked for.",
                    f"The program's loss is among the tokens {', '.join(map(str, config.choices))} alone.",
                    "Give prompts of the task that it was exported for.",
                )
            targets = matches.argmax(axis=2)
        for array in self._arrays[:3]:
            array[:] = 0
        self._arrays[0][:, : ids.shape[1]] = ids
        self._arrays[1][:, : targets.shape[1]] = targets * mask
        self._arrays[2][:, : places.shape[1]] = places * mask
        weights = self._arrays[3].reshape(config.batch_size, config.num_targets)
        weights[:] = 0
        weights[:, : mask.shape[1]] = mask / (-config.batch_size * mask.sum(axis=1, keepdims=True))


def _opened(runtime: Any, path: Path) -> tuple[Any, EngineDescription]:
    request = f"The program '{path}' was asked for."
    if not path.is_file():
        raise ConfigError(request, "There is no such file.", "Export one, or check the path.")
    try:
        program = runtime._load_program(str(path), program_verification=runtime.Verification.InternalConsistency)
        [text] = program.load_method("description").call((), True)
        return program, from_json(text, EngineDescription, source="its description")
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(
            request, f"It is not one of our programs: {str(error).splitlines()[0]}.", "Export it with the workbench."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The result of an export.

    path, file_bytes: the program's file and its size.  export_s: duration of the export in seconds.  delegated: number
    of parts of a step that XNNPACK computes.
    operators: number of calls of ExecuTorch's own kernels in a step, by name.
    """

    path: str
    file_bytes: int
    export_s: float
    delegated: int
    operators: dict[str, int]
    description: EngineDescription


def export_program(model: CausalModel, path: Path, config: EngineConfig, *, name: str = "") -> ExportResult:
    """Write a program with the methods train_step, read_state and write_state, which share the copies of theta.

    theta starts with the model's values.  name: the model's name, for the description.
    Raises ConfigError if ExecuTorch is not installed, if the model is not a complete decoder-only one in float32 with
    LoRA-FA, or for choices outside the vocabulary.
    """
    require_executorch()
    begin = time.perf_counter()
    written = exportable(model)
    vocabulary = int(model.head.weight.shape[0])
    if max(config.choices, default=0) >= vocabulary:
        raise ConfigError(
            f"A program whose loss is among the tokens {', '.join(map(str, config.choices))} was asked for.",
            f"The model knows {vocabulary} tokens.",
            "Take them from the model's own tokenizer.",
        )
    description = EngineDescription(
        model=name,
        config=config,
        trainable=model.config,
        slots=model.trainables.slots,
        vocabulary_size=vocabulary,
        executorch=version("executorch"),
    )
    assert model.trainables.flat is not None
    copies = model.trainables.flat.detach().expand(config.num_copies, -1).clone()
    step = TrainStep(written, config, copies)
    with torch.no_grad(), quiet(), engine_attention(written):
        programs = {
            "train_step": torch.export.export(step, example_inputs(config, description.num_values), strict=False),
            "read_state": torch.export.export(ReadState(copies), (), strict=False),
            "write_state": torch.export.export(WriteState(copies), (copies.clone(),), strict=False),
        }
        program = _lowered(programs, config, description)
        with whole_file(path) as part, part.open("wb") as file:
            program.write_to_file(file)
    calls = _calls(program.exported_program("train_step"))
    return ExportResult(
        path=str(path),
        file_bytes=path.stat().st_size,
        export_s=time.perf_counter() - begin,
        delegated=calls.pop("executorch_call_delegate", 0),
        operators=dict(calls.most_common()),
        description=description,
    )


def example_inputs(config: EngineConfig, num_values: int) -> tuple[Tensor, ...]:
    """Return example arguments of train_step with the right shapes."""
    samples, length, targets = config.batch_size, config.sequence_length, config.num_targets
    inputs = (
        torch.zeros(samples, length, dtype=torch.int64),
        torch.zeros(samples, targets, dtype=torch.int64),
        torch.zeros(samples, targets, dtype=torch.int64),
        torch.full((samples * targets, 1), -1 / (samples * targets)),
        torch.zeros(config.queries),
        torch.zeros(1),
    )
    return inputs if config.noise == "drawn" else (*inputs, torch.zeros(config.queries, num_values))


def _lowered(programs: dict[str, Any], config: EngineConfig, description: EngineDescription) -> Any:
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass

    partitioners = [xnnpack_partitioner()] if config.backend == "xnnpack" else []
    edge = to_edge_transform_and_lower(
        programs,
        partitioner={"train_step": partitioners},
        constant_methods={"description": to_json(description, indent=-1)},
    )
    return edge.to_executorch(
        ExecutorchBackendConfig(
            passes=[InitializedMutableBufferPass([STATE])],
            emit_mutable_buffer_names=True,
            memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=True),
        )
    )


def _calls(program: Any) -> Counter[str]:
    """Return the number of calls of each kernel in a lowered method."""
    names = [
        getattr(node.target, "__name__", str(node.target)) for node in program.graph.nodes if node.op == "call_function"
    ]
    return Counter(name for name in names if name not in ("alloc", "getitem"))
