"""What is asked of the devices, and what comes back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from workbench.core.timeline import MemorySample, Span
from workbench.models.sharding import What


class Request(NamedTuple):
    """One sequence.  length, decoder_length: tokens of each stack, known to every device, as is the mask.

    ids: (1, t) token ids or (1, t, values) patches of a picture; decoder_ids: (1, s): only the plan's first device reads them.
    mask: (1, t), 1 for real tokens, padding on the right; None: no padding.  what: final hidden states, or logits.
    """

    length: int
    ids: Tensor | None = None
    mask: Tensor | None = None
    decoder_length: int = 0
    decoder_ids: Tensor | None = None
    what: What = "hidden"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of each stack."""
        return (self.length, self.decoder_length) if self.decoder_length else (self.length,)


class Answer(NamedTuple):
    """What a device did for a request, in seconds of its monotonic clock.  output: on the plan's first device alone.

    start_s, end_s: of its own computing (equal on a device that computed nothing).
    """

    output: Tensor | None
    start_s: float
    end_s: float
    spans: tuple[Span, ...] = ()
    memory: tuple[MemorySample, ...] = ()

    def busy_s(self) -> dict[int, float]:
        """Return the seconds for which this device computed on each block (embedding counts to the first, the head behind the last)."""
        seconds: dict[int, float] = {}
        for span in self.spans:
            if not span.op.is_communication:
                seconds[span.op.stage] = seconds.get(span.op.stage, 0.0) + span.end_s - span.start_s
        return seconds


class Generated(NamedTuple):
    """What a device did for a text.  tokens: the new ones, on the plan's first device alone.  prefill: the first step's answer.

    token_s: seconds of every further token.
    """

    tokens: tuple[int, ...]
    prefill: Answer
    token_s: tuple[float, ...]
    steps: tuple[Answer, ...] = ()
