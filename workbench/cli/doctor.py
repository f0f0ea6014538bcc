"""Examine this machine: what it can do, which features are limited, and how to fix them.  torch is not imported;
versions come from the metadata.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

from workbench.core.errors import installation
from workbench.core.files import nearest_folder
from workbench.core.units import size_words

HUB_TIMEOUT_S = 2.0
ENOUGH_MEMORY_BYTES, ENOUGH_DISK_BYTES = 4e9, 3e9
BUSY_LOAD_PER_CORE = 0.5  # above this an emulated run is likely to overrun its deadlines
TORCH_FOR_ARMV8_0 = "2.9.1"
"""The lock's version for aarch64 Linux."""
_CRASHING_ON_ARMV8_0 = ("2.0.0", "2.4.0", "2.6.0", "2.10.0")
"""Releases of torch known to end with an illegal instruction on processors without atomics, such as a Raspberry Pi
4's."""
PACKAGES = ("torch", "transformers", "datasets", "evaluate", "plotly", "papermill", "jupyterlab")


class Check(NamedTuple):
    """One finding.  state: ok; degraded (it works, with less); missing (something that is needed is not there)."""

    name: str
    state: Literal["ok", "degraded", "missing"]
    found: str
    todo: str = ""


STATE_COLOURS = {"ok": "green", "degraded": "yellow", "missing": "red"}


def _check(name: str, found: str, todo: str, state: Literal["degraded", "missing"] = "degraded") -> list[Check]:
    """Return a finding: in this state if there is something to do, else ok."""
    return [Check(name, state, found, todo) if todo else Check(name, "ok", found)]


def verdict(checks: Sequence[Check]) -> str:
    """Return what the findings come to, and what to do next."""
    missing, degraded = (sum(check.state == state for check in checks) for state in ("missing", "degraded"))
    if missing:
        words = f"{missing} thing{'s are' if missing > 1 else ' is'} missing."
        return f"{words} Do what the arrows say, then repeat: workbench doctor"
    if degraded:
        words = f"The workbench runs here, but {degraded} thing{'s are' if degraded > 1 else ' is'} limited."
    else:
        words = "Everything works."
    return f"{words}\nNext        workbench simulate (simulate a fine-tuning), workbench run (execute it)"


INSTALL = f"Run: make setup, or {installation('all')}. A device in a run on several machines does not need it."


def examine() -> list[Check]:
    """Return all findings about this machine, in a few seconds."""
    return [check for probe in PROBES for check in _guarded(probe)]


def _guarded(probe: Callable[[], list[Check]]) -> list[Check]:
    name = probe.__name__.strip("_")
    try:
        return probe()
    except ModuleNotFoundError as error:
        return _check(name, f"needs the package '{error.name}', which is not installed", INSTALL)
    except Exception as error:  # the doctor's duty is to go on and say what failed
        return _check(name, f"the check failed: {type(error).__name__}: {error}", "Report this.")


