"""Plans and runs of single-shot inference in words for the terminal: who holds which heads, columns and tokens; latencies."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from workbench.cli.output import print_table
from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan
from workbench.core.plan import Plan
from workbench.core.report import Report

PARADIGMS = {
    "hybrid": "hybrid model parallelism",
    "tensor": "tensor parallelism",
    "sequence": "sequence parallelism",
    "pipeline": "a pipeline of layers",
}


def show_inference_plan(plan: Plan, chosen: InferencePlan, cluster: Cluster) -> None:
    """Print what each device holds and computes, and what the planner expects of it."""
    rows = []
    for position, rank in enumerate(chosen.ranks):
        stage = plan.stage_of(rank)
        share = None if stage is None else next(share for share in plan.stages[stage].shares if share.rank == rank)
        layers = "-" if stage is None else f"{plan.stages[stage].start}-{plan.stages[stage].stop - 1}"
        parts = ("-",) * 3 if share is None else (share.heads, share.columns, share.tokens)
        rows.append((position, cluster.devices[rank].name, layers, *parts))
    print_table(
        f"Plan of {chosen.method}: {plan_words(chosen)}",
        ("position", "device", "layers", "heads", "columns", f"tokens of {chosen.length}"),
        rows,
        right=(0, 3, 4, 5),
    )
    if chosen.predicted_s:
        print(f"Predicted latency of a sequence of {chosen.length} tokens (planner, simulated): {chosen.predicted_s * 1e3:.1f} ms")
    for note in plan.notes:
        print(note)


def plan_words(chosen: InferencePlan) -> str:
    """Return how a plan splits a sequence: paradigm, schemes, ring."""
    words = [PARADIGMS[chosen.paradigm] if chosen.num_positions > 1 else "one device alone"]
    if chosen.schemes and chosen.num_positions > 1:
        first, second = chosen.configuration
        words.append(f"{first} layers of scheme 1 and {second} of scheme 2")
    if chosen.overlap and chosen.num_positions > 1:
        tiles = f" in tiles of at most {chosen.tile_tokens} tokens" if chosen.tile_tokens else ""
        words.append(f"overlapped{tiles}{', both ways round' if chosen.both_ways else ''}")
    return ", ".join(words)


def inference_lines(report: Report, chosen: InferencePlan) -> list[str]:
    """Return what a run did: the plan, latencies predicted and measured, the answers' error."""
    names, mark = [report.cluster.devices[rank].name for rank in chosen.ranks], report.mark
    lines = [f"Plan        {plan_words(chosen)}"]
    shares = (("heads", chosen.units), ("columns", chosen.columns), ("tokens", _tokens(chosen)), ("layers", chosen.layers))
    parts = [f"{name} {'-'.join(map(str, numbers))}" for name, numbers in shares if numbers]
    lines.append(f"            {', '.join(names)}{': ' if parts else ''}{', '.join(parts)}")
    predicted = [step.predicted_s for step in report.steps if step.predicted_s is not None]
    measured = [step.measured_s for step in report.steps if step.measured_s is not None]
    words = [f"{median(predicted) * 1e3:.1f} ms predicted (simulated)"] if predicted else []
    words += [f"{median(measured) * 1e3:.1f} ms{mark} measured ({report.label})"] if measured else []
    if words:
        lines.append(f"Latency     {', '.join(words)}, median of {len(report.steps)} requests")
    found = report.metrics
    if measured:
        times = ", ".join(f"{name} {found[f'latency {name} s'] * 1e3:.1f} ms{mark}" for name in ("mean", "p50", "p95", "p99"))
        lines.append(f"            {times}; {found['requests per s']:.3g}{mark} requests per s")
    if "first token s" in found:
        further = f", every further one {found['further token s'] * 1e3:.1f} ms{mark}" if "further token s" in found else ""
        lines.append(f"Text        first token after {found['first token s'] * 1e3:.1f} ms{mark}{further}")
    if "largest error" in found:
        lines.append(f"Checked     answers differ from the local model's by at most {found['largest error']:.1e} of the largest number")
    if "texts that differ" in found:
        lines.append(f"Checked     {found['texts that differ']:.0f} of the compared texts differ from the local model's")
    return lines


def _tokens(chosen: InferencePlan) -> Sequence[int]:
    return chosen.tokens(chosen.length) if chosen.shares and chosen.length else ()
