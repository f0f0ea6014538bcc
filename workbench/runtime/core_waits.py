"""How long the threads of this process wait for a core, as the kernel counts it.

Linux writes it for each thread to /proc/PID/task/TID/schedstat, as the second number, in nanoseconds (kernel
documentation, scheduler statistics).  A kernel can be built without it, and other systems do not have it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

THREADS = Path("/proc/self/task")
"""A folder for each thread of this process, named by its number."""
_NAME = "schedstat"


class CoreWaits:
    """Reads for how long threads of this process could have run, but had no core.

    folder: see THREADS.  Where the system does not count this, no thread is seen to wait.
    """

    def __init__(self, folder: Path = THREADS) -> None:
        self._folder = folder

    @property
    def is_known(self) -> bool:
        """Return whether the system counts it."""
        return any(self._folder.glob(f"*/{_NAME}"))

    def read(self) -> dict[int, int]:
        """Return the nanoseconds that each present thread has waited so far, by its number."""
        waited = dict[int, int]()
        with suppress(FileNotFoundError):
            for thread in os.listdir(self._folder):  # a Path for each would take twice as long
                with (
                    suppress(FileNotFoundError, ProcessLookupError),  # it has ended, or is not counted
                    open(f"{self._folder}/{thread}/{_NAME}", "rb", buffering=0) as file,
                ):
                    waited[int(thread)] = int(file.read().split()[1])
        return waited

    def since_s(self, before: Mapping[int, int], without: Collection[int] = ()) -> float:
        """Return the seconds that threads have waited since a reading, summed.  without: threads that do not count."""
        return 1e-9 * sum(
            waited - before.get(thread, 0) for thread, waited in self.read().items() if thread not in without
        )
