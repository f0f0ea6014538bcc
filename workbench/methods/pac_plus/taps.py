"""Where the taps of a pipeline stage lie among those of the whole backbone (PAC+, section IV-A, Fig. 6)."""

from __future__ import annotations

from typing import NamedTuple

from workbench.core.plan import Plan
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.runtime.activation_records import RecordLayout


class StageTaps(NamedTuple):
    """first: position in a whole record.  num_taps: with the input's tokens.  num_target_taps: of the decoder, with the target's tokens."""

    first: int
    num_taps: int
    num_target_taps: int

    @property
    def total(self) -> int:
        """Return all taps of the stage."""
        return self.num_taps + self.num_target_taps


def stage_taps(start: int, stop: int, num_encoder_layers: int | None = None) -> StageTaps:
    """Return the taps of layers [start, stop): b_0 in the first stage, one a layer, and the decoder's embedding before its first layer.

    num_encoder_layers: of an encoder-decoder, whose layers from there on are the decoder's; None for a single stack.
    """
    border = stop if num_encoder_layers is None else num_encoder_layers
    has_embedding = num_encoder_layers is not None and start <= border < stop
    return StageTaps(
        first=0 if start == 0 else start + 1 + (start > border),
        num_taps=max(0, min(stop, border) - start) + (start == 0),
        num_target_taps=max(0, stop - max(start, border)) + has_embedding,
    )


def rank_taps(plan: Plan, num_encoder_layers: int | None = None) -> dict[int, StageTaps]:
    """Return the taps that each rank of a plan sees; a rank without a stage is left out."""
    return {rank: stage_taps(stage.start, stage.stop, num_encoder_layers) for stage in plan.stages for rank in stage.ranks}


def whole_taps(config: ParallelAdapterConfig) -> StageTaps:
    """Return all taps of a sample's record."""
    return stage_taps(0, config.num_layers, config.num_encoder_layers)


def record_layout(config: ParallelAdapterConfig, dtype: str) -> RecordLayout:
    """Return the shape of a sample's whole record: every tap that the adapter reads, stored as `dtype`."""
    taps = whole_taps(config)
    return RecordLayout(
        dtype=dtype,
        width=config.hidden_size,
        num_taps=taps.num_taps,
        num_target_taps=taps.num_target_taps,
        target_length=config.target_length,
    )


def boundary_tokens(config: ParallelAdapterConfig, layers: int, length: int) -> int:
    """Return the tokens of a hidden state that `layers` layers have made: in the decoder the encoder's output goes on beside its own."""
    in_decoder = config.num_encoder_layers is not None and layers > config.num_encoder_layers
    return length + config.target_length * in_decoder
