"""Where Table V and the text contradict arithmetic or each other: the sums (Galaxy+, Eq. 8-9, Tables I and V, sections IV-B and IV-C)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.planners.galaxy_plus import algorithm_1
from workbench.profiler.inference import stack_sizes
from workbench.reproduce.galaxy_plus.systems import EDGESHARD, run_system
from workbench.reproduce.galaxy_plus.testbed import ENVIRONMENTS, GB, GIB, MODELS, PAPER, TABLE_V, Constants, cluster, profile
from workbench.reproduce.result import OOM, Number, Table
from workbench.reproduce.values import lookup, paper_values

CONFIGURATION = "HMP configuration"
SHARES = (0.0, 0.25, 0.375, 0.5, 1.0)
Cells = Mapping[tuple[str, ...], Number]


def contradictions(constants: Constants, paper: Cells) -> tuple[Table, ...]:
    """Return a table for each."""
    return (
        _weights(constants, paper),
        _accounting(constants, paper),
        _balance(constants, paper),
        _asked(constants, paper),
        _sizes(),
        _text(paper),
    )


def least_bytes(model: str, second: int) -> tuple[float, float]:
    """Return what each device must hold of `second` layers of scheme 2, and the weights of all four devices together (Eq. 8).

    The layers of the first stack are taken first, as Algorithm 1 does.
    """
    each = total = 0.0
    left = second
    for sizes in stack_sizes(MODELS[model]):
        shape = sizes.shape
        full = min(left, shape.num_layers)
        left -= full
        each += full * shape.feed_forward_bytes
        total += shape.num_layers * (shape.attention_bytes + shape.feed_forward_bytes)
    return each, total + 3 * each


def _weights(constants: Constants, paper: Cells) -> Table:
    rows: list[tuple[Number, ...]] = []
    for environment in ENVIRONMENTS:
        budgets = [device.memory_bytes for device in cluster(constants, environment).devices]
        for model in TABLE_V:
            printed = str(paper[model, environment, CONFIGURATION])
            each, total = least_bytes(model, int(printed.strip("[]").split(",")[1]))
            found = "possible"
            if each >= min(budgets):
                found = "impossible: the smallest device cannot hold the full MLPs alone"
            elif total > sum(budgets):
                found = "impossible: all devices together are too small"
            elif environment == ENVIRONMENTS[1] and not _fits(constants, model, environment, int(printed.strip("[]").split(",")[1])):
                found = "possible, but not with heads and columns in proportion to speed (Algorithm 1)"
            rows.append((model, environment, printed, each / GB, min(budgets) / GB, total / GB, sum(budgets) / GB, found))
    return Table(
        title="Can a printed configuration be held at all?  Weights of MHA and MLP in fp32",
        columns=(
            "model",
            "environment",
            "[P,Q]",
            "Q full MLPs, on each device, GB",
            "smallest device, GB",
            "weights of all devices, GB",
            "memory of all devices, GB",
            "verdict",
        ),
        rows=tuple(rows),
        note="GB = 10^9 bytes, as the budgets must be (next table).  Of Env. B's six cells three cannot be had by any partition.",
    )


def _fits(constants: Constants, model: str, environment: str, second: int) -> bool:
    found = _second_layers(constants, model, cluster(constants, environment), environment)
    return isinstance(found, float) and found >= second


def _second_layers(constants: Constants, model: str, on: Cluster, environment: str) -> Number:
    costs = profile(constants, model, environment)
    try:
        plan = algorithm_1(costs, on, length=constants.length(model), decoder_length=constants.decoder_tokens, memory=constants.memory_rule)
    except PlanError:
        return OOM
    return float(plan.configuration[1])


def _accounting(constants: Constants, paper: Cells) -> Table:
    """Q by Algorithm 1 under each reading of what counts, in Env. A, which only they decide."""
    rows: list[tuple[Number, ...]] = []
    on = cluster(constants, ENVIRONMENTS[0])
    larger = replace(on, devices=tuple(replace(device, memory_bytes=round(device.memory_bytes / GB * GIB)) for device in on.devices))
    for name, budgets, shares in (("10^9 bytes", on, SHARES), ("2^30 bytes", larger, (constants.embedding_share,))):
        for share in shares:
            changed = replace(constants, embedding_share=share)
            found = [_second_layers(changed, model, budgets, ENVIRONMENTS[0]) for model in TABLE_V]
            rows.append((f"GB = {name}, {share:g} of the embedding on each device", *found))
    printed = [float(str(paper[model, ENVIRONMENTS[0], CONFIGURATION]).strip("[]").split(",")[1]) for model in TABLE_V]
    rows.append(("the paper", *printed))
    return Table(
        title="Layers of scheme 2 in Env. A by what counts as memory",
        columns=("reading", *TABLE_V),
        rows=tuple(rows),
        note="Table I's GB are 2^30 bytes, Table V's budgets cannot be.  Half of the embedding on each device, its table and the output"
        " matrix both cut in four, meets GPT2-L and OPT-L and misses T5-L by two; a quarter meets T5-L and misses GPT2-L by two.",
    )


def _balance(constants: Constants, paper: Cells) -> Table:
    """What EdgeShard could lose at most in Env. B, were Galaxy+ perfectly balanced with a free network."""
    rows: list[tuple[Number, ...]] = []
    devices = cluster(constants, ENVIRONMENTS[1]).devices
    speeds = sorted((device.flops_per_s for device in devices), reverse=True)
    for model in TABLE_V:
        printed = paper[model, ENVIRONMENTS[1], "speed-up over ES"]
        weights = least_bytes(model, 0)[1]
        needed = weights
        seconds = 0.0  # of the layers, dealt to the fastest devices first, in units of the model's FLOPs
        for device in sorted(devices, key=lambda each: -each.flops_per_s):
            held = min(needed, float(device.memory_bytes))
            seconds += held / weights / device.flops_per_s
            needed -= held
        most = seconds * sum(speeds)
        rows.append((model, weights / GB, printed, most, printed > most if isinstance(printed, float) else None))
    return Table(
        title="Beyond perfect balance: EdgeShard on the fastest devices that hold the model, over four perfectly balanced ones, Env. B",
        columns=("model", "weights, GB", "printed speed-up over ES", "at most", "beyond"),
        rows=tuple((*row[:-1], "yes" if row[-1] else "no") for row in rows),
        note="By the clocks of Table IV.  Where it is beyond, the ES that was measured was slower than one that leaves out the slow"
        " devices: than one RPi-L alone, if the model fits on it.",
    )


def _asked(constants: Constants, paper: Cells) -> Table:
    """How close to perfect balance with a free network Galaxy+ must run for the printed factors over EdgeShard."""
    rows: list[tuple[Number, ...]] = []
    for environment in ENVIRONMENTS:
        speeds = [device.flops_per_s for device in cluster(constants, environment).devices]
        for model in TABLE_V:
            made = run_system(constants, model, environment, EDGESHARD).plan
            printed = paper[model, environment, f"speed-up over {EDGESHARD}"]
            if made is None or not isinstance(printed, float):
                continue
            pipeline = sum(count / speed for count, speed in zip(made.layers, speeds, strict=True))
            perfect = sum(made.layers) / sum(speeds)
            rows.append((model, environment, printed, pipeline / perfect, 100 * printed / (pipeline / perfect)))
    return Table(
        title="What the factors ask for: Galaxy+'s share of perfect balance, if EdgeShard is a pipeline through all devices",
        columns=("model", "environment", "printed speed-up over ES", "that pipeline over perfect balance", "Galaxy+ must reach, %"),
        rows=tuple(rows),
        note="EdgeShard's own transfers (below 1 %) are left out.  100 % is computing without a second of communication; the paper's own"
        " claim is 85 % on four devices (section I).",
    )


def _sizes() -> Table:
    rows: list[tuple[Number, ...]] = []
    for model, changed, text in (
        ("T5-L", replace(MODELS["T5-L"], hidden=2048, feed_forward=8192), "with the printed hidden size 2048"),
        ("OPT-L", replace(MODELS["OPT-L"], heads=32, head_dim=64), "with the published 32 heads, of 64, not the printed 16, of 128"),
    ):
        printed = lookup(paper_values(PAPER, "table5"))[model, "any", "parameters"]
        rows.append((model, printed, MODELS[model].params / 1e6, text, changed.params / 1e6))
    return Table(
        title="Sizes in Table V against the number of parameters (millions)",
        columns=("model", "printed", "as used here", "another reading", "its parameters"),
        rows=tuple(rows),
        note="T5-L's 740 million are those of hidden size 1024.  OPT-L's heads do not change its parameters.",
    )


def _text(paper: Cells) -> Table:
    in_a = {model: paper[model, ENVIRONMENTS[0], "speed-up over ES"] for model in TABLE_V}
    most = lookup(paper_values(PAPER, "fig12"))["Env. A", "M-LM, SP and ES", "most"]
    told = lookup(paper_values(PAPER, "claims"))["speed-up over EdgeShard in Env. A", "most"]
    beyond = ", ".join(model for model, value in in_a.items() if isinstance(value, float) and isinstance(most, float) and value > most)
    largest = max(value for value in in_a.values() if isinstance(value, float))
    rows: tuple[tuple[Number, ...], ...] = (
        ("most over EdgeShard in Env. A: section IV-B against Table V", told, largest, "3.59 is GPT2-L's in Env. B"),
        ("most over any baseline in Env. A: section IV-C against Table V", most, largest, f"at 500 Mbit/s already beyond: {beyond}"),
    )
    return Table(title="The text against Table V", columns=("statement", "text", "table", "so"), rows=rows)
