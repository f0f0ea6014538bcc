"""Peak memory of P-RGE beside inference and first-order LoRA-FA, each in a child process of its own (P-RGE, section 4.2, Table 3).

What counts is the largest resident memory over what the process had when the runtime was loaded and the model not yet.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec
import torch

from workbench.bench.p_rge_batches import Prompts, prompts
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.models.zeroth_order import CausalModel, Copies, FirstOrder, Prge, TrainableConfig, ZerothOrderConfig, load_causal_model
from workbench.profiler.descriptions import MODELS
from workbench.profiler.zeroth_order import MemoryRule, forward_memory
from workbench.runtime.memory import read_memory
from workbench.runtime.network import child_environment

Side = Literal["inference", "P-RGE", "P-RGE, kept copies", "first-order LoRA-FA"]
SETTINGS = ((1, 16), (4, 4), (16, 1))
"""(q, E): the same total batch of 16; with both signs 32 rows in a pass of P-RGE, and as many in inference."""
STEPS = 3
SMALL = "tiny-llama"
"""Runs before anything is measured."""
_WAIT_S = 900


def memory_points(model: str, length: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return each side's peak, and over inference's at as many rows."""
    found = []
    for queries, batch in SETTINGS:
        peaks: dict[str, int] = {}
        for side in get_args(Side):
            peaks[side] = peak_bytes(side, model, length, queries, batch)
        for side, peak in peaks.items():
            found.append(
                {
                    "side": side,
                    "q": queries,
                    "E": batch,
                    "peak_mb": peak / 1e6,
                    "over_inference": peak / peaks["inference"],
                    "counted_mb": _counted(side, model, length, queries, batch),
                }
            )
            progress(f"memory q={queries} E={batch}: {side} {peak / 1e6:.0f} MB, {peak / peaks['inference']:.2f} of inference")
    return found


def peak_bytes(side: str, model: str, length: int, queries: int, batch: int) -> int:
    """Return the peak of a child process that makes a few steps.  Raises RuntimeSetupError with its words if it fails."""
    command = [sys.executable, "-m", "workbench.bench.p_rge_memory", side, model, str(length), str(queries), str(batch)]
    # Freed memory goes back at once, so that a peak is what is needed together; glibc else keeps what it may need again.
    surroundings = child_environment() | {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_WAIT_S, env=surroundings, check=True)
    except subprocess.SubprocessError as error:
        words = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeSetupError(f"The peak memory of '{side}' was to be measured.", f"{error} {' '.join(words)}", "Try again.") from error
    return int(msgspec.json.decode(done.stdout.splitlines()[-1]))


def _child(side: str, model: str, length: int, queries: int, batch: int) -> int:
    """Return this process's peak over what the runtime alone takes."""
    torch.set_num_threads(2)
    rows = prompts(model, length)
    _run(side, load_causal_model(SMALL, TrainableConfig()), prompts(SMALL, length), 1, 1)  # all libraries have come up
    gc.collect()
    own = read_memory().rss_bytes
    causal = load_causal_model(model, TrainableConfig())
    gc.collect()
    if not _reset_peak():
        raise ConfigError("A peak was to be measured.", "This system does not reset a process's high-water mark.", "Run it on Linux.")
    _run(side, causal, rows, queries, batch)
    return read_memory().peak_rss_bytes - own


def _run(side: str, causal: CausalModel, rows: Prompts, queries: int, batch: int) -> None:
    if side == "inference":
        given = rows.rows(2 * queries * batch)
        for _ in range(STEPS):
            with torch.inference_mode():
                causal.part_losses(given)
    elif side == "first-order LoRA-FA":
        reference = FirstOrder(causal, "sgd", 1e-6)
        for _ in range(STEPS):
            reference.step(rows.rows(queries * batch))
    else:
        copies: Copies = "kept" if side.endswith("copies") else "per_layer"
        estimator = Prge(causal, ZerothOrderConfig(queries=queries, learning_rate=1e-6, copies=copies))
        for step in range(STEPS):
            estimator.step(rows.rows(batch), step)


def _reset_peak() -> bool:
    """Set the high-water mark to what is resident now: loading a model needs more than running it."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _counted(side: str, model: str, length: int, queries: int, batch: int) -> float | None:
    """Return the analytic model's megabytes in float32, where the model is described: forward-only sides, logits of label words alone."""
    if model not in MODELS or side.startswith("first-order"):
        return None
    rule = MemoryRule(weight_bytes=4.0, logit_bytes=8.0, activation_bytes=4.0, copy_bytes=4.0)
    copies = 2 * queries if side.endswith("copies") else 1
    rows = 2 * queries * batch
    return sum(forward_memory(MODELS[model], rule, rows=rows, sequence_length=length, copies=copies, targets=1).values()) / 1e6


if __name__ == "__main__":
    print(msgspec.json.encode(_child(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))).decode())
