"""Measure for `workbench devices` and print the results: devices, links, layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.cli.output import print_json, print_table, print_text, say
from workbench.core.cluster import Cluster
from workbench.core.files import require_writable
from workbench.core.heat import as_text, curve_of
from workbench.core.job import Fidelity, Job
from workbench.core.serial import read_toml, write_text
from workbench.methods.base import Event
from workbench.profiler.host import HostProfile, ProcessorRate
from workbench.runs.survey import (
    DeviceRates,
    LayerSurvey,
    alike,
    as_builtins,
    survey_devices,
    survey_layers,
    survey_links,
    survey_sustained,
)

KILO, MEGA, GIGA = 1e3, 1e6, 1e9


def measure_devices(cluster: Cluster, file: Path, *, as_json: bool) -> dict[str, Any]:
    """Measure this machine, or real devices, and return the results; print each device's FLOP/s, memory bandwidth
    and disk rates.

    file: the cluster's, which keeps the rates of real devices.
    """
    if not as_json:
        say(f"Measuring {cluster.in_words}")
    require_writable(file if cluster.is_real else None)
    host, devices = survey_devices(cluster)
    if cluster.is_real:
        rates = {
            device.name: {
                "gflops": round(device.flops_per_s / GIGA, 3),
                "storage_mb_per_s": round(device.storage_bytes_per_s / MEGA, 1),
            }
            | _if_known("storage_write_mb_per_s", device.storage_write_bytes_per_s, MEGA, 1)
            | _if_known("memory_gb_per_s", device.memory_bytes_per_s, GIGA, 3)
            | _described(device.processors)
            for device in devices
        }
        _keep_of_devices(file, rates)
    result = {"host": host, "devices": devices}
    for device in devices:
        if device.swaps:
            say(f"Warning: {device.swaps}")
    if as_json:
        return result

    def row(name: str, rates: HostProfile | DeviceRates, budget: str, source: str) -> tuple[str, ...]:
        return (
            name,
            f"{(rates.gemm_flops_per_s if isinstance(rates, HostProfile) else rates.flops_per_s) / GIGA:.1f}",
            _rate(rates.memory_bytes_per_s, GIGA, ".1f"),
            _rate(rates.storage_bytes_per_s, MEGA),
            _rate(rates.storage_write_bytes_per_s, MEGA),
            budget,
            source,
        )

    rows = []
    title = f"Devices of {cluster.name}, each as it measured itself"
    if host is not None:
        title = (
            f"One core of {host.cores}, {host.processor}; emulated devices of {cluster.name} have their share of it "
            "in all they do"
        )
        rows.append(row("this machine", host, "", "measured" if host.storage_is_cold else "measured, disk warm"))
    for device in devices:
        source = "emulated" if device.emulated else "catalogue" if device.memory_bytes_per_s is None else "measured"
        rows.append(row(device.name, device, f"{device.memory_bytes / MEGA:.0f}", source))
    columns = ("device", "GFLOP/s", "memory GB/s", "disk MB/s", "written", "budget MB", "source")
    print_table(title, columns, rows)
    machines = {"this machine": () if host is None else host.processors} | {
        device.name: device.processors for device in devices
    }
    processors = [
        (name, *processor[:2], f"{processor.flops_per_s / GIGA:.1f}")
        for name, machine_processors in machines.items()
        for processor in machine_processors
    ]
    if processors:
        print_table(
            "Processors found, with each library that they can use",
            ("device", "processor", "library", "GFLOP/s"),
            processors,
        )
    return result


def _rate(bytes_per_s: float | None, unit: float, form: str = ".0f") -> str:
    return "-" if bytes_per_s is None else format(bytes_per_s / unit, form)


def _if_known(key: str, bytes_per_s: float | None, unit: float, digits: int) -> dict[str, float]:
    return {key: round(bytes_per_s / unit, digits)} if bytes_per_s else {}


def measure_sustained(cluster: Cluster, file: Path, minutes: float, *, as_json: bool) -> dict[str, Any]:
    """Let real devices compute for some minutes and return each one's samples and curve; print how its speed changed.

    file: the cluster's, which keeps the curves.
    """
    if not as_json:
        say(f"{cluster.in_words} compute for {minutes:g} minutes")
    require_writable(file)
    samples = survey_sustained(cluster, 60 * minutes)
    curves = {
        name: curve_of([(sample.busy_s, sample.flops_per_s) for sample in device_samples])
        for name, device_samples in samples.items()
    }
    written = {name: [[level.heat_s, level.speed] for level in levels] for name, levels in curves.items()}
    _keep_of_devices(file, {name: {"sustained": curve} for name, curve in written.items()})
    result = {"sustained": [{"device": name, "curve": written[name], "samples": samples[name]} for name in samples]}
    if as_json:
        return result
    rows = []
    for name, device_samples in samples.items():
        first, last = device_samples[0], device_samples[-1]
        throttled = next((f"{sample.busy_s:.0f} s" for sample in device_samples if sample.is_throttled), "never")
        heat = "-" if last.temperature_c is None else f"{first.temperature_c or 0:.0f} to {last.temperature_c:.0f}"
        speeds = f"{first.flops_per_s / GIGA:.1f}", f"{last.flops_per_s / GIGA:.1f}"
        rows.append((name, *speeds, heat, throttled, as_text(curves[name])))
    columns = ("device", "GFLOP/s cold", "at the end", "°C", "says it throttles", "sustained")
    print_table(f"Sustained speed of {cluster.name} over {minutes:g} minutes", columns, rows)
    return result


def _described(processors: Sequence[ProcessorRate]) -> dict[str, Any]:
    """Return processors as a cluster's file describes them, each with its fastest library; nothing if there is only
    one.
    """
    best: dict[str, float] = {}
    for measured in processors:
        best[measured.processor] = max(best.get(measured.processor, 0.0), measured.flops_per_s)
    listed = [{"name": name, "gflops": round(rate / GIGA, 3)} for name, rate in best.items()]
    return {"processor": listed} if len(listed) > 1 else {}


def measure_links(cluster: Cluster, file: Path, fidelity: Fidelity = "auto", *, as_json: bool) -> dict[str, Any]:
    """Emulate the cluster or reach its real devices, measure every link and return it; print it next to what the
    cluster's file says.

    file: the cluster's, which keeps the links of real devices.
    """
    if not as_json:
        say(f"Measuring {cluster.world_size * (cluster.world_size - 1)} links of {cluster.in_words}")
    require_writable(file if cluster.is_real else None)
    survey = survey_links(cluster, fidelity=fidelity)
    fidelity_used, links = survey.fidelity, survey.rows
    label = f"real, {cluster.data}" if fidelity_used == "real" else f"emulated, {fidelity_used} links"
    if cluster.is_real:
        link_tables = [
            {
                "from": link.source,
                "to": link.destination,
                "bandwidth_mbit_per_s": round(link.measured.mbit_per_s, 1),
                "latency_ms": round(link.measured.latency_s * KILO, 3),
            }
            for link in links
        ]
        _keep(file, lambda tables: {"medium": survey.medium} | tables | {"medium": survey.medium, "link": link_tables})
    result = {
        "cluster": cluster.name,
        "label": label,
        "links": as_builtins(links),
        "at_once": survey.at_once,
        "medium": survey.medium,
    }
    if as_json:
        return result
    rows = [
        (
            f"{link.source} > {link.destination}",
            f"{link.described.mbit_per_s:g}",
            f"{round(link.measured.mbit_per_s, 1):g}",
            f"{link.described.latency_s * KILO:.2f}",
            f"{link.measured.latency_s * KILO:.2f}",
        )
        for link in links
    ]
    columns = ("link", "Mbit/s described", "Mbit/s measured", "ms described", "ms measured")
    print_table(f"Links of {cluster.name} ({label})", columns, rows)
    means = "they share a medium" if survey.medium == "wifi" else "each has a wire of its own"
    print_text(
        f"While {cluster.in_words} send at once, a message takes {survey.at_once:.2f} times as long as alone: "
        f"{means} (medium: {survey.medium}; described: {cluster.medium})."
    )
    return result


def _keep(file: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write what was measured into a cluster's file, which loses its comments."""
    write_text(file, _as_toml(changed(read_toml(file, "the kit"))))


