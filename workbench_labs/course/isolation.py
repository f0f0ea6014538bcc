"""Call functions that others have written in a separate process, with limited time and memory.

It has no network and sees none of our files.  Bubblewrap makes its namespaces.  Where bubblewrap is missing or the
system forbids it, no foreign code runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import resource
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from workbench.core.errors import ConfigError

SECONDS, MEMORY_BYTES, ANSWER_BYTES, DISK_BYTES = 30.0, 2 * 2**30, 10_000_000, 50_000_000
"""Limits of one exercise of one hand-in: of all its calls together, of its process, of one answer, and of its files,
which are in memory."""
HIDDEN = ("workbench", "workbench_labs", "workbench_studies")
_FOREIGN = Path(__file__).with_name("foreign.py")


_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "NotImplementedError": NotImplementedError}
"""Errors that an exercise may ask for; all others are reported as RuntimeError."""


class Answered(msgspec.Struct):
    """One answer of the process."""

    result: Any = None
    error: str | None = None


def require_isolation() -> None:
    """Raise ConfigError unless foreign code can be isolated here."""
    request, todo = "Foreign code was to run.", "Install bubblewrap (Debian: apt install bubblewrap), on Linux."
    if shutil.which("bwrap") is None:
        raise ConfigError(request, "The program bwrap, which isolates it, is not here.", todo)
    nothing = json.dumps({"source": "", "name": "__name__"}).encode() + b"\n"
    tried = subprocess.run(_command(), input=nothing, capture_output=True, timeout=60)
    if tried.returncode:
        words = tried.stderr.decode(errors="replace").strip().splitlines()[-1:]
        problem = f"This system does not let it be isolated: {' '.join(words)[:300]}"
        raise ConfigError(request, problem, "Grade on a Linux machine that allows user namespaces; nothing was run.")


@contextlib.contextmanager
def foreign_function(source: str, name: str, *, seconds: float = SECONDS) -> Iterator[Callable[..., Any]]:
    """Yield a function that calls `name` of a source in an isolated process.

    Arguments and results are what JSON has.  Raises ConfigError (see require_isolation).  A call raises ValueError if
    the function does, TimeoutError after `seconds` in all, and RuntimeError for any other end.
    """
    require_isolation()
    process = subprocess.Popen(
        _command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=_limit
    )
    deadline_s = time.monotonic() + seconds
    try:
        _ask(process, {"source": source, "name": name}, seconds, deadline_s)
        yield lambda *arguments: _ask(process, {"arguments": arguments}, seconds, deadline_s)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]


def _command() -> list[str]:
    """Return the command of the process: new namespaces, an empty environment, system and Python read-only.

    The workbench itself is hidden, because it knows the answers.
    """
    shown = {Path("/usr"), Path("/lib"), Path("/lib64"), Path("/bin"), Path(sys.prefix), Path(sys.base_prefix)}
    shown |= {Path(sys.executable).resolve().parents[1], _FOREIGN}
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    words += ["--size", str(DISK_BYTES), "--tmpfs", "/", "--proc", "/proc", "--dev", "/dev"]
    for path in sorted(shown):
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    for name in HIDDEN:
        spec = importlib.util.find_spec(name)
        folders = map(Path, spec.submodule_search_locations or ()) if spec is not None else ()
        for folder in folders:
            if any(folder.is_relative_to(path) for path in shown):
                words += ["--size", str(DISK_BYTES), "--tmpfs", str(folder)]
    words += ["--ro-bind", str(_FOREIGN), str(_FOREIGN)]  # it may stand in a hidden folder
    words += ["--dir", "/hand-in", "--chdir", "/hand-in", "--setenv", "OMP_NUM_THREADS", "1"]
    return [*words, sys.executable, "-I", str(_FOREIGN)]


def _limit() -> None:
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, int(SECONDS) + 1),
        (resource.RLIMIT_FSIZE, ANSWER_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _ask(process: subprocess.Popen[bytes], question: dict[str, Any], seconds: float, deadline_s: float) -> Any:
    """Send one question; return its answer.  seconds: time limit of all calls together, which end at deadline_s."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise RuntimeError("The hand-in's process ended.") from error
    line = bytearray()
    while not line.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            raise TimeoutError(f"The function takes more than {seconds:g} s in all.")
        more = process.stdout.read1(65_536)  # type: ignore[attr-defined]
        if not more:
            raise RuntimeError("The hand-in's process ended: out of memory, or it left on purpose.")
        line += more
        if len(line) > ANSWER_BYTES:
            raise RuntimeError("The function's result is too large.")
    try:
        answered = msgspec.json.decode(bytes(line).split(b"\n")[0], type=Answered)
    except msgspec.DecodeError as error:
        raise RuntimeError(f"The hand-in's process answered something else: {error}.") from error
    if answered.error is not None:
        kind, _, words = answered.error.partition(": ")
        raise _ERRORS.get(kind, RuntimeError)(words or kind)
    return answered.result
