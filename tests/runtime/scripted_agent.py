"""An agent in this process, in place of ssh: it answers as a real one does, and changes the messages that a test
chooses."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from typing import Any

from workbench.runtime.frames import ENGINE, HEADER, JSON
from workbench.runtime.ssh_agent import MAGIC

HEALTH = {"temperature_c": 48.3, "throttled": "", "free_memory_bytes": 3 * 10**9, "rss_bytes": 10**8}
FACTS = HEALTH | {
    "cores": 4,
    "memory_bytes": 4 * 10**9,
    "free_disk_bytes": 10**10,
    "time_s": 1.8e9,
    "libc": "2.36",
    "environment": "env-0a",
    "torch": "2.9.1+cpu",
    "has_atomics": False,
}
FOUND: dict[str, Any] = {
    "hello": {
        "run": "/home/pi/.workbench-kit/runs/1",
        "kit": "/home/pi/.workbench-kit",
        "swept": 0,
        "python": "3.11.2",
        "machine": "aarch64",
    },
    "facts": FACTS,
    "start": 4711,
    "expose": ["10.0.0.4", 40001],
    "reach": 40002,
    "begin_file": True,
    "holds": True,
    "clean": True,
}


def json_frame(value: Any) -> bytes:
    return frame(JSON, value if isinstance(value, bytes) else json.dumps(value).encode())


def engine_frame(data: bytes) -> bytes:
    return frame(ENGINE, data)


def frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


class ScriptedAgent:
    """What subprocess.Popen returns for a device.

    sends(asked, answer): the bytes in place of those of an answer, with which the connection ends (unless not ends);
    None: as it was.
    """

    pid = 0

    def __init__(
        self, sends: Callable[[dict[str, Any], bytes], bytes | None] = lambda asked, answer: None, *, ends: bool = True
    ) -> None:
        self._sends, self._ends = sends, ends
        self._out, self._in, self._ended = bytearray(MAGIC), bytearray(), False
        self._changed = threading.Condition()
        self.stdin, self.stdout, self.stderr = self, self, io.BytesIO(b"")

    def send(self, data: bytes, *, ends: bool = False) -> None:
        """Send bytes as the device.  ends: then the connection ends."""
        with self._changed:
            if not self._ended:
                self._out += data
                self._ended = ends
            self._changed.notify_all()

    # As the laptop's end of stdin and stdout.

    def write(self, data: bytes) -> None:
        self._in += data
        if self._in[:8].strip().isdigit():  # the agent's source
            del self._in[: 8 + int(self._in[:8])]
        while len(self._in) >= HEADER.size and len(self._in) >= HEADER.size + HEADER.unpack_from(self._in)[0]:
            length, kind = HEADER.unpack_from(self._in)
            payload = bytes(self._in[HEADER.size : HEADER.size + length])
            del self._in[: HEADER.size + length]
            if kind == JSON:
                self._answer(json.loads(payload))

    def _answer(self, asked: dict[str, Any]) -> None:
        if asked["op"] == "ping":
            answer = json_frame({"kind": "echo", "id": asked["id"], "clock_s": 7.5, "cpu_s": 1.0, "health": HEALTH})
        else:
            answer = json_frame({"kind": "answer", "id": asked["id"], "found": FOUND.get(asked["op"])})
        changed = self._sends(asked, answer)
        self.send(answer if changed is None else changed, ends=self._ends and changed is not None)

    def read(self, count: int) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: len(self._out) >= count or self._ended)
            data = bytes(self._out[:count])
            del self._out[:count]
            return data

    read1 = read

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        return 255

    def kill(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
