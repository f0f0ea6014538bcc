"""What stands behind Table V: every method's plan, and the same plans under this workbench's schedules (Galaxy+, section IV-B)."""

from __future__ import annotations

from dataclasses import replace

from workbench.planners.galaxy_plus import stack_lengths
from workbench.reproduce.galaxy_plus.latency import sequence_s
from workbench.reproduce.galaxy_plus.systems import BASELINES, GALAXY, MEGATRON, OURS, run_system
from workbench.reproduce.galaxy_plus.testbed import ENVIRONMENTS, TABLE_V, Constants, cluster, profile
from workbench.reproduce.result import OOM, Number, Table


def plans(constants: Constants) -> Table:
    """Return every method's partition, devices and seconds, or what is missing."""
    rows: list[tuple[Number, ...]] = []
    for environment in ENVIRONMENTS:
        names = [device.name for device in cluster(constants, environment).devices]
        for model in TABLE_V:
            for system in (OURS, *BASELINES[::-1]):
                made = run_system(constants, model, environment, system)
                if made.plan is None:
                    rows.append((model, environment, system, OOM, made.reason, None))
                    continue
                plan = made.plan
                shown = ", ".join(names[rank] for rank in plan.ranks)
                parts = f"layers {plan.layers}" if plan.layers else f"heads {plan.units}" if plan.units else "all heads"
                rows.append((model, environment, system, parts, shown, made.seconds))
    return Table(
        title="Plans, and seconds of a sequence",
        columns=("model", "environment", "method", "partition", "devices, or what is missing", "seconds (simulated)"),
        rows=tuple(rows),
        note="Seconds rest on the catalogue's speeds; only their ratios were compared with the paper.",
    )


def scheduled(constants: Constants) -> Table:
    """The same plans under this workbench's schedules: no waiting between blocks, one way round the ring and both ways."""
    rows: list[tuple[Number, ...]] = []
    for environment in ENVIRONMENTS:
        for model in TABLE_V:
            costs = profile(constants, model, environment)
            lengths = stack_lengths(costs, constants.length(model), constants.decoder_tokens)
            row: list[Number] = [model, environment]
            for system in (OURS, GALAXY, MEGATRON):
                made = run_system(constants, model, environment, system)
                on = cluster(constants, environment, collectives=system == MEGATRON)
                row.append(OOM if made.seconds is None else made.seconds)
                row.append(OOM if made.plan is None else sequence_s(made.plan, costs, on, lengths))
                if system == OURS:
                    row.append(OOM if made.plan is None else sequence_s(replace(made.plan, both_ways=True), costs, on, lengths))
            rows.append(tuple(row))
    return Table(
        title="As this workbench schedules it: seconds of a sequence",
        columns=(
            "model",
            "environment",
            "Galaxy+ as printed",
            "Galaxy+ scheduled",
            "both ways round",
            "Galaxy as printed",
            "Galaxy scheduled",
            "M-LM as printed",
            "M-LM scheduled",
        ),
        rows=tuple(rows),
        note="Here a message takes its link's time and nothing of the processor's.  Galaxy gains most: a tile goes through both products of"
        " its feed-forward block at once, so that both rings run side by side, and scheme 2 saves less than the paper tells.",
    )
