"""What the text claims beside the tables and figures, next to our values of the same (PAC+, abstract, sections I, II, V
and VI).
"""

from __future__ import annotations

from workbench_studies.papers.items import Item
from workbench_studies.papers.pac_plus.durations import durations, speedups
from workbench_studies.papers.pac_plus.epochs import HETPIPE, phases, redistribution_percent, runs
from workbench_studies.papers.pac_plus.epochs import claims as ratios
from workbench_studies.papers.pac_plus.techniques import cache_bytes
from workbench_studies.papers.pac_plus.techniques_simulated import costs, percentages
from workbench_studies.papers.pac_plus.testbed import FLOPS_PER_CORE_AND_CYCLE, PAPER, load_constants
from workbench_studies.papers.result import Cells, Result, printed

CACHED_SAMPLES, CACHED_TOKENS = 500, 30
CACHE = ("activation cache of 500 samples of 30 tokens, below", "T5-Base")
"""The label of a limit, which is judged; a value below it is not off by what is left."""
FP16_RATE = 2
"""Operations in fp16 for each in fp32: section II-B's peak is fp16's."""


def claims(item: Item) -> Result:
    """Compare the claims with the simulated tables."""
    constants = load_constants()
    hours = durations(constants)
    epochs = next(epochs for name, _, epochs in constants.datasets if name == "MRPC")
    cores, mhz = next((cores, mhz) for name, cores, mhz in constants.cores_and_mhz if name == "jetson-nano-h")
    ours: Cells = {
        ("redistribution of the whole, three epochs on MRPC", "BART-Large"): redistribution_percent(
            phases(constants)["BART-Large"]
        ),
        ("Nano peak", ""): FP16_RATE * FLOPS_PER_CORE_AND_CYCLE * cores * mhz * 1e6 / 1e12,
        ("largest end-to-end speedup", ""): ratios(runs(constants))["1", HETPIPE, "most"],
        ("largest memory saving", ""): percentages(costs(constants))[
            "memory saved by parallel_adapters_cached", "most"
        ],
    }
    for title, technique in (("LoRA", "lora"), ("Adapters", "adapters")):
        whole = hours[technique, "standalone", "T5-Base", "MRPC"]
        ours[f"standalone {title}, one epoch", "T5-Base"] = 60 * whole / epochs
    ours |= {(name, ""): value for name, _, _, value in speedups(hours, printed(PAPER, "table5"))}
    cache_gb, limit_gb = cache_bytes(constants, "T5-Base", CACHED_SAMPLES, CACHED_TOKENS) / 1e9, item.printed[CACHE]
    return item.result(
        [one for one in item.compare(lambda *labels: ours.get(labels)) if one.labels != CACHE],
        holds={"cache": cache_gb < limit_gb},
        cache_gb=cache_gb,
    )
