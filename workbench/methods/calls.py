"""The functions that may be called on a real device.  Run as a program, this is a device's engine (started by
runtime.ssh_agent).
"""

from __future__ import annotations

from contextlib import suppress

from workbench.core.errors import ConfigError
from workbench.core.methods import Parts, declaration_of, registered
from workbench.core.schedule import paused_collector
from workbench.runtime.messages import CallTable


def _declared() -> dict[str, str | Parts]:
    """Return what the installed methods declare.  A job of a method whose package is broken says so before it calls
    anything.
    """
    calls: dict[str, str | Parts] = {}
    for name in registered():
        with suppress(ConfigError):
            calls |= declaration_of(name).calls
    return calls


CALLS = CallTable(
    {
        "workbench.runtime.measuring:measure_rank_host": "",
        "workbench.runtime.measuring:measure_rank_links": "",
        "workbench.runtime.measuring:measure_rank_at_once": "",
        "workbench.runtime.measuring:measure_rank_sustained": "",
        "workbench.runtime.torchrun:sees_file": "",
        "workbench.runtime.torchrun:remove_own_files": "",
        **_declared(),
    }
)
"""The functions by name, each with the types that it publishes in addition to dicts."""


if __name__ == "__main__":
    with paused_collector():  # collections while libraries are imported find nothing
        from workbench.runtime.pipe_engine import serve
    serve(CALLS)
