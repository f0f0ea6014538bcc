"""Parallel Adapters as a library: for any supported Hugging Face model, in a plain loop or with transformers' Trainer
(PAC+, IV-A).

    model = get_parallel_adapter_model(AutoModel.from_pretrained(...), num_outputs=2)
    loss = model(input_ids, attention_mask, labels=labels).loss

Nothing here needs the workbench's runtime, planners or cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError, check_choice
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.evaluation import attach_head, calibrate, set_statistics
from workbench.models.families import family_of
from workbench.models.initialization import SHAPE, How, initialize, require_own_backbone
from workbench.models.loading import load_stack
from workbench.models.matmul import head_of
from workbench.models.parallel_adapter import IGNORED, ParallelAdapter, task_loss
from workbench.models.quantization import QuantizationConfig, StoredWeight, held_bytes, quantize
from workbench.models.saving import TrainedDescription, load_adapter, save_adapter
from workbench.models.side_layers import ids_of_texts
from workbench.models.stack import LayerStack

__all__ = ["ParallelAdapterConfig", "ParallelAdapterModel", "adapter_config", "get_parallel_adapter_model"]


def get_parallel_adapter_model(
    model: Any,
    config: ParallelAdapterConfig | None = None,
    *,
    initialization: How = "fan_in",
    quantization: QuantizationConfig | None = None,
    **options: Any,
) -> ParallelAdapterModel:
    """Return a frozen backbone with a trainable parallel adapter.

    model: a Hugging Face model of a supported family (its own head, if any, is ignored), or a model's name.
    The model itself becomes the backbone: it is frozen, and quantized in place if `quantization` is given.
    config: from `adapter_config`; or give its fields as options (reduction=4, num_outputs=3, kind="regression", ...).
    Raises ConfigError for an unsupported family, a configuration for another backbone, and as `quantize` does.
    """
    name, stack = _stack(model)
    if config is None:
        config = _config(stack, options)
    elif options:
        raise ConfigError(
            f"A config and the options {', '.join(options)} were given.", "They may contradict.", "Give one of them."
        )
    require_own_backbone(config, stack, f"A parallel adapter for '{name}'")
    adapter = ParallelAdapter(config)
    if initialization != "fan_in":
        initialize(adapter, initialization, stack=stack)
    return ParallelAdapterModel(stack, adapter.train(), name=name, quantization=quantization)


def adapter_config(model: Any, **options: Any) -> ParallelAdapterConfig:
    """Return a configuration with the model's hidden_size, num_layers, causality and decoder.

    options: the configuration's other fields.

    model: a Hugging Face model, or a model's name.  Raises ConfigError for an unsupported family and for unknown
    options.
    """
    return _config(_stack(model)[1], options)


class ParallelAdapterModel(nn.Module):
    """A frozen backbone and a parallel adapter, called like a Hugging Face model for classification or regression.

    Only the adapter's parameters require gradients, and only they are in the state_dict, so a Trainer saves just the
    adapter.
    Dropout masks depend on the adapter's seed, the epoch and each sample (its sample_ids, or its tokens if none are
    given).
    Call set_epoch at the start of each epoch; otherwise each training pass counts as one epoch, so that masks still
    change.
    """

    accepts_loss_kwargs = False
    """For transformers' Trainer: the loss is a mean over the given batch, to be divided when gradients accumulate."""

    def __init__(
        self, stack: LayerStack, adapter: ParallelAdapter, *, name: str, quantization: QuantizationConfig | None = None
    ) -> None:
        super().__init__()
        self.name, self.quantization = name, quantization
        self.backbone = stack if quantization is None else quantize(stack, quantization)
        self.adapter = adapter
        attach_head(self.backbone, adapter)
        self._epoch: int | None = None
        self._passes = 0
        self.register_state_dict_post_hook(_leave_backbone_out)
        self.register_load_state_dict_post_hook(_do_not_miss_backbone)

    @classmethod
    def from_pretrained(
        cls, model: Any, folder: Path | str, *, quantization: QuantizationConfig | None = None
    ) -> ParallelAdapterModel:
        """Return a backbone with an adapter saved by `save_pretrained` (or by a run of the workbench), in evaluation
        mode.

        model, quantization: as in `get_parallel_adapter_model`.  Raises ConfigError if the folder holds no complete
        adapter, or one for another backbone.
        """
        adapter, _ = load_adapter(folder)
        name, stack = _stack(model)
        require_own_backbone(adapter.config, stack, f"The adapter '{folder}' on '{name}'")
        return cls(stack, adapter, name=name, quantization=quantization).eval()

    def save_pretrained(self, folder: Path | str) -> Path:
        """Write only the adapter, as safetensors and JSON, and return the folder."""
        description = TrainedDescription(config=self.adapter.config, model=self.name, quantization=self.quantization)
        return save_adapter(folder, self.adapter.state_dict(), description)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        **ignored: Any,
    ) -> Any:
        """Return transformers' SequenceClassifierOutput: loss (None without labels) and logits.

        input_ids, attention_mask: (n, t), padding on the right.  labels: (n,) int64 classes or float targets; for
        sequence-to-sequence (n, s) int64, -100 where padded.  sample_ids: (n,) int64.  decoder_input_ids: (n, s),
        derived from the labels if those are given.  Logits are (n, num_outputs), for sequence-to-sequence (n, s, V).
        """
        from transformers.modeling_outputs import SequenceClassifierOutput

        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise ConfigError(
                "A batch was given.", "It is padded on the left.", "Set tokenizer.padding_side = 'right'."
            )
        if token_type_ids is not None and self.backbone.family.has_token_types:
            input_ids = torch.where(token_type_ids.bool(), ~input_ids, input_ids)
        decoder_ids = self._decoder_ids(labels, decoder_input_ids)
        with torch.no_grad():
            _, taps = self.backbone(input_ids, mask, decoder_ids)
        if sample_ids is None:
            sample_ids = ids_of_texts(input_ids, mask)
        logits = self.adapter.predict(taps, mask, sample_ids, self._next_epoch())
        loss = (
            None
            if labels is None
            else task_loss(logits, labels, self.adapter.config.kind, label_std=self.adapter.config.label_std)
        )
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) that determines the next dropout masks."""
        self._epoch = epoch

    def calibrate(self, batches: Iterable[Mapping[str, Tensor]]) -> None:
        """Measure the backbone's activations on a few hundred samples, to standardise the adapter's inputs.

        batches: mappings with input_ids and attention_mask (with a decoder also labels).  Call it once, before
        training.
        Training also works without it, but starts from badly scaled inputs.
        """
        prepared = (
            SimpleNamespace(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                labels=batch["labels"]
                if "labels" in batch
                else torch.zeros(len(batch["input_ids"]), dtype=torch.int64),
                decoder_ids=self._decoder_ids(batch.get("labels"), batch.get("decoder_input_ids")),
            )
            for batch in batches
        )
        set_statistics(self.adapter, calibrate(self.backbone, prepared))

    def count_parameters(self) -> tuple[int, int]:
        """Return the number of trainable parameters, and of all parameters of backbone and adapter."""
        trainable = sum(parameter.numel() for parameter in self.adapter.parameters())
        stored = (part.numel() for part in self.backbone.modules() if isinstance(part, StoredWeight))
        return trainable, trainable + sum(stored) + sum(parameter.numel() for parameter in self.backbone.parameters())

    def print_trainable_parameters(self) -> None:
        """Print the number of trainable parameters, of all parameters, and the backbone's bytes."""
        trainable, total = self.count_parameters()
        print(
            f"trainable parameters: {trainable:,} of {total:,} ({trainable / total:.2%}); backbone: "
            f"{held_bytes(self.backbone):,} bytes"
        )

    def train(self, mode: bool = True) -> ParallelAdapterModel:
        """Set the adapter's mode.  The backbone stays in evaluation mode, so its activations never change."""
        super().train(mode)
        self.backbone.eval()
        return self

    def _next_epoch(self) -> int:
        if self._epoch is not None or not self.training:
            return self._epoch or 0
        self._passes += 1
        return self._passes - 1

    def _decoder_ids(self, labels: Tensor | None, decoder_ids: Tensor | None) -> Tensor | None:
        if self.adapter.config.kind != "sequence_to_sequence" or decoder_ids is not None:
            return decoder_ids
        if labels is None:
            raise ConfigError(
                "Logits of a target were asked for.", "No target is given.", "Pass labels or decoder_input_ids."
            )
        start = torch.full_like(labels[:, :1], self.backbone.decoder_start_id or 0)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, 0)], dim=1)


