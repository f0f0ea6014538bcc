"""Export a model to a program that trains itself in ExecuTorch (P-RGE, section 3.3, Figure 3)."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.files import whole_file
from workbench.core.serial import to_json
from workbench.models.inference_engine.config import (
    EngineConfig,
    EngineDescription,
    EngineSlot,
    quiet,
    require_executorch,
    xnnpack_partitioner,
)
from workbench.models.inference_engine.modules import STATE, ReadState, TrainStep, WriteState, engine_attention, exportable
from workbench.models.zeroth_order.causal_model import CausalModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The result of an export.

    path, file_bytes: of the program.  export_s: its duration in seconds.  delegated: number of parts of a step that XNNPACK computes.
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

    theta starts with the model's values.  name: of the model, for the description.
    Raises ConfigError if ExecuTorch is not installed, if the model is not a complete decoder-only one in float32 with LoRA-FA, or for
    choices outside the vocabulary.
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
        slots=tuple(EngineSlot(name=slot.name, start=slot.start, shape=slot.shape) for slot in model.trainables.slots),
        vocabulary_size=vocabulary,
        executorch=version("executorch"),
    )
    assert model.trainables.flat is not None
    copies = model.trainables.flat.detach().expand(2 * config.queries, -1).clone()
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
        programs, partitioner={"train_step": partitioners}, constant_methods={"description": to_json(description, indent=-1)}
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
    names = [getattr(node.target, "__name__", str(node.target)) for node in program.graph.nodes if node.op == "call_function"]
    return Counter(name for name in names if name not in ("alloc", "getitem"))
