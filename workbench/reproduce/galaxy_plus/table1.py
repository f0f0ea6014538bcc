"""Table I: memory footprint and latency of a single token, counted from sizes (Galaxy+, section II-B)."""

from __future__ import annotations

from workbench.plots.export import Captioned
from workbench.profiler.descriptions import FP32_BYTES
from workbench.profiler.inference import stack_sizes, working_bytes
from workbench.reproduce.drawing import paired_bars
from workbench.reproduce.galaxy_plus.sensitivity import sensitivity
from workbench.reproduce.galaxy_plus.testbed import GIB, MODELS, PAPER, Constants, cluster, load_constants
from workbench.reproduce.result import OOM, Check, Comparison, Number, Result, Settings, Table
from workbench.reproduce.values import lookup, paper_values

MEMORY, PI, A100 = "memory footprint", "latency per token on RPi-M", "latency per token on A100"
FITTED = {("DistilBert", PI), ("DistilBert", A100)}
FLOOR_PERCENT = 5.0
A100_FLOPS_PER_S = 19.5e12  # [datasheet] fp32


def footprint_bytes(constants: Constants, model: str) -> float:
    """Return the bytes of a model's weights and of one sequence's activations in one layer, in fp32."""
    described = MODELS[model]
    return FP32_BYTES * described.params + max(map(working_bytes, stack_sizes(described))) * constants.length(model)


def token_s(model: str, *, flops_per_s: float, weight_bytes_per_s: float, layer_s: float = 0.0) -> float:
    """Return the seconds of one token through all layers: its weights are read once, and used once."""
    described = MODELS[model]
    weights = sum(map(described.layer_params, range(described.stack_layers)))
    return FP32_BYTES * weights / weight_bytes_per_s + 2 * weights / flops_per_s + described.stack_layers * layer_s


def cells(constants: Constants) -> dict[tuple[str, str], Number]:
    """Return GB, seconds and milliseconds, or OOM, by (model, quantity)."""
    pi = cluster(constants, "Env. A").devices[0]
    found: dict[tuple[str, str], Number] = {}
    for model in MODELS:
        needs = footprint_bytes(constants, model)
        found[model, MEMORY] = needs / GIB
        seconds = token_s(model, flops_per_s=pi.flops_per_s, weight_bytes_per_s=constants.pi_weight_bytes_per_s)
        found[model, PI] = seconds if needs <= pi.memory_bytes else OOM
        found[model, A100] = 1e3 * token_s(
            model,
            flops_per_s=A100_FLOPS_PER_S,
            weight_bytes_per_s=constants.a100_weight_bytes_per_s,
            layer_s=constants.a100_layer_s,
        )
    return found


