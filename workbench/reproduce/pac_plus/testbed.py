"""The paper's testbed from one documented set of constants: Jetson clusters, and profiles of its models (PAC+, section VI-A, Table IV)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial

from workbench.core.catalogue import MB, load_device
from workbench.core.cluster import Cluster, Device, Link
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.profiler.analytic import Technique, TechniqueSizes, analytic_profile
from workbench.profiler.descriptions import ModelDescription, describe
from workbench.reproduce.result import read_constants

PAPER = "pac_plus"
MODELS = ("T5-Base", "BART-Large", "T5-Large")
FLOPS_PER_CORE_AND_CYCLE = 2
BITS_PER_BYTE = 8
GIB = 2**30  # the paper's GB: T5-Large's 737.7 million fp32 parameters are 2.75 of these (Table I) and 2.95 of the others
SPEED_KINDS = {"F": "", "B": "backward_factor", "SF": "side_factor", "SB": "side_factor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """data/papers/pac_plus/constants.toml, which states the source of each value."""

    achieved_share: float
    backward_factor: float
    side_factor: float
    operation_overhead_s: float
    step_overhead_s: float
    nano_bytes: float
    tx2_bytes: float
    optimizer_bytes_per_trainable_byte: float
    link_efficiency: float
    bandwidth_mbit_per_s: float
    latency_ms: float
    nano_mb_per_s: float
    tx2_mb_per_s: float
    sequence_length: int
    mini_batch: int
    micro_batches: int
    target_tokens: int
    reduction: int
    lora_rank: int
    lora_dropout: bool
    bottleneck: int
    adapters_per_layer: int
    adapter_norms: bool
    cores_and_mhz: tuple[tuple[str, int, int], ...]
    datasets: tuple[tuple[str, int, int], ...]

    @property
    def micro_batch_size(self) -> int:
        """Return the samples of a micro-batch."""
        return self.mini_batch // self.micro_batches

    def samples(self, task: str) -> int:
        """Return the training samples of a task."""
        return next(samples for name, samples, _ in self.datasets if name == task)

    def device(self, model: str, name: str) -> Device:
        """Return a Jetson of the catalogue with these constants."""
        cores, mhz = next((cores, mhz) for known, cores, mhz in self.cores_and_mhz if known == model)
        tx2 = "tx2" in model
        rate = self.bandwidth_mbit_per_s * 1e6 / BITS_PER_BYTE * self.link_efficiency
        return replace(
            load_device(model, name=name),
            flops_per_s=self.achieved_share * cores * FLOPS_PER_CORE_AND_CYCLE * mhz * 1e6,
            memory_bytes=round(self.tx2_bytes if tx2 else self.nano_bytes),
            link=Link(bytes_per_s=rate, latency_s=self.latency_ms / 1e3),
            storage_bytes_per_s=(self.tx2_mb_per_s if tx2 else self.nano_mb_per_s) * MB,
        )


load_constants = partial(read_constants, PAPER, Constants)


@lru_cache(maxsize=256)
def nanos(constants: Constants, count: int) -> Cluster:
    """Return `count` Jetson Nano-H; four are Env. A."""
    devices = tuple(constants.device("jetson-nano-h", f"nano-h-{rank}") for rank in range(count))
    return Cluster(name=f"{count} Nano-H", devices=devices)


@lru_cache(maxsize=256)
def environment_b(constants: Constants) -> Cluster:
    """Return Env. B: Nano-H, Nano-L, TX2-H, TX2-L."""
    models = ("jetson-nano-h", "jetson-nano-l", "jetson-tx2-h", "jetson-tx2-l")
    return Cluster(name="Env. B", devices=tuple(constants.device(model, model.removeprefix("jetson-")) for model in models))


def description(constants: Constants, model: str) -> ModelDescription:
    """Return a model with the decoder's target length of the constants."""
    return replace(describe(model), target_tokens=constants.target_tokens)


def technique_sizes(constants: Constants) -> TechniqueSizes:
    """Return the values that the paper's techniques add to a model."""
    return TechniqueSizes(**{field.name: getattr(constants, field.name) for field in fields(TechniqueSizes)})


def profile(constants: Constants, model: str | ModelDescription, technique: Technique, cluster: Cluster) -> Profile:
    """Return the analytic profile of a model on a cluster, with the constants' factors and overheads."""
    described = description(constants, model) if isinstance(model, str) else model
    rows = {device.name: _row(constants, described, technique, replace(device, name="one")) for device in cluster.devices}
    return Profile(
        model=described.name,
        method=technique,
        source="analytic",
        layers=tuple(rows[device.name] for device in cluster.devices),
        optimizer_bytes_per_trainable_byte=constants.optimizer_bytes_per_trainable_byte,
    )


@lru_cache(maxsize=512)
def _row(constants: Constants, model: ModelDescription, technique: Technique, device: Device) -> tuple[LayerProfile, ...]:
    made = analytic_profile(
        model,
        Cluster(name="one", devices=(device,)),
        technique=technique,
        batch_sizes=(1, constants.mini_batch),  # times are linear in the batch
        sequence_lengths=(constants.sequence_length,),
        sizes=technique_sizes(constants),
    )
    layers = made.layers[0]
    return tuple(replace(layer, times=_times(constants, layer, len(layers))) for layer in layers)


def _times(constants: Constants, layer: LayerProfile, num_layers: int) -> dict[str, Grid]:
    times = {}
    for kind, grid in layer.times.items():
        factor, overhead = 1.0, constants.operation_overhead_s
        if SPEED_KINDS.get(kind):
            factor = getattr(constants, SPEED_KINDS[kind])
        if kind == "STEP":
            overhead = constants.step_overhead_s / num_layers
        cells = tuple(tuple(factor * cell + overhead for cell in row) for row in grid.seconds)
        times[kind] = replace(grid, seconds=cells)
    return times
