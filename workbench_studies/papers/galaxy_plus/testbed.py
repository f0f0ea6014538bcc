"""The paper's testbeds and models from one documented set of constants (Galaxy+, section IV-A, Tables IV-VI)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Device, Link
from workbench.methods.galaxy_plus.costs import analytic_from, end_bytes, stack_sizes
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.planners import Problem
from workbench.profiler.descriptions import ModelDescription, describe
from workbench_studies.papers.result import read_constants

PAPER = "galaxy_plus"
GB = 1e9  # Table V's: with 2^30 bytes ViT-Huge would have two more layers of scheme 2 in Env. A
GIB = 2**30  # Table I's: GPT2-L's 774 million fp32 parameters are 2.88 of these and 3.10 of the others
ENVIRONMENTS = ("Env. A", "Env. B")
FIG_16 = "Fig. 16"  # two RPi-L and one RPi-M (section IV-F)
CLUSTERS = {"Env. A": "galaxy-env-a", "Env. B": "galaxy-env-b", "Env. C": "galaxy-env-c", "Env. D": "galaxy-env-d"}

# The paper counts 16 heads in OPT-L, the published model has 32.  T5-L's 'hidden size 2048' is twice the width of its
# 16 heads;
# 740 million parameters correspond to 1024.
MODELS: dict[str, ModelDescription] = {
    "DistilBert": describe("DistilBERT"),
    "Bert-L": describe("BERT-Large"),
    "ViT-Huge": describe("ViT-Huge"),
    "T5-L": describe("T5-Large"),
    "GPT2-L": describe("GPT2-Large"),
    "OPT-L": replace(describe("OPT-1.3B"), heads=16, head_dim=128),
    "OPT-XL": describe("OPT-2.7B"),
}
TABLE_V = ("DistilBert", "Bert-L", "ViT-Huge", "T5-L", "GPT2-L", "OPT-L")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """constants.toml, which states the source of each value."""

    speed_factor: float
    pi_memory_bytes_per_s: float
    operation_s: float
    ring_efficiency: float
    handling_s_per_byte: float
    message_s: float
    embedding_share: float
    pi_weight_bytes_per_s: float
    a100_weight_bytes_per_s: float
    a100_layer_s: float
    nano_link_efficiency: float
    nano_speed_factor: float
    nano_operation_s: float
    gtx_operation_s: float
    gtx_message_s: float
    nano_memory_bytes_per_s: float
    gtx_memory_bytes_per_s: float
    tokens: int
    image_tokens: int
    decoder_tokens: int
    bandwidth_mbit_per_s: float
    scaling_bandwidth_mbit_per_s: float
    weak_tokens: int
    strong_tokens: int

    def length(self, model: str) -> int:
        """Return the tokens of one sequence, or picture."""
        return self.image_tokens if model.startswith("ViT") else self.tokens


load_constants = partial(read_constants, PAPER, Constants)


def as_printed(
    profile: InferenceProfile, cluster: Cluster, *, embedding_share: float = 0.0
) -> tuple[InferenceProfile, Cluster]:
    """Return a profile and a cluster that count memory as Eq. 8-9 do: only the weights of attention and feed-forward
    networks.

    A device's need must be below its memory.  embedding_share: the share of embedding and head that is on every device
    in addition.
    """
    stacks = tuple(replace(shape, layer_bytes=0) for shape in profile.stacks)
    counted = replace(
        profile, stacks=stacks, first_bytes=0, last_bytes=0, working_bytes_per_token=0, full_everywhere=True
    )
    less = 1 + round(embedding_share * profile.ends_bytes)
    return counted, cluster.with_each(lambda device: replace(device, memory_bytes=device.memory_bytes - less))


def problem(
    constants: Constants, profile: InferenceProfile, cluster: Cluster, length: int
) -> Problem[InferenceProfile]:
    """Return the planning problem of the paper's configurations: Eq. 8, and a share of the embedding on every
    device.
    """
    counted = as_printed(profile, cluster, embedding_share=constants.embedding_share)
    return Problem(*counted, sequence_length=length, decoder_length=constants.decoder_tokens)


@lru_cache(maxsize=512)
def cluster(
    constants: Constants,
    environment: str,
    mbit_per_s: float | None = None,
    *,
    count: int | None = None,
    collectives: bool = False,
) -> Cluster:
    """Return an environment with these constants.

    mbit_per_s: nominal, by default the environment's own.  count: number of copies of its first device.  collectives:
    links as used by a library's collectives, which overlap nothing, so that handling a byte adds to its time.
    """
    catalogue_cluster = described(environment)
    devices = tuple(_device(constants, device, mbit_per_s) for device in catalogue_cluster.devices)
    if collectives:
        handled = handling(constants, Cluster(name=environment, devices=devices))
        devices = tuple(
            replace(device, link=replace(device.link, bytes_per_s=1 / (1 / device.link.bytes_per_s + byte_s)))
            for device, byte_s in zip(devices, handled, strict=True)
        )
    if count is not None:
        devices = tuple(
            replace(devices[0], name=f"{devices[0].model.removeprefix('rpi-4b-')}-{number}") for number in range(count)
        )
    return Cluster(name=environment, devices=devices, description=catalogue_cluster.description)


@lru_cache(maxsize=8)
def described(environment: str) -> Cluster:
    """Return an environment from the catalogue; cached, because sensitivities request it often."""
    if environment == FIG_16:
        devices_by_name = {device.name: device for device in load_cluster(CLUSTERS["Env. B"]).devices}
        return Cluster(name=FIG_16, devices=tuple(devices_by_name[name] for name in ("rpi-l-0", "rpi-l-1", "rpi-m")))
    return load_cluster(CLUSTERS[environment])


def _device(constants: Constants, device: Device, mbit_per_s: float | None) -> Device:
    nominal = device.link.bytes_per_s if mbit_per_s is None else mbit_per_s * MEGABIT_BYTES
    if device.model.startswith("rpi"):
        speed, efficiency = constants.speed_factor, constants.ring_efficiency
    elif device.model.startswith("jetson"):
        speed, efficiency = constants.nano_speed_factor, constants.nano_link_efficiency
    else:  # otherwise: the catalogue's PCIe rate is the achieved one
        speed, efficiency = 1.0, 1.0
    # A path's latency is the sum of both ends': so every message costs message_s more, whatever sends it.
    message_s = constants.gtx_message_s if device.model.startswith("gtx") else constants.message_s
    link = Link(bytes_per_s=nominal * efficiency, latency_s=device.link.latency_s + message_s / 2)
    return replace(device, flops_per_s=device.flops_per_s * speed, link=link)


@lru_cache(maxsize=512)
def profile(
    constants: Constants, model: str, environment: str, count: int | None = None, num_layers: int = 0
) -> InferenceProfile:
    """Return a model's analytic profile on an environment.  count: see cluster.  num_layers: layers of a single stack
    instead of the model's.
    """
    on = cluster(constants, environment, count=count)
    described = MODELS[model]
    stacks = stack_sizes(replace(described, num_layers=num_layers) if num_layers else described)
    first, last = end_bytes(described)
    rows = {}
    for device in on.devices:
        kind = (device.model, device.flops_per_s)
        if kind not in rows:
            operation, memory = _overheads(constants, device)
            alone = Cluster(name="one", devices=(device,))
            device_profile = analytic_from(
                model,
                stacks,
                alone,
                first_bytes=first,
                last_bytes=last,
                operation_s=operation,
                memory_bytes_per_s=memory,
                weight_bytes_per_s=None,  # it reads whole sentences
            )
            rows[kind] = device_profile
    costs = tuple(rows[device.model, device.flops_per_s].costs[0] for device in on.devices)
    return replace(next(iter(rows.values())), costs=costs)


def _overheads(constants: Constants, device: Device) -> tuple[float, float]:
    """Return a device's seconds for each operation, and its bytes per second of activations."""
    if device.model.startswith("jetson"):
        return constants.nano_operation_s, constants.nano_memory_bytes_per_s
    if device.model.startswith("gtx"):
        return constants.gtx_operation_s, constants.gtx_memory_bytes_per_s
    share = device.flops_per_s / (constants.speed_factor * 8.8e9)  # of an RPi-M
    return constants.operation_s / share, constants.pi_memory_bytes_per_s * share


def handling(constants: Constants, on: Cluster) -> tuple[float, ...]:
    """Return each device's processor seconds for a byte that it sends and receives, by its clock rate; 0 for a GPU's
    host.
    """
    return tuple(
        constants.handling_s_per_byte * 8.8e9 * constants.speed_factor / device.flops_per_s
        if device.model.startswith("rpi")
        else 0.0
        for device in on.devices
    )
