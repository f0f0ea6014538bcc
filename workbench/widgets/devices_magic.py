"""The magic `%%devices`: run a notebook's cell on every emulated device (%load_ext workbench.widgets.devices_magic)."""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.error import UsageError

from workbench.core.serial import plain
from workbench.runtime.engines import EngineCluster
from workbench.runtime.own_calls import Printed, run_cell


def load_ipython_extension(shell: Any) -> None:
    """Register the magic in a notebook or an IPython shell."""

    def devices(line: str, cell: str) -> None:
        """Run the cell on every device of `engines`, or of another variable: `%%devices NAME`.

        Each device keeps its variables for the next cell.  What it prints, and the value of the cell's last expression,
        are shown after its name; so is an error, in one sentence.  `context` is the device's RankContext, with its
        rank, name and cluster.
        """
        name = line.strip() or "engines"
        engines = shell.user_ns.get(name)
        if not isinstance(engines, EngineCluster):
            raise UsageError(f"'{name}' is no running cluster. Write: {name} = default_pool().acquire(cluster)")
        engines.keeps_variables = True
        for device, printed in zip(
            engines.cluster.names, engines.run(run_cell, [cell] * len(engines.cluster.names)), strict=True
        ):
            sys.stdout.write(plain(_shown(device, printed)) + "\n")

    shell.register_magic_function(devices, "cell")


def _shown(device: str, printed: Printed) -> str:
    lines = printed.text.splitlines() + ([f"{printed.error}."] if printed.error else [])
    return (
        f"{device}: {lines[0] if lines else '(no output)'}" if len(lines) < 2 else "\n  ".join([f"{device}:", *lines])
    )
