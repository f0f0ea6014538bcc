"""The process of one emulated device: it enters its namespace, ends with its owner, and becomes an ipyparallel engine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from workbench.core.serial import from_json
from workbench.runtime.memory import take_small_stacks, tell_is_engine
from workbench.runtime.network import Endpoint
from workbench.runtime.processes import ProcessId

SETTINGS_FILE = "engines.json"
START_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of all engines in a run folder.  endpoints: one per rank, or empty."""

    owner_pid: int
    owner_started: float
    profile: str
    connection_file: str
    endpoints: tuple[Endpoint, ...] = ()


def main() -> None:
    """Start the engine for one rank of a run folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    arguments = parser.parse_args()
    become_engine(from_json((arguments.folder / SETTINGS_FILE).read_text(), EngineSettings, source=SETTINGS_FILE), arguments.rank)


def become_engine(settings: EngineSettings, rank: int) -> None:
    """Run an engine until it is stopped.  The order matters: enter namespaces before starting threads, import torch afterwards."""
    if settings.endpoints:
        settings.endpoints[rank].enter()
    take_small_stacks()
    owner = ProcessId(settings.owner_pid, settings.owner_started)
    threading.Thread(target=_die_with, args=(owner,), daemon=True, name="owner watch").start()

    import torch
    import torch.distributed  # counts as footprint, not towards a job's budget

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    tell_is_engine()
    _serve(rank, settings)


def _die_with(owner: ProcessId) -> None:
    # PR_SET_PDEATHSIG would fire when the *thread* that started us ends, which can happen in a notebook.
    owner.wait()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _serve(rank: int, settings: EngineSettings) -> None:
    from ipyparallel.engine.app import IPEngine

    deadline_s = time.monotonic() + START_TIMEOUT_S
    connection = Path(settings.connection_file)
    while not connection.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    here, app = os.getcwd(), IPEngine.instance()
    app.initialize(
        [
            f"--work-dir={settings.profile}",
            f"--file={connection}",
            f"--profile-dir={settings.profile}",
            f"--IPEngine.id={rank}",
            f"--IPEngine.timeout={START_TIMEOUT_S}",
            "--IPEngine.enable_nanny=False",  # the owner and the janitor watch the processes
            "--IPEngine.max_heartbeat_misses=0",
        ]
    )
    # ipyparallel imports from the current folder, whatever options the interpreter was started with.
    sys.path[:] = [path for path in sys.path if path]
    os.chdir(here)
    app.start()


if __name__ == "__main__":
    main()
