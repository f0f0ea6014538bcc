"""An observer of the network between SSH hosts: it counts the packets on their bridge that hold some bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ssh_hosts import NetHosts

_OBSERVER = """
import socket, sys, threading
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
raw.settimeout(0.2)
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
print("ready", flush=True)
count, needles = 0, [bytes.fromhex(word) for word in sys.argv[1:]]
found = [0 for needle in needles]
while True:
    try:
        packet = raw.recv(1 << 17)
    except TimeoutError:
        if over.is_set():
            break
        continue
    count += len(packet)
    found = [before + (needle in packet) for before, needle in zip(found, needles)]
print(count, *found)
"""


def observed(hosts: NetHosts, needles: Sequence[bytes], act: Callable[[], Any]) -> list[int]:
    """Do something; return the bytes seen on the bridge meanwhile, and the packets with each needle."""
    enter = ["nsenter", "-t", str(hosts.process.pid), "-U", "-n", "--preserve-credentials"]
    words = [sys.executable, "-c", _OBSERVER, *(needle.hex() for needle in needles)]
    with subprocess.Popen([*enter, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None and watch.stdout.readline() == "ready\n"
        act()
        return [int(word) for word in watch.communicate()[0].split()]
