"""The models of Confidant's tables, and the only constants."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.serial import read_toml
from workbench.profiler.descriptions import ModelDescription, describe
from workbench.reproduce.result import paper_folder

PAPER = "confidant"
NAMES = {"LLaMA-7B": "Llama2-7B"}
"""Models by the paper's name whose sizes are those of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """data/papers/confidant/constants.toml, which says of each what fixed it."""

    tokens: int
    batch: int


def load_constants() -> Constants:
    """Return the constants."""
    return Constants(**read_toml(paper_folder(PAPER) / "constants.toml")["table1"])


def description(model: str) -> ModelDescription:
    """Return the sizes of one of the paper's models."""
    return describe(NAMES.get(model, model))
