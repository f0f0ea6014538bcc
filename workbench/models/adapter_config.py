"""The configuration of a parallel adapter (PAC+, section IV-A, Fig. 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.core.errors import ConfigError
from workbench.core.names import TrainedKind
from workbench.core.ranges import Count, Dropout, Width, require_ranges


def check_labels(config: Any) -> None:
    """Raise ConfigError for a configuration with an impossible mean and standard deviation of training labels."""
    mean, deviation = config.label_mean, config.label_std
    if not deviation > 0 or (config.kind != "regression" and (mean, deviation) != (0.0, 1.0)):
        raise ConfigError(
            f"Labels of mean {mean:g} and deviation {deviation:g} were asked for in {config.kind}.",
            "The deviation must be above 0, and only a regression's labels are numbers.",
            "Leave both out.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelAdapterConfig:
    """The configuration from which a parallel adapter can be rebuilt.

    hidden_size, num_layers: the backbone's d and L.  reduction: r, the side network has width d / r.
    num_heads: None uses heads of 16 channels (a SIMD register) if they divide the width, else the largest divisor among
    4, 3, 2, 1.
    feed_forward_factor: feed-forward size relative to the width.
    is_causal: whether side attention is causal, as in the backbone.  num_outputs: number of classes, or 1 for
    regression.
    num_encoder_layers: number of encoder layers of an encoder-decoder, the later ones belong to the decoder; None for a
    single stack.
    target_length: number of decoder tokens, the same for the whole job; 0 without a decoder.
    kind: 'sequence_to_sequence' needs an encoder-decoder, 'text_generation' a decoder-only model; their own language
    model head is read.
    dropout: rate for the pooled features.  seed: seed of the initial weights and the dropout.
    label_mean, label_std: mean and standard deviation of a regression's training labels.  The head learns standardised
    labels and predicts in the original units.
    """

    hidden_size: int
    num_layers: int
    reduction: Width = 8
    num_heads: Count | None = None
    feed_forward_factor: int = 4
    is_causal: bool = False
    kind: TrainedKind = "classification"
    num_outputs: Count = 2
    num_encoder_layers: int | None = None
    target_length: int = 0
    dropout: Dropout = 0.1
    seed: int = 0
    label_mean: float = 0.0
    label_std: float = 1.0

    def __post_init__(self) -> None:
        require_ranges(self, "A parallel adapter")
        request = (
            f"A parallel adapter with reduction {self.reduction} on a backbone {self.hidden_size} wide was asked for."
        )
        if self.hidden_size % self.reduction:
            raise ConfigError(
                request, f"{self.hidden_size} is not a multiple of {self.reduction}.", "Choose a divisor."
            )
        if self.num_heads is not None and self.width % self.num_heads:
            raise ConfigError(
                request, f"Its width {self.width} is not a multiple of {self.num_heads} heads.", "Change num_heads."
            )
        if self.kind == "regression" and self.num_outputs != 1:
            raise ConfigError(
                f"{self.num_outputs} outputs were asked for in {self.kind}.", "Regression has 1.", "Change num_outputs."
            )
        check_labels(self)
        self._check_decoder()

    def _check_decoder(self) -> None:
        encoder = self.num_encoder_layers
        if encoder is None and self.kind == "sequence_to_sequence":
            raise ConfigError(
                "Sequence-to-sequence was asked for.",
                "The backbone has one stack of layers, no encoder and decoder.",
                "Choose a T5 or BART model, or another kind of target.",
            )
        if encoder is not None and not 0 < encoder < self.num_layers:
            raise ConfigError(
                f"An encoder of {encoder} of {self.num_layers} layers was asked for.",
                "Each stack needs one.",
                "Change num_encoder_layers.",
            )
        if (self.target_length >= 1) != (encoder is not None):
            raise ConfigError(
                f"Targets of {self.target_length} tokens were asked for.",
                "The backbone has no decoder." if encoder is None else "A decoder reads one at least.",
                "Give target_length with num_encoder_layers, and only then.",
            )

    @property
    def width(self) -> int:
        """Return d / r."""
        return self.hidden_size // self.reduction

    @property
    def heads(self) -> int:
        """Return the number of attention heads."""
        if self.num_heads is None and self.width % 16 == 0:
            return self.width // 16
        return self.num_heads or next(heads for heads in (4, 3, 2, 1) if self.width % heads == 0)

    @property
    def border(self) -> int:
        """Return the decoder's first layer; L without a decoder."""
        return self.num_layers if self.num_encoder_layers is None else self.num_encoder_layers

    @property
    def num_parameters(self) -> int:
        """Return the number of the whole adapter's parameters (see models.parallel_adapter)."""
        width, inner = self.width, self.feed_forward_factor * self.width
        norm, projection = 2 * width, _linear(self.hidden_size, width)
        attention = norm + _linear(width, 3 * width) + _linear(width, width)
        feed_forward = norm + _linear(width, inner) + _linear(inner, width)
        cross_attention = attention + norm
        head = norm + _linear(width, self.hidden_size)
        if self.kind not in ("sequence_to_sequence", "text_generation"):
            head += _linear(self.hidden_size, self.num_outputs)
        layer = projection + 1 + attention + feed_forward  # 1: lambda
        num_embeddings = 1 + (self.num_encoder_layers is not None)
        in_decoder = self.num_layers - self.border
        return num_embeddings * projection + self.num_layers * layer + in_decoder * cross_attention + head

    @property
    def num_taps(self) -> int:
        """Return the number of the backbone's taps: b_0, one per layer, and a decoder's embedding."""
        return self.num_layers + 1 + (self.num_encoder_layers is not None)


def _linear(inputs: int, outputs: int) -> int:
    """Return the number of weights and biases of a linear layer."""
    return (inputs + 1) * outputs
