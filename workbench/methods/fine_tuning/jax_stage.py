"""A pipeline stage whose blocks JAX computes, for the ordinary handlers (Confidant, section 3.5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.fine_tuning.options import FineTuningOptions
from workbench.methods.training.handlers import StageContext, Targets
from workbench.models.configuration import model_config
from workbench.models.cross_framework import require_jax
from workbench.models.families import FAMILIES, family_of
from workbench.models.optimization import backpropagate
from workbench.models.techniques import TechniqueStage

TECHNIQUES, ACTIVATIONS = ("full", "lora"), ("gelu", "gelu_new", "relu")


def require_jax_suits(cluster: Cluster, model: str, options: FineTuningOptions) -> None:
    """Raise ConfigError if a device computes with JAX and JAX does not support the model or its trained parts here."""
    device = next((device.name for device in cluster.devices if device.framework == "jax"), None)
    if device is None:
        return
    config = model_config(model)
    is_plain = family_of(config.model_type).is_plain_encoder
    encoders = ", ".join(name for name, family in FAMILIES.items() if family.is_plain_encoder)
    wrong = [
        (not is_plain, f"a model of the family {config.model_type}", encoders),
        (options.technique not in TECHNIQUES, f"technique = '{options.technique}'", " and ".join(TECHNIQUES)),
        (options.lora_dropout > 0, f"lora_dropout = {options.lora_dropout:g}", "lora_dropout = 0"),
        (
            options.activations in ("recompute", "disk"),
            f"activations = '{options.activations}'",
            "activations = memory",
        ),
        (options.backbone_dtype != "float32", f"backbone_dtype = '{options.backbone_dtype}'", "float32"),
    ]
    for is_wrong, actual, supported in wrong:
        if is_wrong:
            raise ConfigError(
                f"Fine-tuning on '{device}', which computes with JAX, was asked for with {actual}.",
                f"JAX stages are built for {supported}.",
                "Change it, or let the device compute with torch.",
            )
    activation = activation_of(model)
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"Fine-tuning of '{model}' on '{device}', which computes with JAX, was asked for.",
            f"Its activation is '{activation}'; JAX stages have {', '.join(ACTIVATIONS)}.",
            "Choose another model, or let the device compute with torch.",
        )


def activation_of(model: str) -> str:
    """Return the name of the feed-forward network's activation."""
    config = model_config(model)
    return str(getattr(config, family_of(config.model_type).activation))


@dataclass(slots=True)
class JaxContext(StageContext):
    """Forward results for the backward pass.

    hidden: the stage's input; in the first stage the embedding's output, with torch's graph.

    last: the last block's output, (n, t, d), a leaf before head and loss.  pullbacks: the blocks' pullbacks.
    """

    last: Tensor | None = None
    pullbacks: list[Any] = field(default_factory=list)


class JaxStageCompute(StageCompute):
    """The layers of one pipeline stage: JAX runs the blocks; torch runs the first stage's embedding, and the last one's
    head and loss.

    heads: number of attention heads.  sizes: numbers of samples and tokens of the later batches, for which it is
    compiled before the first batch.
    """

    def __init__(
        self, model: TechniqueStage, *, activation: str, heads: int, sizes: Iterable[tuple[int, int]] = ()
    ) -> None:
        require_jax()
        from workbench.methods.fine_tuning.jax_blocks import JaxBlocks

        super().__init__(model)
        self._blocks = JaxBlocks(model, activation=activation, heads=heads)
        self._blocks.compile(sizes)

    def forward(self, hidden_or_ids: Tensor, attention_mask: Tensor, targets: Targets | None) -> JaxContext:
        """Run the layers (see StageCompute)."""
        backbone = self.model.backbone
        source = backbone.embed(hidden_or_ids, attention_mask) if backbone.start == 0 else hidden_or_ids
        last, pullbacks = self._blocks.forward(source, attention_mask)
        output = last if targets is None else self.loss(last.requires_grad_(), attention_mask, targets)
        return JaxContext(source, output, last=last, pullbacks=pullbacks)

    def backward(self, context: StageContext, gradient: Tensor | None) -> Tensor | None:
        """Accumulate the trained parameters' gradients; return the gradient of the stage's input (see StageCompute)."""
        assert isinstance(context, JaxContext) and context.last is not None and context.hidden is not None
        if gradient is None:
            context.output.backward()
            gradient = context.last.grad
        assert gradient is not None
        gradient = self._blocks.backward(context.pullbacks, gradient)
        if self.model.backbone.start != 0:
            return gradient
        if context.hidden.requires_grad:
            backpropagate(context.hidden, gradient)
        return None
