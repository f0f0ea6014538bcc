"""Speculative decoding over devices, simulated: what a round of guesses costs, which device guesses, and when it pays
(Leviathan, Kalman, Matias, ICML 2023, section 3).

A round: one device computes some guesses one after the other with its draft, and sends them to the plan's first device;
all devices of the plan compute them in one pass.  A link's latency comes twice in every layer of a pass, but only once
for all its tokens: so guesses pay on devices even where several tokens take as much arithmetic as they take one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan, StackShape
from workbench.methods.galaxy_plus.costs import divided_kinds
from workbench.methods.galaxy_plus.memory import InferenceNeed
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, PieceCost, StackTimes
from workbench.methods.galaxy_plus.planners.memory import needs
from workbench.methods.galaxy_plus.planners.terms import problem_for
from workbench.methods.galaxy_plus.prices import Programs
from workbench.methods.galaxy_plus.session import MESSAGE_NUMBERS
from workbench.models.quantization import QuantizationConfig
from workbench.models.speculation import NUM_GUESSES, DraftChoice
from workbench.planners.memory import Demand, require_room
from workbench.simulator import makespan_s

MESSAGE_BYTES = 8 * MESSAGE_NUMBERS
"""Size of a message with tokens between the plan's first device and the draft's."""
_INT4 = QuantizationConfig(storage="int4")


def draft_profile(choice: DraftChoice, profile: InferenceProfile) -> InferenceProfile:
    """Return the costs of a draft.  profile: those of the model that it is made of."""
    *before, last = profile.stacks
    if choice.layers:
        return replace(profile, stacks=(*before, replace(last, num_layers=choice.layers)))
    if not choice.is_int4:
        return profile
    rows = tuple(
        tuple(_int4_costs(costs, shape) for costs, shape in zip(row, profile.stacks, strict=True))
        for row in profile.costs
    )
    return replace(profile, stacks=tuple(map(_int4_shape, profile.stacks)), costs=rows)


def _int4_shape(shape: StackShape) -> StackShape:
    share = _INT4.bytes_of("int4") / 4
    names = ("unit_bytes", "column_bytes", "cross_unit_bytes")
    return replace(shape, **{name: round(share * getattr(shape, name)) for name in names})


def _int4_costs(costs: StackTimes, shape: StackShape) -> StackTimes:
    """Return costs with the dequantization of each weight in every pass, which takes as long as _INT4.unpack_flops of
    a matmul.
    """

    def priced(kind: str, cost: PieceCost) -> PieceCost:
        if kind not in divided_kinds(shape) or kind in ("ATT", "CATT"):
            return cost
        return replace(cost, unit_s=cost.unit_s + _INT4.unpack_flops / 2 * cost.token_unit_s)

    return StackTimes(pieces={kind: priced(kind, cost) for kind, cost in costs.pieces.items()})


def tokens_of_pass(acceptance: float, guesses: int = NUM_GUESSES) -> float:
    """Return the expected tokens of a pass (Eq. 1 of Leviathan et al.).  acceptance: probability that a guess is right
    if those before it are.
    """
    return sum(acceptance**number for number in range(guesses + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The seconds of a round's parts: one guess, the messages, and the pass that checks all; and of a token without
    guesses.
    """

    rank: int
    guesses: int
    guess_s: float
    messages_s: float
    check_s: float
    token_s: float

    @property
    def seconds(self) -> float:
        """Return the seconds of a round."""
        return self.guesses * self.guess_s + self.messages_s + self.check_s

    def speedup(self, acceptance: float) -> float:
        """Return the seconds of a token without guesses over those with them."""
        return tokens_of_pass(acceptance, self.guesses) * self.token_s / self.seconds

    @property
    def break_even(self) -> float | None:
        """Return the least acceptance with which guesses pay, to a hundredth; None if they never do.  A text's own is
        text_batch.Passes.acceptance.
        """
        return next((share / 100 for share in range(101) if self.speedup(share / 100) >= 1), None)

    @property
    def verdict(self) -> str:
        """Return in words when it pays."""
        share, times = self.break_even, self.seconds / self.token_s
        pays = "that cannot pay here" if share is None else f"pays if more than {share:.0%} of the guesses are right"
        return f"a round of {self.guesses} takes {times:.1f} times as long as a token, {pays} (simulated)"


class DraftPrices:
    """The costs of a draft on the devices of a cluster.

    programs: programs of the model that is divided.  draft, profile: the costs of the draft, and of the model.
    lengths: those of the text for which the devices were planned, by stack.
    kept: kept_tokens and kept_texts of Problem.
    """

    def __init__(
        self,
        programs: Programs,
        draft: InferenceProfile,
        profile: InferenceProfile,
        lengths: Sequence[int],
        **kept: int,
    ) -> None:
        self._programs, self._cluster, self._lengths = programs, programs.cluster, tuple(lengths)
        self._drafting = Programs(programs.cluster, draft.stacks, draft)
        self._model, self._draft = (problem_for(costs, programs.cluster, lengths, **kept) for costs in (profile, draft))

    def round(self, plan: InferencePlan, rank: int) -> Round:
        """Return the seconds of a round with one text, in which device `rank` guesses."""
        guess_s = token_s(self._drafting, draft_plan(rank, self._draft.profile.stacks), self._lengths)
        one_s, check_s = (token_s(self._programs, plan, self._lengths, rows=rows) for rows in (1, NUM_GUESSES + 1))
        first, messages_s = plan.ranks[0], 0.0
        if rank != first:
            links = self._cluster.link(first, rank), self._cluster.link(rank, first)
            messages_s = sum(link.transfer_s(MESSAGE_BYTES) for link in links)
        return Round(
            rank=rank, guesses=NUM_GUESSES, guess_s=guess_s, messages_s=messages_s, check_s=check_s, token_s=one_s
        )

    def best(self, plan: InferencePlan, others: Collection[int]) -> Round:
        """Return the shortest round in which the plan's first device guesses, or one of the others, which the plan
        leaves out.  Raises PlanError if none has memory for the draft.
        """
        rounds, lack = list[Round](), None
        for rank in dict.fromkeys((plan.ranks[0], *others)):
            try:
                self._require_room(plan, rank)
            except PlanError as error:
                lack = lack or error
                continue
            rounds.append(self.round(plan, rank))
        if not rounds:
            assert lack is not None
            raise lack
        return min(rounds, key=lambda candidate: candidate.seconds)

    def _require_room(self, plan: InferencePlan, rank: int) -> None:
        """Raise PlanError if a device lacks memory for the draft, its keys and values, and its part of the plan.

        A draft of the model itself takes embedding and head from the part, if they are there.
        """
        need = needs(self._draft, draft_plan(rank, self._draft.profile.stacks))[rank]
        part = needs(self._model, plan).get(rank, InferenceNeed())
        is_same_model = self._draft.profile.model == self._model.profile.model
        draft_bytes = need.total_bytes - (part.ends_bytes if is_same_model else 0)
        purposes = {"the draft": draft_bytes, "its part of the plan": part.total_bytes}
        require_room(self._cluster, [Demand(rank, "a draft", sum(purposes.values()), purposes)])


def token_s(programs: Programs, plan: InferencePlan, lengths: Sequence[int], rows: int = 1) -> float:
    """Return the simulated seconds of one more token of a text of given lengths, or of `rows` that come together."""
    return makespan_s(programs.token(plan, tuple(lengths), rows=rows).program)


def draft_plan(rank: int, stacks: Sequence[StackShape]) -> InferencePlan:
    """Return the plan of a whole draft on one device."""
    return InferencePlan.on_one_device(rank, stacks, method="draft")
