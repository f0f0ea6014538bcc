"""How many guesses of a draft are right?  Texts of a model in one process, greedy and sampled (item `acceptance`).

A text is the same on any devices, and so are the guesses of its draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

from workbench.methods.common.text_model import load_text_model
from workbench.models.generation import Sampling
from workbench.models.text import TextSettings
from workbench.models.text_batch import Passes
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Settings

MODEL, DRAFTS, TOKENS = "SmolLM2-135M", ("int4", "layers:8", "layers:16", "layers:24"), 40
QUICK_MODEL, QUICK_DRAFTS, QUICK_TOKENS = "tiny-llama-4", ("int4", "layers:1"), 8
PROMPTS = (
    "Once upon a time there was a lighthouse keeper",
    "The three most important rules of safe cycling are",
    "Water boils at a lower temperature on a mountain because",
    "def mean(numbers):",
)
TEMPERATURE = 0.8


Counts = dict[str, dict[str, float]]
"""By way of choosing tokens: a draft's passes (text_batch.Passes)."""


def acceptance(item: Item, settings: Settings) -> Result:
    """Write every text with every draft.  Finished texts are stored."""
    model, drafts, tokens = (QUICK_MODEL, QUICK_DRAFTS, QUICK_TOKENS) if settings.quick else (MODEL, DRAFTS, TOKENS)
    seeds, shares = "-".join(map(str, settings.seeds)), dict[str, Counts]()
    for draft in drafts:
        name = f"acceptance/{model}-{tokens}-tokens-{draft}-seeds-{seeds}.json".replace(":", "-")
        settings.progress(f"{model}, draft {draft}")
        shares[draft] = settings.remember(name, Counts, partial(measured, model, draft, tokens, settings.seeds))
    return compared(item, shares, model=model, tokens=tokens)


def measured(model: str, draft: str, tokens: int, seeds: Sequence[int]) -> Counts:
    """Return the passes of the prompts' texts, greedy and sampled.  Without seeds nothing is sampled."""
    ways = {"greedy": [Sampling()], "sampled": [Sampling(temperature=TEMPERATURE, seed=seed) for seed in seeds]}
    shares: Counts = {}
    for name, samplings in ways.items():
        if not samplings:
            continue
        loaded = load_text_model(model, draft)
        for prompt, sampling in product(PROMPTS, samplings):
            list(loaded.complete(prompt, TextSettings(max_tokens=tokens, sampling=sampling)))
        shares[name] = asdict(loaded.passes or Passes())
    return shares


def compared(item: Item, counts_by_draft: dict[str, Counts], *, model: str, tokens: int) -> Result:
    """Return the comparison.  found: by draft."""
    rows: list[tuple[Any, ...]] = []
    for draft, ways in counts_by_draft.items():
        for way, counts in ways.items():
            guesses = counts["right"] + counts["wrong"]
            share, a_pass = counts["right"] / max(1, guesses), counts["tokens"] / max(1, counts["count"])
            rows.append((draft, way, counts["right"], guesses, share, a_pass))
    return item.result(
        tables={"drafts": rows},
        model=model,
        tokens=tokens,
        prompts="; ".join(f'"{prompt}"' for prompt in PROMPTS),
        temperature=TEMPERATURE,
        shares=", ".join(f"{draft} {share:.0%}" for draft, way, _, _, share, *_ in rows if way == "greedy"),
    )
