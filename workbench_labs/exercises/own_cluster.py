"""Lab 'A device is four numbers': the file of a student's own cluster, the one given until then, and its judge."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster, Device
from workbench.core.errors import ConfigError, WorkbenchError
from workbench_labs.course.verdict import Numbers, WrongAnswerError, comparison

GIVEN = """\
name = "garden"

[defaults]                  # what holds for every device, unless it says otherwise
model = "laptop-core"       # an entry of the catalogue
bandwidth_mbit_per_s = 200  # of a device's link
latency_ms = 0.5            # of that link, one way
memory_mb = 500

[[device]]
name = "oak"
host_share = 0.6            # 60 % of one core of this machine
gflops = 36                 # what it computes where it is simulated: 60 for a whole core here

[[device]]
name = "birch"
host_share = 0.3
gflops = 18

[[device]]
name = "moss"
host_share = 0.1
gflops = 6
memory_mb = 250
"""
"""The file of the cluster that the lab uses until a student has described another."""
CLOSE = 1e-6


def described(text: str) -> Cluster:
    """Return the cluster that the text of a cluster's file describes.  Raises ConfigError."""
    with TemporaryDirectory(prefix="workbench-") as folder:
        path = Path(folder) / "my_cluster.toml"
        try:
            path.write_text(text, encoding="utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError("A cluster was described.", f"It is no text: {error}.", "Write it again.") from error
        return load_cluster(path)


def judge_cluster(answer: Any, numbers: Numbers) -> str:
    """Does a text describe a cluster that has what the question asks for?"""
    if not isinstance(answer, str):
        raise WrongAnswerError(f"The text of a cluster's file is asked for; this is {answer!r:.80}.")
    try:
        cluster = described(answer)
    except WorkbenchError as error:
        raise WrongAnswerError(re.sub(r"'[^']*my_cluster\.toml'", "your text", str(error))) from error
    why = _unlike(cluster.devices, numbers)
    if why:
        raise WrongAnswerError(why, _cluster_table(cluster))
    return f"{cluster.world_size} devices, {sum(_shares(cluster.devices)):.2f} of {numbers['cores']:g} cores in all."


def _shares(devices: Sequence[Device]) -> list[float]:
    return [device.host_share or 0.0 for device in devices]


def _unlike(devices: Sequence[Device], numbers: Numbers) -> str:
    """Return what a cluster lacks of what the question asks for; an empty text if nothing."""
    shares, rates = _shares(devices), sorted(device.link.mbit_per_s for device in devices)
    if len(devices) < 3:
        return f"It has {len(devices)} devices; three or more are asked for."
    if not all(shares):
        return "A device without host_share cannot be emulated."
    if sum(shares) > numbers["cores"] + CLOSE:
        return f"Its devices take {sum(shares):.2f} cores; there are {numbers['cores']:g}."
    if abs(max(shares) / min(shares) - numbers["factor"]) > 0.05:
        ratio = max(shares) / min(shares)
        return f"By host_share, the fastest is {ratio:.2f} times as fast as the slowest, not {numbers['factor']}."
    computed = [device.flops_per_s for device in devices]
    simulated = computed[shares.index(max(shares))] / computed[shares.index(min(shares))]
    if abs(simulated - numbers["factor"]) > 0.05:
        return f"By gflops, the fastest is {simulated:.2f} times as fast as the slowest, not {numbers['factor']}."
    if abs(rates[0] - numbers["megabits"]) > CLOSE or rates[1] <= rates[0]:
        return f"One link of {numbers['megabits']} Mbit/s is asked for, and faster ones for all other devices."
    return ""


def _cluster_table(cluster: Cluster) -> Any:
    shares = ["none" if device.host_share is None else f"{device.host_share:g}" for device in cluster.devices]
    rates = [f"{device.link.mbit_per_s:g}" for device in cluster.devices]
    computed = [f"{device.flops_per_s / 1e9:g}" for device in cluster.devices]
    rows = zip(cluster.names, shares, computed, rates, strict=True)
    return comparison("Your cluster", ("device", "host_share", "gflops", "Mbit/s"), rows)


def usable_cluster(text: str | None) -> str:
    """Return a student's text, or the given one as long as it describes no two devices that can be emulated."""
    try:
        described_devices = described(text or "").devices
    except WorkbenchError:
        return GIVEN
    return text if text and len(described_devices) > 1 and all(_shares(described_devices)) else GIVEN
