"""What an adviser says of drafts for texts on some devices: the acceptance from which each pays, simulated.

How many guesses are right only texts can tell: it is known where it has been counted (see methods.common.acceptances).
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.methods.common.acceptances import Acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOffer:
    """A draft where its round is shortest.

    name: as --draft takes it.  system: the system whose plan checks the guesses, as --system takes it.  guesser,
    checkers: names of devices.  round_s: seconds of some guesses and of the pass that checks them.
    break_even: the least share of right guesses with which a text comes as fast as by the fastest plan without a draft,
    None if it never does.  at_most: how many times as fast it comes if every guess is right.
    acceptance: counted in some texts, expected: how many times as fast such texts come; None if nobody has counted.
    """

    name: str
    system: str
    guesser: str
    checkers: tuple[str, ...]
    round_s: float
    break_even: float | None
    at_most: float
    acceptance: Acceptance | None = None
    expected: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAdvice:
    """Drafts for a model on some devices.

    system, devices, token_s: those of the fastest plan without a draft.  offers: the shortest round first.  refused:
    drafts for which no device has memory, with the reason.
    """

    model: str
    system: str
    devices: tuple[str, ...]
    token_s: float
    offers: tuple[DraftOffer, ...]
    refused: dict[str, str]

    @property
    def best(self) -> DraftOffer | None:
        """Return the draft that makes counted texts fastest, or else the one that pays with the fewest right guesses;
        None if none can pay.
        """
        paying = [offer for offer in self.offers if offer.break_even is not None]
        # Of those that nobody has counted it is not known whether they pay: they come before those that do not.
        return max(paying, key=lambda offer: 1.0 if offer.expected is None else offer.expected, default=None)
