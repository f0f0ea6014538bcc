"""Memory of fine-tuning on one device, by our model and by Eq. 1 and 2 as printed (Confidant, Table 1, section 3.2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

from workbench.core.catalogue import load_cluster, load_device
from workbench.core.cluster import Cluster, Device, Link
from workbench.core.errors import PlanError
from workbench.core.names import FP32_BYTES
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile
from workbench.methods.confidant.equations import printed_need
from workbench.planners import Problem
from workbench.planners.asynchronous import plan_asynchronous
from workbench.planners.equation3 import Equation3
from workbench.planners.memory import Need, rank_need
from workbench.tasks import TASKS
from workbench_studies.papers.confidant.testbed import (
    PAPER,
    Constants,
    description,
    load_constants,
    profile_of,
    stages_bytes,
)
from workbench_studies.papers.device_titles import title_number, titles
from workbench_studies.papers.items import Item, each_cell
from workbench_studies.papers.result import OOM, Number, Result, Row, printed, read_constants

GB = 1e9
DATASETS = {"Conll2003": "token_classification", "SQuAD2.0": "question_answering", "Alpaca": "instruction_tuning"}
"""Our tasks that read them."""
LENGTHS, MOST_TOKENS = (128, 256, 512), 2048


class Reading(NamedTuple):
    """How Table 6 may have been trained.

    tokens: the name of the constant.  state: bytes of the optimizer's state for each byte that is trained.
    is_each: whether every version of a stage's weights has separate gradients and a separate optimizer.
    """

    tokens: str
    state: float
    is_each: bool = False


READINGS = {
    "SGD": Reading("SGD", 0.0),
    "AdamW, one for each version": Reading("AdamW", 2.0, is_each=True),
    "AdamW": Reading("AdamW", 2.0),
}
"""The last one is the item's."""
ONE_DEVICE = Cluster(
    name="one device",
    devices=(Device(name="device", flops_per_s=1e12, memory_bytes=10**12, link=Link(bytes_per_s=1e9)),),
)


def need(model: str, tokens: int, batch: int) -> Need:
    """Return the memory of full fine-tuning of the whole model with AdamW in float32, without a language head's
    logits.
    """
    profile = profile_of(model, ONE_DEVICE, batch=batch, tokens=tokens)
    return rank_need(profile, 0, 0, profile.num_layers, samples=batch, sequence_length=tokens, in_flight=1)


def model_gb(model: str, tokens: int, batch: int) -> float:
    """Return the GB of our memory model."""
    return need(model, tokens, batch).total_bytes / GB


def equation_gb(model: str, tokens: int, batch: int) -> float:
    """Return the GB of Eq. 1 and 2 as printed, on a single device: N = 1, i = 0, one version of the weights."""
    sizes = description(model)
    return (
        printed_need(
            need(model, tokens, batch),
            num_layers=sizes.num_layers,
            behind=0,
            heads=sizes.heads,
            batch=batch,
            tokens=tokens,
            hidden=sizes.hidden,
            feed_forward=sizes.feed_forward,
        )
        / GB
    )


def state_gb(model: str, bytes_per_param: float) -> float:
    """Return the GB that do not depend on the batch."""
    return bytes_per_param * description(model).params / GB


def tokens_within(model: str, gb: float, batch: int, *, optimizer: bool) -> int:
    """Return the longest sequences of a mini-batch that train within `gb`, 0 for none.  optimizer: with AdamW's
    state.
    """

    def taken_gb(tokens: int) -> float:
        parts = need(model, tokens, batch)
        return (parts.total_bytes - (0 if optimizer else parts.optimizer_bytes)) / GB

    return bisect_right(range(1, MOST_TOKENS), gb, key=taken_gb)


def model_of(device: str) -> str:
    """Return the catalogue's model of a device with a name of the paper."""
    return next(model for model, title in titles().items() if device.lower() in title.lower())


@each_cell
def table2(device: str, quantity: str) -> Number:
    """Return what the catalogue's title says of a device, as the paper names it; the catalogue has no GPU."""
    if quantity == "memory":
        return title_number(model_of(device), quantity)
    name = printed(PAPER, "table2")[device, quantity]
    return name if name in titles()[model_of(device)] else None


