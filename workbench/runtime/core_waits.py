"""How long the threads of this process wait for a core, as the kernel counts it.

Linux writes it for each thread to /proc/PID/task/TID/schedstat, as the second number, in nanoseconds (kernel
documentation, scheduler statistics).  A kernel can be built without it, and other systems do not have it.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

THREADS = Path("/proc/self/task")
"""A folder for each thread of this process, named by its number."""
_COUNTS, _NAME = "schedstat", "comm"


class CoreWaits:
    """Reads for how long threads of collectives could have run, but had no core: the one that calls, and gloo's.

    A reading is part of the time that is measured, so it takes microseconds: the counts' files stay open.  Close it.
    folder: see THREADS.  Where the system does not count this, no thread is seen to wait.
    """

    def __init__(self, folder: Path = THREADS) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._num_links = 0  # of the folder: it changes with the number of threads
        self._files: dict[int, int] = {}
        self._of_gloo: set[int] = set()

    @property
    def is_known(self) -> bool:
        """Return whether the system counts it."""
        return any(self._folder.glob(f"*/{_COUNTS}"))

    def read_s(self) -> float:
        """Return the seconds that the threads have waited so far, summed."""
        own = threading.get_native_id()
        with self._lock:
            with suppress(FileNotFoundError):
                num_links = os.stat(self._folder).st_nlink
                if num_links != self._num_links or own not in self._files:
                    self._num_links = num_links
                    self._open(own)
            return 1e-9 * sum(self._waited(thread) for thread in {own} | self._of_gloo)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for file in self._files.values():
                os.close(file)
            self._files.clear()
            self._of_gloo.clear()
            self._num_links = 0

    def _open(self, own: int) -> None:
        """Open the counts of a thread that calls, and of gloo's threads that have begun; close those of ended ones."""
        present = {int(name) for name in os.listdir(self._folder)}
        for thread in self._files.keys() - present:
            os.close(self._files.pop(thread))
        self._of_gloo &= present
        for thread in present - self._of_gloo:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, or is not counted
                is_of_gloo = "gloo" in (self._folder / str(thread) / _NAME).read_text()
                if (is_of_gloo or thread == own) and thread not in self._files:
                    self._files[thread] = os.open(self._folder / str(thread) / _COUNTS, os.O_RDONLY)
                if is_of_gloo:
                    self._of_gloo.add(thread)

    def _waited(self, thread: int) -> int:
        """Return the nanoseconds that a thread has waited; 0 if it has ended or is not counted."""
        with suppress(KeyError, ProcessLookupError):
            return int(os.pread(self._files[thread], 100, 0).split()[1])
        return 0
