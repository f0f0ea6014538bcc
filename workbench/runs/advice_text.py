"""An adviser's answer as rows, points and sentences, the same for the terminal and for a notebook."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from workbench.core.methods import declaration_of, method_with
from workbench.core.units import tenths, three_figures, with_capital
from workbench.methods.common.draft_advice import DraftAdvice
from workbench.models.hub import has_weights
from workbench.runs.advice import Advice, by_reason

STAR = "* nothing else is as good in time, energy and memory, and better in one of them."


def columns(advice: Advice) -> tuple[str, ...]:
    """Return the columns of the table."""
    until = "run, s" if advice.score is None else f"to {advice.score:g}, s"
    return ("", "", "what", "layers on devices", "step, ms", until, "J", "MB")


def rows(advice: Advice) -> list[tuple[str, ...]]:
    """Return a row for each combination, best first."""
    return [
        (
            f"{number}",
            "" if choice.is_dominated else "*",
            choice.name,
            f"{choice.report.plan.partition()} on {choice.report.plan.grouping()}",
            three_figures(1e3 * choice.step_s),
            "unknown" if choice.seconds is None else tenths(choice.seconds),
            "" if choice.joules is None else three_figures(choice.joules),
            three_figures(choice.memory_bytes / 1e6) if choice.memory_bytes else "",
        )
        for number, choice in enumerate(advice.choices, 1)
    ]


def title(advice: Advice) -> str:
    """Return where the numbers come from."""
    return f"Simulated, {advice.costs} costs; {advice.spent_s:.1f} s"


def points(advice: Advice) -> list[tuple[str, float | None, float | None, int, bool]]:
    """Return the points of the picture (see plots.choices)."""
    return [
        (choice.name, choice.seconds, choice.joules, choice.memory_bytes, choice.is_dominated)
        for choice in advice.choices
    ]


def conclusion(advice: Advice) -> str:
    """Return which combination is best, and why."""
    best = advice.choices[0]
    if best.figure(advice.goal) is None:
        return "No measured curve says when one of these reaches the score. The order is that of the whole run's time."
    return f"Best for {advice.goal}: {best.name}. {advice.reason}"


DRAFT_COLUMNS = ("draft", "guesses on", "checked by", "a round, ms", "pays from", "counted", "times as fast", "at most")

DRAFT_NOTE = (
    "A round guesses some tokens and checks them in one pass. It pays if so many of the guesses are right, those after "
    "a wrong one not counted. Counted: how many were, in texts of ours, which come so many times as fast; at most: if "
    "all are right."
)


def draft_title(drafts: DraftAdvice) -> str:
    """Return what a draft is compared with."""
    writers = f"{' and '.join(drafts.devices)} write{'s' if len(drafts.devices) == 1 else ''}"
    return f"Drafts, simulated; without one {writers} a token in {three_figures(1e3 * drafts.token_s)} ms"


def draft_rows(drafts: DraftAdvice) -> list[tuple[str, ...]]:
    """Return a row for each draft, the shortest round first."""
    return [
        (
            offer.name,
            offer.guesser,
            ", ".join(offer.checkers),
            three_figures(1e3 * offer.round_s),
            "never" if offer.break_even is None else f"{offer.break_even:.0%}",
            "unknown" if offer.acceptance is None else f"{offer.acceptance.share:.0%}",
            "unknown" if offer.expected is None else f"{offer.expected:.2g}",
            f"{offer.at_most:.2g}",
        )
        for offer in drafts.offers
    ]


def draft_conclusion(drafts: DraftAdvice) -> str:
    """Return whether a draft can pay, and how to find out."""
    if not drafts.offers:
        return "No device has memory for a draft of the texts."
    if drafts.best is None:
        return "No draft can pay on these devices, even if every guess were right."
    decide = "Whether a draft pays, the texts decide: how many guesses are right depends on them, not on the devices."
    best, counted = drafts.best, drafts.best.acceptance
    if counted is None or best.expected is None:
        return decide
    verdict = f"{best.expected:.2g} times as fast as without" if best.expected > 1 else "slower than without any draft"
    return (
        f"{decide} In {counted.texts} texts of ours {counted.share:.0%} of the guesses of {best.name} were right: they "
        f"would come {verdict}."
    )


def draft_commands(drafts: DraftAdvice, cluster: str) -> list[str]:
    """Return the command that counts right guesses, and the one that serves with this draft; none if none can pay."""
    best, model = drafts.best, shlex.quote(drafts.model)
    if best is None or not has_weights(drafts.model):
        return []
    default = declaration_of(method_with("advises_drafts")).defaults.get("system")
    system = "" if best.system == default else f" --system {best.system}"
    draft = f"--draft {shlex.quote(best.name)}"
    return [
        f'workbench generate {model} "a text of yours" {draft}',
        f"workbench serve --http --model {model} --cluster {shlex.quote(cluster)}{system} {draft}",
    ]


def impossible(refused: Mapping[str, str]) -> list[str]:
    """Return a sentence for each reason why some combinations cannot run."""
    reasons = by_reason(refused).items()
    return [f"Not possible: {', '.join(names)}. {with_capital(why)}" for why, names in reasons]