@each_cell
def table4(cluster: str, place: str) -> Number:
    """Return the device at a place of our cluster, as the paper names it if it is the same."""
    name = printed(PAPER, "table4")[cluster, place]
    model = load_cluster(cluster.lower().replace(" #", "-")).devices[int(place) - 1].model
    return name if model == model_of(name) else model


def frozen_embedding(model: str, cluster: Cluster, tokens: int, batch: int, reading: Reading) -> Equation3:
    """Return the costs of full fine-tuning with a frozen embedding (section 3.2: it is generally not updated)."""
    profile = profile_of(model, cluster, batch=batch, tokens=tokens)
    words = FP32_BYTES * description(model).embedding_params

    def freeze(layer: LayerProfile, rank: int, number: int) -> LayerProfile:
        moved = 0 if number else words
        return replace(layer, trainable_bytes=layer.trainable_bytes - moved, frozen_bytes=layer.frozen_bytes + moved)

    profile = replace(profile, optimizer_bytes_per_trainable_byte=reading.state).with_layers(freeze)
    return Equation3(Problem(profile, cluster, batch_size=batch, sequence_length=tokens))


def gigabytes(model: str, batch: int, device: str, tokens: int, reading: Reading) -> tuple[Number, int]:
    """Return the GB of the most blocks that fit on a device, and their number; of a cluster the mean, OOM if no
    partition fits.
    """
    if device.startswith("Confidant"):
        cluster = load_cluster(device.lower().replace(" #", "-"))
        costs = frozen_embedding(model, cluster, tokens, batch, reading)
        try:
            plan = plan_asynchronous(costs, searches=False, method=PAPER)
        except PlanError:
            return OOM, 0
        more = _states_of_versions(costs, plan, reading) if reading.is_each else 0.0
        return (fmean(stages_bytes(costs, plan)) + more) / GB, costs.profile.num_layers
    phone = load_device(model_of(device))
    costs = frozen_embedding(model, Cluster(name=device, devices=(phone,)), tokens, batch, reading)
    fitting = [
        nbytes
        for stop in range(1, costs.profile.num_layers + 1)
        if (nbytes := costs.need(0, 0, 0, stop, num_stages=1).total_bytes) <= phone.memory_bytes
    ]
    return max(fitting, default=0) / GB, len(fitting)


def _states_of_versions(costs: Equation3, plan: Plan, reading: Reading) -> float:
    """Return the mean bytes of a stage's gradients and optimizer states, for each version besides the newest."""
    behind = range(len(plan.stages) - 1, -1, -1)
    trained = [
        sum(layer.trainable_bytes for layer in costs.profile.layers[stage.ranks[0]][stage.start : stage.stop])
        for stage in plan.stages
    ]
    return (1 + reading.state) * fmean(versions * nbytes for versions, nbytes in zip(behind, trained, strict=True))


def table6(item: Item) -> Result:
    """Predict the memory of single devices and of Confidant with one sequence length, which is fitted to one cell of
    GPT2-Medium.  Further columns are for the other READINGS.
    """
    lengths, paper = read_constants(PAPER, dict[str, int], "table6"), item.printed
    rows: dict[str, Row] = {}
    for name, reading in READINGS.items():
        tokens = lengths[reading.tokens]
        needs = {labels[:3]: gigabytes(labels[0], int(labels[1]), labels[2], tokens, reading) for labels in paper}
        comparisons = item.compare(partial(_memory_or_blocks, needs))
        off = [
            (cell.labels, abs(cell.deviation))
            for cell in comparisons
            if cell.deviation is not None and cell.kind != "fitted"
        ]
        medians = [
            median(each for labels, each in off if group in labels)
            for group in ("BERT-Base", "GPT2-Medium", "Confidant #3", "Confidant #4")
        ]
        rows[name] = (name, tokens, *medians, sum(cell.ours == OOM for cell in comparisons))
    keys = dict.fromkeys(labels[:2] for labels in paper)
    drops, printed_drops = (
        [100 * (1 - four / three) for three, four in means if isinstance(three, float) and isinstance(four, float)]
        for means in (
            [[needs[*key, f"Confidant #{count}"][0] for count in (3, 4)] for key in keys],
            [[paper[*key, f"Confidant #{count}", "memory"] for count in (3, 4)] for key in keys],
        )
    )
    unfitted = [cell.labels[0] for cell in comparisons if cell.kind != "fitted"]
    part, total = (paper["GPT2-Medium", "2", device, "memory"] for device in ("Mi 10 Lite", "Redmi K50"))
    sgd, each, adamw = rows.values()
    return item.result(
        comparisons,
        tables={"readings": list(rows.values())},
        least=min(drops),
        most=max(drops),
        printed_least=min(printed_drops),
        printed_most=max(printed_drops),
        bert_cells=unfitted.count("BERT-Base"),
        gpt2_cells=unfitted.count("GPT2-Medium"),
        tokens=tokens,
        sgd=sgd,
        each=each,
        adamw=adamw,
        part=part,
        whole=total,
    )


