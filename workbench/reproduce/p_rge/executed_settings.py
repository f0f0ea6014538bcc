"""What the executed tables have in common: model, task, rates, how they are searched, how small the quick ones are (P-RGE, Table 9)."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from workbench.reproduce.p_rge.executed_runs import Method, Trial, TrialFolder, TrialOutcome
from workbench.reproduce.p_rge.executed_training import Runner
from workbench.reproduce.result import Settings

MODEL, QUICK_MODEL = "SmolLM2-135M", "tiny-llama-2"
TASK = "sentiment"
STEPS, SHORT_STEPS, SCORE_EVERY = 900, 200, 100
"""A long training and those that are compared: half an hour on two cores, and seven minutes."""
SEARCH_STEPS = 300
"""Learning rates are compared after so many steps, or at a shorter training's end."""
RATES: dict[tuple[Method, str], tuple[float, ...]] = {
    ("P-RGE", "lora_fa"): (4e-3, 8e-3, 1.6e-2),
    ("P-RGE", "lora"): (5e-4, 5e-3),
    ("P-RGE", "dora"): (5e-4, 5e-3),
    ("P-RGE", "vera"): (5e-4, 5e-3),
    ("MeZO", "full"): (1e-6, 4e-6),
    ("FO-SGD", "full"): (1e-4, 1e-3),
    ("FO-SGD", "lora_fa"): (1e-2, 1e-1),
    ("FO-Adam", "full"): (1e-5,),
    ("FO-Adam", "lora_fa"): (5e-4,),
}
"""Learning rates that are tried with the first seed: the one that is chosen by the validation score trains all seeds.

P-RGE over LoRA-FA: four times Table 9's largest and more, MeZO: its largest and four times it, as hundreds of steps need larger ones than
the paper's twenty thousand.  LoRA, DoRA and VeRA: the upper two of appendix B's.  A model a tenth as large takes larger ones in SGD.
"""
LONG_RATES, OVER_VOCABULARY = (2e-3, 4e-3, 8e-3), (1e-3, 2e-3, 4e-3)
"""The same for P-RGE's long training, and for its loss over the vocabulary, whose slopes are steeper."""
NEARLY = 1.0
"""Points; a score on 500 sentences is uncertain by two of them, and a smaller rate is the safer one."""
LOSS: Literal["vocabulary", "label_words"] = "label_words"
"""MeZO's own loss: some hundred steps are enough for it."""
EPSILONS = {"full": 1e-3}
"""Table 9: 1e-3 over all parameters, else 1e-2."""
FIRST_ORDER_BATCH, FIRST_ORDER_STEPS = 8, 150
_QUICK: dict[str, Any] = {"model": QUICK_MODEL, "steps": 4, "score_every": 2, "samples": (16, 8, 8), "max_length": 64}


def trial(settings: Settings, method: Method, technique: str = "lora_fa", **changes: Any) -> Trial:
    """Return a trial of the comparison, or its quick version."""
    given: dict[str, Any] = {"model": MODEL, "task": TASK, "steps": STEPS, "score_every": SCORE_EVERY}
    if method not in ("zero-shot", "calibrated"):
        given["loss"] = LOSS
    given |= {"epsilon": EPSILONS.get(technique, 1e-2)} | changes
    if settings.quick:
        given |= _QUICK
    if method in ("zero-shot", "calibrated"):
        given["steps"] = 0
    return Trial(method=method, technique=technique, **given)


def best_rate(runner: Runner, wanted: Trial, seed: int) -> float:
    """Return the smallest learning rate that does as well as the best on the validation split, but for NEARLY, with one seed."""
    rates: tuple[float, ...]
    if wanted.loss == "vocabulary":
        rates = OVER_VOCABULARY
    elif wanted.steps > SEARCH_STEPS:
        rates = LONG_RATES
    else:
        rates = RATES[wanted.method, wanted.technique]
    if len(rates) == 1:
        return rates[0]
    steps = min(wanted.steps, SEARCH_STEPS)
    tries = {rate: runner.validation_score(replace(wanted, learning_rate=rate, seed=seed, steps=steps)) for rate in rates}
    return min(rate for rate in rates if tries[rate] >= max(tries.values()) - NEARLY)


def run_searched(
    settings: Settings, wanted: Mapping[str, Trial], seeds: Mapping[str, Sequence[int]], rate_of: Mapping[str, str] = MappingProxyType({})
) -> dict[str, list[TrialOutcome]]:
    """Run a row's trials for each of its seeds and return their outcomes; kept in the settings' workdir, if there is one.

    rate_of: rows that take the rate of another, earlier row and search none.
    """
    with ExitStack() as stack:
        if settings.workdir is None:
            kept = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="workbench-trials-")))
        else:
            kept = settings.workdir / "trials"
        runner = Runner(TrialFolder(kept), settings.progress)
        outcomes: dict[str, list[TrialOutcome]] = {}
        for name, one in wanted.items():
            if not one.steps:
                outcomes[name] = [runner.outcome(one)]
                continue
            same = rate_of.get(name)
            rate = best_rate(runner, one, seeds[name][0]) if same is None else outcomes[same][0].trial.learning_rate
            outcomes[name] = [runner.outcome(replace(one, learning_rate=rate, seed=seed)) for seed in seeds[name]]
        return outcomes
