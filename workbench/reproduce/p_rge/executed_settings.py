"""What the executed tables have in common: model, task, rates, how they are searched, how small the quick ones are (P-RGE, Table 9)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.reproduce.p_rge.executed_runs import Method, Trial, TrialFolder, TrialOutcome
from workbench.reproduce.p_rge.executed_training import run_all
from workbench.reproduce.result import Settings

MODEL, QUICK_MODEL = "SmolLM2-135M", "tiny-llama-2"
TASK = "sentiment"
STEPS, SHORT_STEPS, SCORE_EVERY = 900, 300, 150
"""A long training, and those that are compared or that search a rate: hours on two cores, and minutes."""
RATES: dict[tuple[Method, str], tuple[float, ...]] = {
    ("P-RGE", "lora_fa"): (5e-4, 1e-3),
    ("P-RGE", "lora"): (5e-5, 5e-4),
    ("P-RGE", "dora"): (5e-5, 5e-4),
    ("P-RGE", "vera"): (5e-4, 5e-3),
    ("MeZO", "full"): (5e-7, 1e-6),
    ("FO-SGD", "full"): (1e-4, 1e-3),
    ("FO-SGD", "lora_fa"): (1e-2, 1e-1),
    ("FO-Adam", "full"): (1e-5,),
    ("FO-Adam", "lora_fa"): (5e-4,),
}
"""Learning rates that are tried with the first seed: the one with the best validation score after SHORT_STEPS trains all seeds.

The upper two of Table 9's for P-RGE and MeZO, the upper two of appendix B's for LoRA and DoRA.  A model a tenth as large takes larger ones
in SGD.
"""
EPSILONS = {"full": 1e-3}
"""Table 9: 1e-3 over all parameters, else 1e-2."""
FIRST_ORDER_BATCH = 8
_QUICK: dict[str, Any] = {"model": QUICK_MODEL, "steps": 4, "score_every": 2, "samples": (16, 8, 8), "max_length": 64}


def trial(settings: Settings, method: Method, technique: str = "lora_fa", **changes: Any) -> Trial:
    """Return a trial of the comparison, or its quick version."""
    given: dict[str, Any] = {"model": MODEL, "task": TASK, "steps": STEPS, "score_every": SCORE_EVERY}
    given |= {"epsilon": EPSILONS.get(technique, 1e-2)} | changes
    if settings.quick:
        given |= _QUICK
    if method in ("zero-shot", "calibrated"):
        given["steps"] = 0
    return Trial(method=method, technique=technique, **given)


def searched(settings: Settings, folder: TrialFolder, wanted: Trial, seeds: Sequence[int]) -> dict[int, Trial]:
    """Return the trial of each seed at the learning rate that did best on validation with the first seed."""
    rates = RATES[wanted.method, wanted.technique]
    steps = min(wanted.steps, 2 if settings.quick else SHORT_STEPS)
    tries = {rate: replace(wanted, learning_rate=rate, seed=seeds[0], steps=steps) for rate in rates}
    if len(tries) > 1:
        found = run_all(list(tries.values()), folder, settings.progress)
        best = max(rates, key=lambda rate: found[tries[rate]].validation_score)
    else:
        best = rates[0]
    return {seed: replace(wanted, learning_rate=best, seed=seed) for seed in seeds}


def run_searched(settings: Settings, wanted: dict[str, Trial], seeds: dict[str, Sequence[int]]) -> dict[str, list[TrialOutcome]]:
    """Run a row's trials for each of its seeds and return their outcomes; kept in the settings' workdir, if there is one."""
    with ExitStack() as stack:
        if settings.workdir is None:
            kept = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="workbench-trials-")))
        else:
            kept = settings.workdir / "trials"
        folder = TrialFolder(kept)
        outcomes = {}
        for name, one in wanted.items():
            each = searched(settings, folder, one, seeds[name]) if one.steps else {seeds[name][0]: one}
            found = run_all(list(each.values()), folder, settings.progress)
            outcomes[name] = [found[made] for made in each.values()]
        return outcomes