def _python() -> list[Check]:
    version_text = (
        f"Python {platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    )
    todo = "Install Python 3.11 or newer." if sys.version_info < (3, 11) else ""
    return _check("python", version_text, todo, "missing")


def _packages() -> list[Check]:
    installed, absent = [], []
    for package in PACKAGES:
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            absent.append(package)
    if absent:
        return _check("packages", f"not installed: {', '.join(absent)}", INSTALL, "missing")
    return _check("packages", ", ".join(installed), "")


def crashes_on_armv8_0(torch: str, machine: str, has_atomics: bool | None) -> bool:
    """Return whether a version of torch is known to crash on a processor.  has_atomics: None where the system does not
    say it.
    """
    return machine == "aarch64" and has_atomics is False and torch.partition("+")[0] in _CRASHING_ON_ARMV8_0


def _processor() -> list[Check]:
    """Look at an ARM processor.  Others need no check."""
    from workbench.runtime.ssh_agent import has_atomics

    if platform.machine() != "aarch64":
        return []
    atomics, torch = has_atomics(), version("torch")
    if crashes_on_armv8_0(torch, platform.machine(), atomics):
        todo = f"Run: {sys.executable} -m pip install torch=={TORCH_FOR_ARMV8_0}"
        return _check("processor", f"torch {torch} crashes on this processor (ARMv8.0, no atomics)", todo, "missing")
    kind = {True: "ARMv8.1 or later", False: "ARMv8.0, no atomics", None: "aarch64"}[atomics]
    return _check("processor", f"{kind}; torch {torch} is not known to crash on it", "")


def _privileges() -> list[Check]:
    if not hasattr(os, "geteuid"):
        return _check("privileges", "no POSIX user", "Use Linux, macOS or WSL for emulated devices.")
    return _check("privileges", "root" if os.geteuid() == 0 else f"unprivileged user {os.geteuid()}", "")


def _links() -> list[Check]:
    from workbench.runtime.network import probe

    support = probe()
    state: Literal["ok", "degraded"] = "ok" if support.fidelity == "kernel" else "degraded"
    checks = [Check("emulated links", state, f"{support.fidelity}: {support.reason}", support.remedy)]
    if not support.private:
        exposure = (
            "other users of this machine can connect to the devices at 127.0.0.1 during a run, and gloo does not "
            "authenticate them"
        )
        todo = "Run on a machine of your own, or where network namespaces are allowed."
        checks += _check("devices' network", exposure, todo)
    return checks


def _memory() -> list[Check]:
    import psutil

    memory = psutil.virtual_memory()
    available = f"{size_words(memory.available)} of {size_words(memory.total)} available"
    todo = "Close programs: four emulated devices and the notebook need about 4 GB."
    return _check("memory", available, todo if memory.available < ENOUGH_MEMORY_BYTES else "")


def _cores() -> list[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    todo = ""
    if cores < 2:
        todo = "Emulate slower devices (smaller host_share): together they must fit the cores."
    elif load > BUSY_LOAD_PER_CORE * cores:
        todo = "Wait until the machine is quiet: runs on a busy host are marked invalid."
    return _check("cores", f"{cores} cores, load {load:.1f} over the last minute", todo)


def _chromium() -> list[Check]:
    from workbench.plots.export import browser_path

    path = browser_path()
    todo = "Install Chromium, or run: .venv/bin/plotly_get_chrome.  Figures are written as HTML without it."
    return _check("chromium", path or "none found, so no PNG figures", "" if path else todo)


def _assets() -> list[Check]:
    from workbench.assets.fetch import ASSETS, asset_path
    from workbench.core.errors import MissingDataError

    present, absent = [], []
    for name, asset in ASSETS.items():
        try:
            asset_path(name)
            present.append(name)
        except MissingDataError:
            if not asset.terms:
                absent.append(name)
    if absent:
        return _check("weights and data", f"not fetched: {', '.join(absent)}", "Run: workbench fetch", "missing")
    return _check("weights and data", ", ".join(present), "")


def _disk() -> list[Check]:
    from workbench.assets.fetch import cache_folder

    folder = cache_folder()
    existing = nearest_folder(folder)
    free = shutil.disk_usage(existing).free
    free_text = f"{size_words(free)} free for {folder}"
    if not os.access(existing, os.W_OK):
        return _check("disk", f"{existing} is not writable", "Set WORKBENCH_CACHE to a folder of yours.", "missing")
    todo = "Free some space, or set WORKBENCH_CACHE to another disk."
    return _check("disk", free_text, todo if free < ENOUGH_DISK_BYTES else "")


def _hub() -> list[Check]:
    from workbench.assets.hub import hub_endpoint, hub_is_reachable
    from workbench.core.threads import in_background

    outcome: list[bool] = []
    # Name resolution knows no timeout: its thread is left behind rather than waited for.
    in_background(lambda: outcome.append(hub_is_reachable(HUB_TIMEOUT_S))).join(HUB_TIMEOUT_S)
    if outcome == [True]:
        return _check("hub", f"{hub_endpoint()} answers", "")
    todo = "The embedded model and data work without it; others need a local folder (--model FOLDER, --data FOLDER)."
    return _check("hub", f"{hub_endpoint()} does not answer within {HUB_TIMEOUT_S:g} s", todo)


PROBES = (_python, _packages, _processor, _privileges, _links, _memory, _cores, _chromium, _assets, _disk, _hub)
