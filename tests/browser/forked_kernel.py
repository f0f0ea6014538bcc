"""Kernels without the seconds that importing libraries takes, and those that unloading them takes: they are forked from
one process that has imported them.

Run as a program it is that process, with a listening socket, or what JupyterLab starts as a kernel, which asks for one
and lives as long as it does.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

LIBRARIES = (
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "nbformat",
    "plotly.graph_objects",
    "torch",
    "transformers.modeling_utils",
    "workbench.experiment",
)
"""Those that do not ask, when they are imported, whether that is in a notebook."""


@contextmanager
def forked_kernels(folder: Path, variables: dict[str, str]) -> Iterator[dict[str, str]]:
    """Give the variables with which a JupyterLab forks its kernels.  variables: of the kernels' environment."""
    place, spec = folder / "kernel", folder / "forked/kernels/python3/kernel.json"
    words = [sys.executable, __file__, str(place)]
    spec.parent.mkdir(parents=True)
    names = {"display_name": "Python 3", "language": "python", "interrupt_mode": "message"}
    spec.write_text(json.dumps({"argv": [*words, "{connection_file}"], **names}))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place))
        listener.listen()
        environment = os.environ | variables
        template = subprocess.Popen(words, stdin=listener.fileno(), env=environment, start_new_session=True)
    try:
        yield variables | {"JUPYTER_PATH": str(folder / "forked")}
    finally:
        template.kill()
        template.wait()


def ask_for_kernel(place: str, connection_file: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as kernel:
        kernel.connect(place)
        request = {"file": connection_file, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(kernel, [json.dumps(request).encode()], [0, 1, 2])
        kernel.recv(1)


def fork_kernels() -> None:
    """Fork a kernel for each connection, and return in it."""
    kernels = list[int]()
    # After all others, which are registered later; a kernel's own forks end as they like.
    atexit.register(lambda: os._exit(0) if os.getpid() in kernels else None)
    listener = socket.socket(fileno=os.dup(0))
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # see tests/conftest.py
    for name in LIBRARIES:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a kernel
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            break
        client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    os.setsid()
    kernels.append(os.getpid())
    request, files, *_ = socket.recv_fds(client, 1 << 20, 3)
    asked = json.loads(request)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv[1:] = ["-f", asked["file"]]
    threading.Thread(target=_end_with, args=(client,), daemon=True).start()


def _end_with(client: socket.socket) -> None:
    client.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        ask_for_kernel(*sys.argv[1:])
    else:
        del sys.path[0]  # this folder, as a kernel's own program leaves it out
        fork_kernels()
        from ipykernel.kernelapp import launch_new_instance

        launch_new_instance()
