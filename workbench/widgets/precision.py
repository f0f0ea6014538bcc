"""What fewer bits cost: bytes held, error of the weights and of the taps, change of the answers (PAC+, section IV-D, Eq. 1-2, Fig. 8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workbench.models.evaluation import predict
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.quantization import STORAGE_TYPES, QuantizationConfig, dequantize_blocks, held_bytes, quantize, quantize_blocks
from workbench.runtime.activation_records import RecordLayout
from workbench.tasks.tokenize import Batch

BLOCKWISE = ("int8", "int4", "nf4")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBackbone:
    """A backbone whose weights are stored in one type.

    held_bytes: really held, constants included.  tap_error: root mean square of the last tap's change, as a share of that of the tap.
    score: share of right answers of one and the same adapter.  forward_s: of all batches.
    """

    storage: str
    held_bytes: int
    tap_error: float
    score: float
    forward_s: float


def stored_backbones(
    model: str, adapter: ParallelAdapter, batches: Callable[[], Sequence[Batch]], *, storages: Sequence[str] = STORAGE_TYPES
) -> tuple[StoredBackbone, ...]:
    """Return what each storage type holds and changes; the compute type is float32 for all, float16 storage included."""
    found = []
    exact: torch.Tensor | None = None
    for storage in dict.fromkeys(("float32", *storages)):
        stack = quantize(load_stack(model), QuantizationConfig(storage=storage))  # type: ignore[arg-type]
        first = batches()[0]
        with torch.inference_mode():
            last = stack(first.input_ids, first.attention_mask)[1][-1].float()
        exact = last if exact is None else exact
        begin = time.perf_counter()
        [predicted] = predict(stack, [adapter], batches())
        seconds = time.perf_counter() - begin
        right = [mine == theirs for mine, theirs in zip(predicted.answers("classification"), predicted.references(), strict=True)]
        error = float((last - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        score = sum(right) / len(right)
        found.append(StoredBackbone(storage=storage, held_bytes=held_bytes(stack), tap_error=error, score=score, forward_s=seconds))
    return tuple(one for one in found if one.storage in storages)


def block_errors(weight: torch.Tensor, *, block_size: int, storages: Sequence[str] = BLOCKWISE) -> dict[str, tuple[float, float]]:
    """Return the root mean square and the largest error of a weight's first block after Eq. 1 and 2, for each storage type."""
    block = weight.detach().reshape(-1)[:block_size].float()
    errors = {}
    for storage in storages:
        codes, constants = quantize_blocks(block, storage, block_size)
        off = dequantize_blocks(codes, constants, storage).reshape(-1)[: len(block)] - block
        errors[storage] = (float(off.square().mean().sqrt()), float(off.abs().max()))
    return errors


def cache_errors(tap: torch.Tensor, *, dtypes: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Return bytes of a token and the relative root-mean-square error of a tap (rows, d) that was written and read in each type."""
    found = {}
    for dtype in dtypes:
        layout = RecordLayout(dtype=dtype, width=tap.shape[1], num_taps=1)
        raw = torch.zeros(len(tap), layout.row_bytes, dtype=torch.uint8)
        layout.encode(tap, raw)
        off = layout.decode(raw).float() - tap
        found[dtype] = (layout.row_bytes, float(off.square().mean().sqrt() / tap.square().mean().sqrt()))
    return found
