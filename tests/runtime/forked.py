"""Fresh processes without the seconds that importing torch takes: they are forked from one that has imported it, and
has no threads."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", "workbench.runtime.process_group"])


@contextlib.contextmanager
def run_script(script: str, output: Path, *arguments: str) -> Iterator[BaseProcess]:
    """Run a script in a fresh process, with sys.argv[1:] and gloo on loopback; output: what it prints.  It is killed at
    the end."""
    process = _CONTEXT.Process(target=_run, args=(script, output, arguments))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _run(script: str, output: Path, arguments: tuple[str, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv[1:] = arguments
    with open(output, "w") as file, contextlib.redirect_stdout(file):
        exec(script, {})
