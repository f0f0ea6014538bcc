"""The sides of the PAC+ speed benchmark: one optimizer step of each technique on a given batch of real sentences, in one process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging

from workbench.fetch import asset_path
from workbench.methods.pac_plus.cached_batches import CachedBatches
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.calibration import TapStatistics, set_statistics
from workbench.models.fast_side import FastSide
from workbench.models.lora import require_peft
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.models.stack import LayerStack
from workbench.runtime.activation_cache import ActivationCache
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule
from workbench.tasks.tokenize import Batch

LEARNING_RATE, WEIGHT_DECAY, DROPOUT = 1e-3, 0.01, 0.1
NUM_STEPS = 100_000
"""Of the learning rate's schedule: more than a benchmark takes, so that the rate stays as good as constant."""


class BackboneFineTuning:
    """Training through the backbone with transformers and peft, as a user would write it: mean pooling, linear head, fused AdamW.

    rank: of LoRA on queries and values; None trains every weight.  in_bfloat16: under autocast.
    """

    def __init__(self, model: str, num_outputs: int, *, rank: int | None, in_bfloat16: bool = False) -> None:
        torch.manual_seed(0)
        logging.disable_progress_bar()
        backbone = AutoModel.from_pretrained(asset_path(model), attn_implementation="sdpa")
        if rank is not None:
            config = require_peft().LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=["query", "value"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of what peft asks transformers for
                backbone = require_peft().get_peft_model(backbone, config)
        self._backbone = backbone.train()
        self._head = nn.Linear(backbone.config.hidden_size, num_outputs)
        self._in_bfloat16 = in_bfloat16
        trained = [parameter for module in (backbone, self._head) for parameter in module.parameters() if parameter.requires_grad]
        self.num_trained = sum(parameter.numel() for parameter in trained)
        self._optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, batch: Batch) -> float:
        """Train on one batch; return its mean loss."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._in_bfloat16):
            hidden = self._backbone(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
            mask = batch.attention_mask[:, :, None].to(hidden.dtype)
            pooled = F.dropout((hidden * mask).sum(dim=1) / mask.sum(dim=1), DROPOUT)
            logits = self._head(pooled)
        loss = F.cross_entropy(logits.float(), batch.labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()


class SideFineTuning:
    """Training a parallel adapter: in the first epoch beside the backbone, later from the cache."""

    def __init__(self, stack: LayerStack, config: ParallelAdapterConfig, statistics: TapStatistics, *, is_fast: bool) -> None:
        self._stack, self.is_fast = stack, is_fast
        self._adapter = ParallelAdapter(config).train()
        set_statistics(self._adapter, statistics)
        self.waits_s: list[float] = []
        """How long each cached step waited for its taps."""
        self._optimizer = FlatAdamW(
            self._adapter, learning_rate=LinearSchedule(peak=LEARNING_RATE, num_steps=NUM_STEPS), weight_decay=WEIGHT_DECAY
        )
        self._fast = FastSide(self._adapter) if is_fast else None
        self.num_trained = sum(parameter.numel() for parameter in self._adapter.parameters())

    def cached_step(self, batch: Batch, batches: CachedBatches) -> float:
        """Train on one batch whose taps come from the cache; return its mean loss."""
        begin = time.perf_counter()
        taps = batches.batch(batch.indices, batch.attention_mask.shape[1])
        self.waits_s.append(time.perf_counter() - begin)
        return self.train(batch, taps)

    def first_step(self, batch: Batch, tape: ActivationCache) -> float:
        """Run the backbone on a batch, tape its activations, and train on them; return the mean loss."""
        with torch.no_grad():
            _, taps = self._stack(batch.input_ids, batch.attention_mask)
        taps = [tap.to(torch.bfloat16) for tap in taps]
        tape.write_batch(batch.indices, taps)
        return self.train(batch, taps)

    def train(self, batch: Batch, taps: Sequence[Tensor]) -> float:
        """Train on one batch with given taps, (n, t, d) each or (for a fast side) without padding; return its mean loss."""
        adapter = self._adapter
        if self._fast is None:
            logits = adapter.predict(taps, batch.attention_mask, batch.sample_ids, epoch=1)
            loss = task_loss(logits, batch.labels, adapter.config.kind)
            loss.backward()
        else:
            fast = self._fast
            packing = fast.packing(batch.attention_mask)
            packed = [packing.pack(tap) if tap.ndim == 3 else tap for tap in taps]
            side, context = fast.forward(None, packed, packing)
            logits, head = fast.head(side, packed[-1], packing, batch.sample_ids, epoch=1)
            loss = task_loss(logits, batch.labels, adapter.config.kind)
            loss.backward()
            fast.backward(context, fast.head_backward(head))
        self._optimizer.step()
        return loss.item()
