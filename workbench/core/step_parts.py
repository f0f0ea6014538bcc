"""Explain a step's seconds: computing, waiting for others, bytes on the links, or their latency; and whether too little
memory makes it slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from workbench.core.units import with_capital

Term = Literal["compute", "bubble", "bandwidth", "latency"]
Share = Annotated[float, Meta(ge=0, le=1.000001)]
_WORDS: dict[Term, str] = {
    "compute": "computing on {busiest} takes {share:.0%} of a step",
    "bubble": "waiting for other devices takes {share:.0%} of a step",
    "bandwidth": "the bytes on the links take {share:.0%} of a step",
    "latency": "the links' latency takes {share:.0%} of a step",
}
SHOWN_FROM = 0.2
"""From this share on, the sentence also names the second largest part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The parts of a simulated step.  shares: each part's share of its seconds; they add up to 1.  busiest: the device
    that computes most.

    roomy_s: seconds of a step of the plan that the planner makes where memory has no limit, if that is clearly faster.
    roomy_plan: its layers on its devices, in words.
    """

    step_s: Annotated[float, Meta(gt=0)]
    shares: dict[Term, Share]
    busiest: str
    roomy_s: Annotated[float, Meta(gt=0)] | None = None
    roomy_plan: str = ""

    @property
    def sentence(self) -> str:
        """Return in words whether memory decides, the largest part, and the next one if that is large, too."""
        first, second, *_ = sorted(self.shares, key=lambda term: -self.shares[term])
        words = self._words(first)
        if self.shares[second] >= SHOWN_FROM:
            words += f", {self._words(second).removesuffix(' of a step')}"
        words = f"{with_capital(words)} (simulated)."
        if self.roomy_s is None:
            return words
        faster = f"{self.roomy_plan} would take {self.roomy_s / self.step_s:.0%} of a step's time, but does not fit"
        return f"Too little memory decides: {faster} (simulated). {words}"

    def _words(self, term: Term) -> str:
        return _WORDS[term].format(busiest=self.busiest, share=self.shares[term])
