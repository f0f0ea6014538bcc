"""Settings that have no effect on a job are noted or refused, in every method."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clusters import cluster_of
from tests.plans import inference_plan, staged_plan
from workbench.core import Cluster, Job, Plan, Processor
from workbench.core.effects import Situation, effects_of, idle_settings
from workbench.core.errors import ConfigError
from workbench.core.methods import registered
from workbench.methods import load_method

ASYNCHRONOUS = {"schedule": "asynchronous_1f1b"}
TEXT, WORDS, PICTURES = (
    SimpleNamespace(task=SimpleNamespace(kind=kind), facts=SimpleNamespace(vocabulary_size=size), job=None)
    for kind, size in (("classification", 100), ("text_generation", 100), ("classification", 0))
)


def devices(count: int, processors: int = 0) -> Cluster:
    own = tuple(Processor(name=f"p{number}", flops_per_s=1e9) for number in range(processors))
    return cluster_of(count, bytes_per_s=1e8, processors=own)


def staged(*ranks: int, micro_batches: int = 4) -> Plan:
    return staged_plan(*((1, {rank: 4}) for rank in ranks), micro_batches=micro_batches)


def ring(count: int) -> Plan:
    each: Any = (1,) * count
    parts = {"units": each, "columns": each, "shares": each, "schemes": (1,)} if count > 1 else {"layers": each}
    paradigm = "hybrid" if count > 1 else "pipeline"
    inference = inference_plan(paradigm, method="galaxy_plus", length=12, **parts)
    return replace(staged(0, micro_batches=1), inference=inference)


# method, the options, the idle one's name and what it needs ('' if it has an effect), the rest of the situation
CASES: list[tuple[str, dict[str, Any], str, str, dict[str, Any]]] = [
    ("pac_plus", {"paradigm": "data_parallel"}, "paradigm", "two or more devices", {"cluster": devices(1)}),
    ("pac_plus", {"paradigm": "standalone"}, "paradigm", "", {"cluster": devices(1)}),
    ("pac_plus", {"schedule": "gpipe"}, "schedule", "several stages", {"plan": staged(0)}),
    ("pac_plus", {"schedule": "gpipe"}, "schedule", "with micro-batches", {"plan": staged(0, 1, micro_batches=1)}),
    ("pac_plus", {"schedule": "gpipe"}, "schedule", "", {"plan": staged(0, 1)}),
    (
        "pac_plus",
        {"schedule": "gpipe", "paradigm": "standalone"},
        "schedule",
        "refused paradigm = hybrid or pipeline_parallel",
        {},
    ),
    ("pac_plus", {"dropout": 0.2}, "dropout", "a head of its own", {"prepared": WORDS}),
    ("pac_plus", {"dropout": 0.2}, "dropout", "", {"prepared": TEXT}),
    ("pac_plus", {"cache_dtype": "int8"}, "cache_dtype", "more than one epoch", {"epochs": 1}),
    ("pac_plus", {"cache_dtype": "int8"}, "cache_dtype", "", {"epochs": 2}),
    ("pac_plus", {"order": "all", "paradigm": "data_parallel"}, "order", "paradigm = hybrid", {}),
    ("pac_plus", {"order": "all"}, "order", "two or more devices", {"cluster": devices(1)}),
    ("pac_plus", {"order": "all"}, "order", "", {}),
    ("pac_plus", {"objective": "paper", "paradigm": "standalone"}, "objective", "paradigm = hybrid", {}),
    ("fine_tuning", {"technique": "full", "lora_rank": 4}, "lora_rank", "technique = lora", {}),
    (
        "fine_tuning",
        {"technique": "full", "lora_rank": 8},
        "lora_rank",
        "technique = lora",
        {},
    ),  # given, although it is the default
    ("fine_tuning", {"lora_rank": 4}, "lora_rank", "", {}),
    ("fine_tuning", {"technique": "adapters", "lora_dropout": 0.1}, "lora_dropout", "technique = lora", {}),
    ("fine_tuning", {"bottleneck": 16}, "bottleneck", "technique = adapters or serial", {}),
    ("fine_tuning", {"bottleneck": 16, "technique": "serial"}, "bottleneck", "", {}),
    ("fine_tuning", {"reduction": 4, "technique": "serial"}, "reduction", "technique = parallel", {}),
    ("fine_tuning", {"reduction": 4, "technique": "parallel"}, "reduction", "", {}),
    ("fine_tuning", {"activations": "recompute"}, "activations", "", {}),
    (
        "fine_tuning",
        {"activations": "recompute", "technique": "parallel"},
        "activations",
        "refused technique = full or lora or adapters or serial",
        {},
    ),
    ("fine_tuning", {"dropout": 0.2}, "dropout", "a head of its own", {"prepared": WORDS}),
    (
        "fine_tuning",
        {"schedule": "asynchronous_1f1b", "paradigm": "data_parallel"},
        "schedule",
        "refused paradigm = hybrid",
        {},
    ),
    *(
        ("fine_tuning", {name: value}, name, "schedule = asynchronous_1f1b", {})
        for name, value in {"window": 4, "drain_every": 4, "versions": "vertical_sync"}.items()
    ),
    ("fine_tuning", ASYNCHRONOUS | {"window": 4}, "window", "", {}),
    ("fine_tuning", ASYNCHRONOUS | {"window": 4, "drain_every": 2}, "window", "drain_every = 0", {}),
    ("fine_tuning", ASYNCHRONOUS | {"drain_every": 2}, "drain_every", "", {}),
    ("fine_tuning", ASYNCHRONOUS | {"versions": "vertical_sync"}, "versions", "several stages", {"plan": staged(0)}),
    ("fine_tuning", ASYNCHRONOUS | {"versions": "vertical_sync"}, "versions", "", {"plan": staged(0, 1)}),
    ("confidant", {"split": "heads"}, "split", "refused a device with two processors", {}),
    ("confidant", {"split": "none"}, "split", "", {}),
    ("confidant", {"split": "heads"}, "split", "", {"cluster": devices(2, 2)}),
    ("confidant", {"heads": "optimal"}, "heads", "refused a split over a device with two processors", {}),
    ("confidant", {"heads": "optimal", "split": "none"}, "heads", "refused a split", {"cluster": devices(2, 2)}),
    ("confidant", {"heads": "optimal"}, "heads", "", {"cluster": devices(2, 2)}),
    ("ringada", {"technique": "parallel", "bottleneck": 16}, "bottleneck", "technique = serial", {}),
    ("ringada", {"reduction": 4}, "reduction", "technique = parallel", {}),
    ("ringada", {"data": "dirichlet:0.5"}, "data", "two or more devices", {"cluster": devices(1)}),
    *(
        ("ringada", {"federated": True, name: value}, name, "federated = False", {})
        for name, value in {
            "unfreezing": "rounds",
            "unfreeze_every": 2,
            "depth": 2,
            "patience": 3,
            "threshold": 0.1,
            "in_flight": 2,
            "replan": False,
        }.items()
    ),
    ("ringada", {"federated": True, "cache": True}, "cache", "refused federated = False", {}),
    *(
        (
            "ringada",
            {"unfreezing": "all", name: 2},
            name,
            "unfreezing = steps or rounds or plateau or gradient_norm",
            {},
        )
        for name in ("unfreeze_every", "depth")
    ),
    ("ringada", {"patience": 3}, "patience", "unfreezing = plateau or gradient_norm", {}),
    ("ringada", {"threshold": 0.1}, "threshold", "unfreezing = plateau or gradient_norm", {}),
    ("ringada", {"threshold": 0.1, "unfreezing": "plateau"}, "threshold", "", {}),
    ("ringada", {"in_flight": 2}, "in_flight", "", {}),
    ("ringada", {"activations": "disk"}, "activations", "", {}),
    (
        "ringada",
        {"activations": "disk", "technique": "parallel"},
        "activations",
        "refused technique = serial",
        {},
    ),
    ("ringada", {"cache": True}, "cache", "more than one epoch", {"epochs": 1}),
    ("ringada", {"cache": True}, "cache", "", {"epochs": 2}),
    ("ringada", {"replan": False, "unfreezing": "plateau"}, "replan", "unfreezing = steps or rounds", {}),
    ("ringada", {"replan": False, "unfreezing": "all"}, "replan", "unfreezing = steps or rounds", {}),
    ("ringada", {"replan": False, "unfreezing": "all", "cache": True}, "replan", "", {}),
    ("p_rge", {"technique": "vera", "alpha": 8.0}, "alpha", "technique = lora_fa or lora or dora", {}),
    ("p_rge", {"alpha": 8.0}, "alpha", "", {}),
    (
        "p_rge",
        {"estimator": "jvp", "epsilon": 0.1},
        "epsilon",
        "estimator = two_point or one_sided or low_rank or low_rank_momentum",
        {},
    ),
    ("p_rge", {"direction_rank": 3}, "direction_rank", "estimator = low_rank or low_rank_momentum", {}),
    ("p_rge", {"subspace_steps": 3}, "subspace_steps", "estimator = low_rank or low_rank_momentum", {}),
    ("p_rge", {"estimator": "low_rank", "subspace_steps": 3}, "subspace_steps", "", {}),
    ("p_rge", {"momentum": 0.5}, "momentum", "estimator = low_rank_momentum", {}),
    ("p_rge", {"after_loss": "repeat"}, "after_loss", "two or more devices", {"cluster": devices(1)}),
    ("galaxy_plus", {"system": "megatron_lm"}, "system", "two or more devices", {"cluster": devices(1)}),
    ("galaxy_plus", {"system": "galaxy", "planner": "algorithm_1"}, "planner", "refused system = galaxy_plus", {}),
    ("galaxy_plus", {"system": "edgeshard", "scheme": 1}, "scheme", "refused system = galaxy_plus", {}),
    ("galaxy_plus", {"planner": "algorithm_1", "scheme": 2}, "scheme", "refused planner = own", {}),
    ("galaxy_plus", {"planner": "algorithm_1", "scheme": 1}, "scheme", "", {}),
    *(
        ("galaxy_plus", {"system": "local", name: value}, name, "system = galaxy_plus or galaxy", {})
        for name, value in {"overlap": True, "both_ways": True, "tile_tokens": 2}.items()
    ),
    ("galaxy_plus", {"overlap": True}, "overlap", "two or more devices", {"plan": ring(1)}),
    ("galaxy_plus", {"overlap": False}, "overlap", "", {"plan": ring(2)}),
    ("galaxy_plus", {"both_ways": True}, "both_ways", "three or more devices", {"plan": ring(2)}),
    ("galaxy_plus", {"both_ways": True}, "both_ways", "", {"plan": ring(3), "cluster": devices(3)}),
    (
        "galaxy_plus",
        {"both_ways": True, "overlap": False},
        "both_ways",
        "overlap = true",
        {"plan": ring(3), "cluster": devices(3)},
    ),
    ("galaxy_plus", {"tile_tokens": 2}, "tile_tokens", "two or more devices", {"plan": ring(1)}),
    ("galaxy_plus", {"tile_tokens": 100}, "tile_tokens", "below a device's tokens", {"plan": ring(2)}),
    ("galaxy_plus", {"tile_tokens": 2}, "tile_tokens", "", {"plan": ring(2)}),
    *(
        ("galaxy_plus", {}, name, "it needs a method that trains", {name: value})
        for name, value in {
            "epochs": 2,
            "seed": 1,
            "batch_size": 16,
            "learning_rate": 0.1,
            "train_samples": 4,
            "validation_samples": 4,
        }.items()
    ),
    *(
        (method, {}, name, "it needs a method that backpropagates", {name: value})
        for method in ("galaxy_plus", "p_rge")
        for name, value in {
            "weight_decay": 0.5,
            "warmup_fraction": 0.5,
            "snapshot_every": 3,
            "snapshot_to": "neighbour",
        }.items()
    ),
    ("p_rge", {"steps": 3}, "epochs", "steps left out", {"epochs": 2}),
    ("p_rge", {}, "epochs", "", {"epochs": 2}),
    ("p_rge", {}, "micro_batches", "cuts mini-batches", {"micro_batches": 2, "plan": staged(0, micro_batches=1)}),
    ("p_rge", {}, "micro_batches", "", {"micro_batches": 1, "plan": staged(0, micro_batches=1)}),
    ("fine_tuning", {}, "micro_batches", "", {"micro_batches": 2, "plan": staged(0, micro_batches=2)}),
    ("pac_plus", {}, "max_length", "reads text", {"max_length": 8, "prepared": PICTURES}),
]


@pytest.mark.parametrize(("method", "options", "name", "needed", "rest"), CASES)
def test_a_setting_without_effect_is_noted_or_refused(
    method: str, options: dict[str, Any], name: str, needed: str, rest: dict[str, Any]
) -> None:
    rest = {"cluster": devices(2)} | rest
    cluster, known = rest.pop("cluster"), {key: rest.pop(key) for key in ("prepared", "plan") if key in rest}
    model = "tiny-gpt2" if method == "p_rge" else "tiny-bert"
    job = Job(method=method, model=model, options=options, **rest)
    chosen = load_method(method)
    if needed.startswith("refused "):
        with pytest.raises(ConfigError) as refused:
            chosen.require_known(job, cluster)
        text = str(refused.value)
        assert f"The option {name} = " in text and needed.removeprefix("refused ") in text and "Leave it out" in text
        return
    if cluster.world_size > 1 or method != "confidant":
        chosen.require_known(job, cluster)
    notes = [
        idle.note for idle in idle_settings(Situation(job=job, cluster=cluster, options=chosen.known(job), **known))
    ]
    results = [note for note in notes if f" {name} = " in note]
    assert (len(results) == 1 and needed in results[0] and results[0].endswith(".")) if needed else not results, notes


@pytest.mark.parametrize("method", registered())
def test_every_declaration_is_in_the_table(method: str) -> None:
    """A new declaration needs its row above."""
    options = load_method(method).known(Job(method=method, model="tiny-gpt2" if method == "p_rge" else "tiny-bert"))
    rows = {
        name
        for row, _, name, needed, _ in CASES
        if needed and (row == method or (method == "confidant" and row == "fine_tuning"))
    }
    shared = {name for _, _, name, needed, _ in CASES if needed}
    assert set(effects_of(type(options))) <= rows | ({"paradigm", "schedule"} & shared)
    assert set(effects_of(Job)) <= shared