def run(settings: Settings) -> Result:
    """Count it."""
    constants = load_constants()
    ours = cells(constants)
    comparisons = []
    for value in paper_values(PAPER, "table1"):
        model, quantity = value.labels["model"], value.labels["quantity"]
        kind = "fitted" if (model, quantity) in FITTED else "computed" if quantity == MEMORY else "predicted"
        comparisons.append(
            Comparison(labels=(model, quantity), paper=value.value, ours=ours[model, quantity], unit=value.unit, kind=kind)  # type: ignore[arg-type]
        )
    memory = [one for one in comparisons if one.labels[1] == MEMORY]
    worst = max(memory, key=lambda one: abs(one.deviation or 0.0))
    words = [one for one in comparisons if one.agrees is not None]
    ratio = 1e3 * _number(ours["Bert-L", PI]) / _number(ours["Bert-L", A100])
    paper = lookup(paper_values(PAPER, "claims"))

    def score(changed: Constants) -> tuple[Number, ...]:
        made = cells(changed)
        return made["Bert-L", PI], made["Bert-L", A100], made["ViT-Huge", A100], made["GPT2-L", A100]

    scaled = [0.11 * _ratio("Bert-L"), *(0.3 * _ratio(model) for model in ("Bert-L", "ViT-Huge", "GPT2-L"))]
    return Result(
        item="table1",
        title="Table I: memory footprint and latency of one token",
        paper_section="II-B",
        source="counted",
        label_columns=("model", "quantity"),
        comparisons=tuple(comparisons),
        tables=(
            _one_token_or_284(constants, ours),
            sensitivity(
                constants,
                ("Bert-L on RPi-M, s", "Bert-L on A100, ms", "ViT-Huge on A100, ms", "GPT2-L on A100, ms"),
                score,
                trivial=("DistilBert's printed value times the ratio of the parameters", tuple(scaled)),
                varied=("speed_factor", "pi_weight_bytes_per_s", "a100_weight_bytes_per_s", "a100_layer_s"),
            ),
        ),
        checks=(
            Check(
                claim=f"every memory footprint within {FLOOR_PERCENT:.0f} %",
                holds=abs(worst.deviation or 0.0) <= FLOOR_PERCENT,
                found=f"the worst is {worst.labels[0]}, {worst.deviation:+.1f} %",
            ),
            Check(
                claim="OOM on the 1.5 GB of an RPi-M where the paper has it",
                holds=all(one.agrees for one in words),
                found=f"{sum(bool(one.agrees) for one in words)} of {len(words)}",
            ),
            Check(
                claim="Bert-L is about 470 times slower on an RPi-M than on an A100 (section I)",
                holds=abs(ratio / _number(paper["latency of Bert-L on an RPi 4B against an A100", "about"]) - 1) <= 0.15,
                found=f"{ratio:.0f} times",
            ),
        ),
        explanation=(
            "GB are 2^30 bytes here: weights in fp32 and the activations of one layer for one sequence.  Table V's budgets are not (see"
            " there).",
            "'Per-token latency' is that of a pass with one token, bound by reading every weight once: on the RPi-M DistilBert and Bert-L"
            " read 1.5 and 1.7 GB/s, on the A100 launching a layer's kernels counts as well.  Fitted: both rates on DistilBert.",
            "Of the last column (OPT-L) the text we have lost the latencies.",
        ),
    )


def _ratio(model: str) -> float:
    return MODELS[model].params / MODELS["DistilBert"].params


def _number(value: Number) -> float:
    assert isinstance(value, float)
    return value


def _one_token_or_284(constants: Constants, ours: dict[tuple[str, str], Number]) -> Table:
    """Table I's latency cannot be Table V's metric, 'the average per-token processing latency': the sum."""
    rows: list[tuple[Number, ...]] = []
    printed = lookup(paper_values(PAPER, "table1"))
    env = cluster(constants, "Env. A", constants.bandwidth_mbit_per_s)
    nominal = constants.bandwidth_mbit_per_s * 1e6 / 8
    for model in ("DistilBert", "Bert-L"):
        described, per_token = MODELS[model], _number(printed[model, PI])
        sequence = per_token * constants.tokens
        flops = sum(sizes.shape.num_layers * sizes.layer_flops(constants.tokens, constants.tokens) for sizes in stack_sizes(described))
        reduce = 2 * described.num_layers * 1.5 * constants.tokens * described.hidden * FP32_BYTES / nominal
        rows.append((model, per_token, sequence, flops / sequence / 1e9, reduce, 1 + reduce / (sequence / len(env.devices))))
    return Table(
        title="If Table I's latency were that of every token of a sequence",
        columns=("model", "s per token", "s for 284 tokens", "GFLOP/s of an RPi-M", "M-LM's all-reduces, s", "M-LM over ideal"),
        rows=tuple(rows),
        note="An RPi-M would do less than 1 GFLOP/s, and M-LM's communication at 500 Mbit/s would be 1 to 3 % of its time: no method"
        " could be 1.34 or 1.82 times faster.  So Table V's tokens are a sequence's, and Table I's stand alone.",
    )


def draw(result: Result) -> list[Captioned]:
    """Return the footprints."""
    chosen = [Comparison(labels=(one.labels[0],), paper=one.paper, ours=one.ours) for one in result.comparisons if one.labels[1] == MEMORY]
    figure = paired_bars(result, chosen, title=result.title, subtitle="weights and activations in fp32", unit="GB (2^30 bytes)")
    return [Captioned("table1", "Memory footprint of the models.", figure)]