def _keep_of_devices(file: Path, measured: Mapping[str, dict[str, Any]]) -> None:
    """Write what was measured of each device, by its name, into its table of a cluster's file."""
    _keep(file, lambda tables: tables | {"device": [table | measured[table["name"]] for table in tables["device"]]})


def _as_toml(tables: dict[str, Any], inside: str = "") -> str:
    """Return tables as TOML."""
    text = "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in tables.items() if not _is_nested(value)
    )
    for name, value in tables.items():
        for entry in (value if isinstance(value, list) else [value]) if _is_nested(value) else ():
            head = f"[[{inside}{name}]]" if isinstance(value, list) else f"[{inside}{name}]"
            text += f"\n{head}\n{_as_toml(entry, f'{inside}{name}.')}"
    return text


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(entry, dict) for entry in value))


def measure_layers(
    job: Job,
    cluster: Cluster,
    *,
    device: str | None,
    batch_sizes: tuple[int, ...],
    length: int,
    refresh: bool,
    as_json: bool,
) -> None:
    """Profile the job's model, or take a stored profile, and print every layer's times and bytes next to the analytic
    figures.
    """

    def tell(event: Event) -> None:
        if event.message and event.kind == "phase":
            say(event.message)

    survey = survey_layers(
        job, cluster, device=device, batch_sizes=batch_sizes, sequence_length=length, refresh=refresh, progress=tell
    )
    if as_json:
        print_json(survey)
    else:
        _print_layers(survey)


def _print_layers(survey: LayerSurvey) -> None:
    runs = alike(survey)
    batches = [row.batch for row in runs[0][2]]
    where = f"{survey.model} on {survey.device} ({survey.source}), {survey.sequence_length} tokens a sample"
    columns = ["layer", *(f"forward {batch}" for batch in batches), *(f"backward {batch}" for batch in batches)]
    columns += [f"GFLOP {batches[-1]}", "GFLOP/s"]
    table = [
        [
            _layers(first, last),
            *(f"{row.measured['forward_s'] * KILO:.2f}" for row in rows),
            *(f"{row.measured['backward_s'] * KILO:.2f}" for row in rows),
            f"{(rows[-1].analytic['forward_flops'] + rows[-1].analytic['backward_flops']) / GIGA:.3f}",
            f"{rows[-1].flops_per_s / GIGA:.1f}",
        ]
        for first, last, rows in runs
    ]
    print_table(f"{where}; milliseconds by batch size", columns, table)
    kinds = {
        "frozen": "frozen",
        "trainable": "trained",
        "activation": "activations",
        "tap": "cached",
        "context": "contexts",
    }
    sizes = []
    for first, last, rows in runs:
        both = [
            (rows[-1].measured[f"{kind}_bytes"] / KILO, rows[-1].analytic[f"{kind}_bytes"] / KILO) for kind in kinds
        ]
        sizes.append([_layers(first, last), *(f"{measured:,.0f} | {analytic:,.0f}" for measured, analytic in both)])
    title = f"kB for a batch of {batches[-1]}, as profiled | as computed from the model's sizes"
    print_table(title, ("layer", *kinds.values()), sizes)
    for note in survey.notes:
        print_text(note)


def _layers(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
