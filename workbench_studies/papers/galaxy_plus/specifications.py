"""The paper's devices and environments next to the catalogue's (Galaxy+, Tables IV and VI)."""

from __future__ import annotations

from workbench.core.catalogue import load_cluster, load_device
from workbench_studies.papers.device_titles import title_number
from workbench_studies.papers.galaxy_plus.testbed import CLUSTERS, GB
from workbench_studies.papers.items import each_cell
from workbench_studies.papers.result import Number

MODELS = {
    "RPi-S": "rpi-4b-s",
    "RPi-M": "rpi-4b-m",
    "RPi-L": "rpi-4b-l",
    "Jetson Nano": "jetson-nano-h",
    "GTX 1080 Ti": "gtx-1080-ti",
}


@each_cell
def table4(what: str, quantity: str) -> Number:
    """Return the catalogue's number: of a device its clock or budget, of an environment its devices or bandwidth."""
    if quantity == "clock":
        return title_number(MODELS[what], quantity)
    if quantity == "memory budget":
        return load_device(MODELS[what]).memory_bytes / GB
    devices = load_cluster(CLUSTERS[what.removesuffix(" and B")]).devices
    if quantity == "bandwidth":
        return min(device.link.mbit_per_s for device in devices)
    return float(sum(device.model == MODELS[quantity] for device in devices))


table6 = table4