def _memory_or_blocks(needs: dict[tuple[str, ...], tuple[Number, int]], *labels: str) -> Number:
    return needs[labels[:3]][labels[3] == "blocks"]


@each_cell
def table3(model: str, quantity: str) -> Number:
    """Return a size of our model, or the name of the paper's dataset if it can be read."""
    if quantity == "dataset":
        name = printed(PAPER, "table3")[model, quantity]
        return name if DATASETS[name] in TASKS else None
    fields = {"blocks": "num_layers", "heads": "heads", "embedding": "hidden"}
    return float(getattr(description(model), fields[quantity]))


def table1(item: Item) -> Result:
    """Predict each model's memory with one sequence length, which is fitted to BERT-Base."""
    constants, paper, table6 = load_constants(), item.printed, printed(PAPER, "table6")
    models = tuple(dict.fromkeys(model for model, _ in paper))
    printed_gb = {model: paper[model, "memory"] for model in models}

    def ours(model: str, quantity: str) -> Number:
        return (
            description(model).params / 1e6
            if quantity == "parameters"
            else model_gb(model, constants.tokens, constants.batch)
        )

    comparisons = [
        *item.compare(ours),
        *(
            item.cell(
                (model, "memory, Eq. 1 and 2"),
                printed_gb[model],
                equation_gb(model, constants.tokens, constants.batch),
                "GB",
            )
            for model in models
        ),
    ]

    def deviations(varied: Constants) -> Sequence[float]:
        return [100 * (model_gb(model, round(varied.tokens), varied.batch) / printed_gb[model] - 1) for model in models]

    lengths = sorted({*LENGTHS, constants.tokens})
    by_length = [
        (
            model,
            tokens,
            model_gb(model, tokens, constants.batch),
            equation_gb(model, tokens, constants.batch),
            printed_gb[model],
        )
        for model in models
        for tokens in lengths
    ]
    lengths_of = {
        model: [
            tokens_within(model, printed_gb[model], constants.batch, optimizer=optimizer) for optimizer in (True, False)
        ]
        for model in models
    }
    states = [
        (model, *(state_gb(model, each) for each in (4, 8, 16)), printed_gb[model], *lengths_of[model])
        for model in models
    ]
    small, large = table6["BERT-Base", "4", "Redmi K50", "memory"], table6["BERT-Base", "8", "Redmi K50", "memory"]
    fixed = 2 * small - large
    bert = description("BERT-Base")
    frozen = FP32_BYTES * (2 * bert.params - bert.embedding_params) / GB
    blocks = 20 / 24 * printed_gb["GPT2-Medium"]
    phone = table6["GPT2-Medium", "8", "Redmi K50", "memory"]
    by_equations = [
        equation_gb(model, constants.tokens, constants.batch) / model_gb(model, constants.tokens, constants.batch)
        for model in models
    ]
    trivial = [100 * (state_gb(model, 16) / printed_gb[model] - 1) for model in models]
    return item.result(
        comparisons,
        tables={
            "lengths": by_length,
            "states": states,
            "sensitivity": item.sensitivity(constants, deviations, trivial),
        },
        tokens=constants.tokens,
        adamw=", ".join(str(with_state) for with_state, _ in lengths_of.values()),
        sgd=", ".join(str(without) for _, without in lengths_of.values()),
        llama=state_gb("LLaMA-7B", 16),
        printed=printed_gb["LLaMA-7B"],
        phone=phone,
        blocks=blocks,
        fixed=fixed,
        adam=state_gb("BERT-Base", 16),
        frozen=frozen,
        frozen_adam=FP32_BYTES * (4 * bert.params - 3 * bert.embedding_params) / GB,
        phi=state_gb("Phi-2", 16),
        low=100 * (1 - max(by_equations)),
        high=100 * (1 - min(by_equations)),
    )
