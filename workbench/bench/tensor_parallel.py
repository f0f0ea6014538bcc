"""The side that torch brings: a Hugging Face BERT cut by DTensor's parallelize_module over gloo, paced like our devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from workbench.core.inference import StackCosts
from workbench.methods.galaxy_plus.session import InferenceSession

PLAN = {
    "attention.self.query": ColwiseParallel(),
    "attention.self.key": ColwiseParallel(),
    "attention.self.value": ColwiseParallel(),
    "attention.output.dense": RowwiseParallel(),
    "intermediate.dense": ColwiseParallel(),
    "output.dense": RowwiseParallel(),
}
"""What PyTorch's own tutorial on tensor parallelism does, with BERT's names: two all-reduces a layer."""


class TensorParallelBert:
    """A BERT in equal parts on all ranks of the session's group, every operation paced as ours of the same kind, tokens and units."""

    def __init__(self, session: InferenceSession, length: int) -> None:
        from transformers import AutoModel

        self._session, self._length = session, length
        model = AutoModel.from_pretrained(session.setup.model, attn_implementation="sdpa", add_pooling_layer=False).eval()
        count = session.context.world_size
        mesh = DeviceMesh.from_group(session.group, "cpu")
        shape = session.stacks[0]
        units, columns = shape.num_units // count, shape.columns // count
        if session.setup.host is not None:
            self._pace(model.embeddings, "EMB", 1)
        for layer in model.encoder.layer:
            parallelize_module(layer, mesh, PLAN)
            if session.setup.host is None:
                continue
            self._pace(layer.attention.self, "QKV", units, "ATT")
            self._pace(layer.attention.output.dense, "OUT", units)
            self._pace(layer.attention.output.LayerNorm, "CONN", 1)
            self._pace(layer.intermediate, "UP", columns)
            self._pace(layer.output.dense, "DOWN", columns)
            self._pace(layer.output.LayerNorm, "CONN", 1)
        self._model = model

    def run(self, ids: Tensor) -> Tensor:
        """Return the final hidden states (1, t, d) of ids (1, t), on every rank."""
        with torch.no_grad():
            return self._model(input_ids=ids).last_hidden_state

    def _pace(self, module: nn.Module, kind: str, units: int, further: str = "") -> None:
        """Let a module's own computing take as long as our operation; its collectives are in hooks around it, and are not touched."""
        assert self._session.setup.host is not None
        share = self._session.context.device.host_share or 1.0
        costs: StackCosts = self._session.setup.host.costs[0][0].scaled(1 / share)
        seconds = costs.seconds(kind, self._length, units)
        if further:
            seconds += costs.seconds(further, self._length**2, units)
        forward, pacer = module.forward, self._session.pacer

        def paced(*args: Any, **options: Any) -> Any:
            function: Callable[[], Any] = lambda: forward(*args, **options)  # noqa: E731
            return pacer.run(function, seconds).result

        module.forward = paced
