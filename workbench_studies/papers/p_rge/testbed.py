"""P-RGE's machines from one documented set of constants: A100, Jetson Orin Nano, OnePlus 12 (P-RGE, section 4, Table
14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

from workbench.methods.p_rge.published import Constants
from workbench_studies.papers.items import Item, Rows, median_deviation, worst
from workbench_studies.papers.p_rge.counted import MemoryRule
from workbench_studies.papers.result import Comparison, Number, Row

PAPER = "p_rge"
GIB = (
    2**30
    # the paper's GB: Llama2-7B's 6.74 billion fp16 parameters are 12.55 of these (Table 3: 12.59 with 64 tokens) and
    # 13.48
    # of 10^9
)
TINY, LLAMA = "TinyLlama-1.1B", "Llama2-7B"
MODELS = (TINY, LLAMA)


def memory_rule(constants: Constants) -> MemoryRule:
    """Return the rule of Tables 3, 12, 17 and 18."""
    constant_names, rule_names = ({field.name for field in fields(kind)} for kind in (constants, MemoryRule))
    return MemoryRule(**{name: getattr(constants, name) for name in constant_names & rule_names})


def deviations(item: Item, constants: Constants, ours: Callable[..., Number], trivial: Callable[..., Number]) -> Rows:
    """Return the sensitivity of the median and the largest deviation.  ours: (constants, *labels).  trivial: a rule,
    (*labels).
    """

    def score(comparisons: Sequence[Comparison]) -> Row:
        return median_deviation(comparisons), *worst(comparisons)

    return item.sensitivity(
        constants, lambda changed: score(item.compare(partial(ours, changed))), score(item.compare(trivial))
    )