def _stack(model: Any) -> tuple[str, LayerStack]:
    if isinstance(model, str):
        name, stack = model, load_stack(model)
    else:
        config = getattr(model, "config", None)
        if not isinstance(model, nn.Module) or config is None:
            raise ConfigError(
                f"A parallel adapter for a {type(model).__name__} was asked for.",
                "It is not a Hugging Face model.",
                "Pass one, or its name.",
            )
        family = family_of(config.model_type)
        base: Any = getattr(model, "base_model", model)
        if config._attn_implementation != "sdpa":
            base.set_attn_implementation("sdpa")  # the only implementation that accepts the stack's boolean masks
        name = getattr(config, "_name_or_path", "") or config.model_type
        head = head_of(model) if family.decoder is not None else None
        stack = LayerStack(base, language_model_head=head)
    if stack.family.reads_images:
        raise ConfigError(
            f"A parallel adapter for '{name}' was asked for.",
            "It reads pictures.",
            "Choose a model of text, or train it by a job of the workbench.",
        )
    return name, stack


def _config(stack: LayerStack, options: Mapping[str, Any]) -> ParallelAdapterConfig:
    names = [name for name in ParallelAdapterConfig.__dataclass_fields__ if name not in SHAPE]
    for name in options:
        check_choice("option", name, names)
    settings = {"target_length": 0 if stack.num_encoder_layers is None else 1} | dict(options)
    return ParallelAdapterConfig(**{name: getattr(stack, name) for name in SHAPE}, **settings)


def _leave_backbone_out(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}backbone.")]:
        del state[name]


def _do_not_miss_backbone(module: nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if "backbone." not in name]
