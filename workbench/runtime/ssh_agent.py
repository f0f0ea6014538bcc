"""The agent on a real device: standard library only, sent through ssh's stdin, and gone with the connection.

It never computes: it receives files, starts and ends the engine, passes the engine's bytes on, and answers pings for
the clock.
A frame is its length (4 bytes, big-endian), its kind (1 byte) and its payload: J is JSON for and from the agent, D
bytes of the file that is being sent, E bytes of the engine's stdin or stdout.  The laptop waits for MAGIC first,
because a .bashrc may print.
Everything ends with the connection: at end of file, or after `silence_s` without a byte, the engine is killed and the
run folder removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import platform
import queue
import re
import select
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tarfile
import threading
import time
from typing import Any

MAGIC = b"\n<workbench agent 1>\n"
HEADER = struct.Struct(">IB")
JSON, DATA, ENGINE = b"JDE"
CHUNK = 1 << 17
FOLDER = ".workbench-kit"
"""In the user's home folder: everything that is put on a device."""
CERTIFICATE = "run/tls.pem"
LOWEST = "127.0.0.0"
"""An address of the loopback below 127.0.0.1, where gloo listens: of two addresses it is the lower that is connected
to."""
OLDEST_PYTHON = (3, 11)
_SHA256, _KIT_FOLDER, _WORD = r"[0-9a-f]{64}", r"(code|env)-[0-9a-f]{1,64}", r"[^\x00-\x1f\x7f]{0,4096}"
_SIZE, _PORT = range(1 << 50), range(1, 1 << 16)
OPERATIONS: dict[str, Any] = {
    "hello": {"silence_s": (0.1, 3600.0), "owner": _WORD},
    "facts": {"python": _WORD},
    "has": {"path": _WORD, "size": _SIZE, "sha256": _SHA256},
    "begin_file": {"path": _WORD, "size": _SIZE, "sha256": _SHA256, "offset": _SIZE},
    "start": {"python": _WORD, "module": r"[\w.]{1,200}", "environment": {}},
    "signal_engine": {"name": "kill|stop|continue"},
    "expose": {"port": _PORT},
    "reach": {"host": r"[0-9a-fA-F.:]{2,45}(%\w{1,15})?", "port": _PORT},
    "holds": {"folder": _KIT_FOLDER},
    "unpack": {"archive": _WORD, "folder": _KIT_FOLDER, "python": bool, "trial": _WORD},
    "tries": {"python": _WORD, "trial": _WORD},
    "empty": {"path": _WORD},
    "clean": {},
    "ping": {"health": bool},
}
"""The methods that the laptop may call, and the values of their fields: a pattern, a range, bool, or {} for
variables."""
_MOST_FRAME_BYTES = 1 << 20
_LOG_TAIL = 2000


class Refused(Exception):
    """The agent refuses a request; the message is shown to the user.  todo: the remedy; '' if the laptop knows it."""

    def __init__(self, text: str, todo: str = "") -> None:
        super().__init__(text)
        self.todo = todo


class Agent:
    """One connection's agent.  home: the folder in which FOLDER is created."""

    def __init__(self, home: str) -> None:
        self.base = os.path.join(home, FOLDER)
        self.silence_s, self.heard_s = 10.0, time.monotonic()
        self.run = ""
        self.engine: Any = None
        self.file: dict[str, Any] = {}
        self.begun: dict[str, Any] = {}
        self.to_engine: Any = queue.SimpleQueue()
        self.writing, self.ending = threading.Lock(), threading.Lock()

    # The connection.

    def serve(self) -> None:
        """Handle requests until the connection closes."""
        os.write(1, MAGIC)
        in_background(self.watch)
        try:
            while True:
                length, kind = HEADER.unpack(self.read(HEADER.size))
                if kind not in (JSON, DATA, ENGINE) or length > _MOST_FRAME_BYTES:
                    raise EOFError  # the other end is not a laptop with this workbench
                self.take(kind, self.read(length))
        except (EOFError, OSError, ValueError, RecursionError):
            self.finish()

    def read(self, count: int) -> bytes:
        """Return the next bytes of stdin, unbuffered."""
        data = bytearray()
        while len(data) < count:
            part = os.read(0, min(count - len(data), CHUNK))
            if not part:
                raise EOFError
            self.heard_s = time.monotonic()
            data += part
        return bytes(data)

    def watch(self) -> None:
        """End everything when the laptop is silent, because its cable was pulled or its lid was shut."""
        while time.monotonic() - self.heard_s < self.silence_s:
            time.sleep(0.2)
        self.finish()

    def take(self, kind: int, payload: bytes) -> None:
        """Handle a frame.  Raises ValueError for a request that cannot be answered."""
        if kind == ENGINE:
            self.to_engine.put(payload)
            return
        if kind == DATA:
            if self.file.get("left", 0) < len(payload):
                raise ValueError("more bytes than the file was to have")
            self.take_data(payload)
            return
        request = json.loads(payload)
        if (
            not isinstance(request, dict)
            or type(request.get("id")) is not int
            or not isinstance(request.get("op"), str)
        ):
            raise ValueError("no request")
        if request["op"] == "ping":
            clock_s = time.monotonic()
            health = self.health() if request.get("health") else None
            self.say("echo", id=request["id"], clock_s=clock_s, cpu_s=self.cpu_s(), health=health)
        elif request["op"] in (
            "has",
            "unpack",
            "tries",
            "clean",
            "facts",
        ):  # in a thread, because they take time and pings must not wait for them
            in_background(self.do, request)
        else:
            self.do(request)

    def do(self, request: dict[str, Any]) -> None:
        """Run one operation of the table and reply."""
        number, name = request.pop("id"), request.pop("op")
        try:
            check(name, request)
            value = getattr(self, name)(**request)
            if name != "begin_file":  # answered once the file is complete
                self.say("answer", id=number, found=value)
            else:
                self.file["id"] = number
                self.take_data(b"")
        except (Refused, OSError, subprocess.SubprocessError, tarfile.TarError, TypeError, ValueError) as error:
            self.say("refusal", id=number, **explained(error))

    def say(self, kind: str, **fields: Any) -> None:
        """Send a JSON message.  kind: one of the messages that workbench.runtime.frames on the laptop declares."""
        self.send(JSON, json.dumps({"kind": kind, **fields}).encode())

    def send(self, kind: int, payload: bytes) -> None:
        """Send a frame.  Frames from several threads do not mix."""
        data = HEADER.pack(len(payload), kind) + payload
        with self.writing:
            try:
                while data:
                    data = data[os.write(1, data) :]
            except OSError:
                self.finish()

    def finish(self) -> None:
        """End the engine, remove the run folder and end."""
        with self.ending:  # never given back
            try:
                self.end_engine()
                if self.run:
                    shutil.rmtree(self.run, ignore_errors=True)
            finally:
                os._exit(0)

    # Operations.

    def hello(self, silence_s: float, owner: str = "") -> dict[str, Any]:
        """Begin a connection: remove folders that dead agents left, create the run folder, and with an owner's name
        reserve the device for one run.
        """
        if sys.version_info < OLDEST_PYTHON:
            raise Refused(
                f"Its Python is {platform.python_version()}; 3.11 or later is needed.", "Install a newer one there."
            )
        self.silence_s = silence_s
        runs = os.path.join(self.base, "runs")
        os.makedirs(runs, mode=0o700, exist_ok=True)
        if owner:
            self.lease = self.locked(os.path.join(self.base, "lease"), owner)
        swept = 0
        for name in os.listdir(runs):
            folder = os.path.join(runs, name)
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)  # its agent was killed
                os.close(descriptor)
                swept += 1
        run = os.path.join(runs, f"{os.getpid()}-{time.time():.0f}")
        os.mkdir(run, 0o700)
        self.run_lock = os.open(run, os.O_RDONLY)
        fcntl.flock(self.run_lock, fcntl.LOCK_EX)
        self.run = run
        return {
            "run": run,
            "kit": self.base,
            "swept": swept,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }

    def locked(self, path: str, owner: str) -> int:
        """Return the open lock file.  The kernel releases the lock however this process ends."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            other = os.read(descriptor, 200).decode(errors="replace") or "Another run"
            raise Refused(
                f"{other} has it since {time.time() - os.fstat(descriptor).st_mtime:.0f} s.",
                "Wait for it, or end it there.",
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, owner.encode())
        return descriptor

    def facts(self, python: str = "") -> dict[str, Any]:
        """Return what `kit check` shows.  python: the Python of the device's own environment; '': the kit's."""
        disk = os.statvfs(self.base)
        environment = "".join(sorted(glob.glob(self.base + "/env-*/ready"))[:1])[len(self.base) + 1 : -len("/ready")]
        if environment and not python:
            python = os.path.join(self.base, environment, "bin/python")
        return {
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            "memory_bytes": memory_bytes("MemTotal"),
            "free_disk_bytes": disk.f_bavail * disk.f_frsize,
            "time_s": time.time(),
            "libc": platform.libc_ver()[1],
            "environment": environment,
            "torch": torch_version(python) if python else "",
            "has_atomics": has_atomics(),
        } | self.health()

    def health(self) -> dict[str, Any]:
        """Return the device's temperature, free memory and what slows it down, and the memory of the engine."""
        temperatures = [read_text(path).strip() for path in glob.glob("/sys/class/thermal/thermal_zone*/temp")]
        heat = [
            celsius
            for celsius in (int(text) / 1000 for text in temperatures if re.fullmatch(r"-?\d+", text))
            if -100 <= celsius <= 200
        ]
        bits = read_text("/sys/devices/platform/soc/soc:firmware/get_throttled").strip()  # a Raspberry Pi's
        now = int(bits, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]+", bits) else 0
        engine = self.engine  # `facts` is another thread's
        pages = read_text(f"/proc/{engine.pid}/statm").split() if engine is not None else ()
        return {
            "temperature_c": max(heat) if heat else None,
            "throttled": ", ".join(
                word for bits, word in ((1, "too little voltage"), (0xE, "slowed down")) if now & bits
            ),
            "free_memory_bytes": memory_bytes("MemAvailable"),
            "rss_bytes": int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0,
        }

    def empty(self, path: str) -> None:
        """Remove a folder."""
        shutil.rmtree(self.place(path), ignore_errors=True)

    def place(self, path: str) -> str:
        """Return the device's path for a path that the laptop names: 'run/...' is in this run's folder, 'kit/...' stays
        on the device.
        """
        root, _, rest = path.partition("/")
        folder = {"run": self.run, "kit": self.base}.get(root)
        if not folder or not rest or os.path.isabs(rest) or ".." in rest.split("/"):
            raise Refused(f"'{path}' is not a valid place for a file.")
        return os.path.join(folder, rest)

    def has(self, path: str, size: int, sha256: str) -> int | None:
        """Return None if the same file is complete on the device, else the number of its bytes that are there, from
        which its transfer continues.
        """
        place = self.place(path)
        if os.path.isfile(place) and os.path.getsize(place) == size:
            with open(place, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                    return None
        part, count, digest = part_of(place, sha256), 0, hashlib.sha256()
        if os.path.isfile(part) and os.path.getsize(part) <= size:
            with open(part, "rb") as file:
                while data := file.read(CHUNK):
                    digest.update(data)
                    count += len(data)
        self.begun[part] = digest
        return count

    def begin_file(self, path: str, size: int, sha256: str, offset: int = 0) -> None:
        """Begin to receive a file, whose bytes from `offset` on follow in D frames.  It appears only when it is
        complete.

        offset: the number that `has` returned.
        """
        self.file = {"place": "", "part": "", "left": size - offset, "sha256": sha256, "error": None, "open": None}
        try:
            self.file["place"] = place = self.place(path)
            self.file["part"] = part = part_of(place, sha256)
            if offset > size or (offset and part not in self.begun):
                raise Refused(f"'{path}' was not begun so far.")
            self.file["digest"] = self.begun.pop(part) if offset else hashlib.sha256()
            os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
            self.file["open"] = open(part, "ab" if offset else "wb")  # noqa: SIM115 (closed when it is whole)
        except (OSError, Refused) as error:
            self.file["error"] = explained(error)

    def take_data(self, data: bytes) -> None:
        """Append bytes to the file.  When it is complete, check it and move it to its place.  After an error the rest
        is discarded.
        """
        file = self.file
        file["left"] -= len(data)
        try:
            if file["error"] is None:
                file["open"].write(data)
                file["digest"].update(data)
                if file["left"] == 0:
                    file["open"].close()
                    if file["digest"].hexdigest() != file["sha256"]:
                        raise OSError(f"'{file['place']}' came with another digest.")
                    os.replace(file["part"], file["place"])
        except OSError as error:
            file["error"] = explained(error)
        if file["left"] == 0:
            if file["error"] is None:
                self.say("answer", id=file["id"], found=True)
            else:
                if file["open"] is not None:
                    file["open"].close()
                if os.path.exists(file["part"]):
                    os.unlink(file["part"])
                self.say("refusal", id=file["id"], **file["error"])

    def holds(self, folder: str) -> bool:
        """Return whether a folder of the kit was unpacked completely."""
        return os.path.exists(os.path.join(self.place("kit/" + folder), "ready"))

    def unpack(self, archive: str, folder: str, python: bool, trial: str = "") -> str:
        """Unpack an archive, which replaces the folders of its kind, and return its path.

        python: whether to unpack it into a virtual environment of ours.  trial: code that this environment's Python
        must run before it counts as ready.
        """
        target_folder = self.place("kit/" + folder)
        for old in glob.glob(os.path.join(self.base, folder.partition("-")[0] + "-*")):
            shutil.rmtree(old, ignore_errors=True)
        target = target_folder
        if python:
            command = [sys.executable, "-m", "venv", "--without-pip", target_folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise Refused(f"A virtual environment cannot be made: {done.stdout.strip()}")
            target = os.path.join(
                target_folder, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages"
            )
        with tarfile.open(self.place(archive)) as tar:
            checked: Any = (
                {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            )  # Python 3.11.4; the archive is ours
            tar.extractall(target, **checked)
        if trial:
            try:
                self.tries(os.path.join(target_folder, "bin/python"), trial)
            except Refused:
                shutil.rmtree(target_folder, ignore_errors=True)
                os.unlink(self.place(archive))
                raise
        with open(os.path.join(target_folder, "ready"), "w"):
            pass
        os.unlink(self.place(archive))
        return target_folder

    def tries(self, python: str, trial: str) -> None:
        """Run a few lines of Python in an environment.  Raises Refused if they fail."""
        command = [os.path.expanduser(python), "-P", "-c", trial]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, preexec_fn=die_with_us)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            ended = f"ends with {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"fails: {last}"
            raise Refused(f"`{trial}` {ended}.")

    def clean(self) -> bool:
        """Remove every file that was put on the device, unless another run uses it."""
        self.lease = self.locked(os.path.join(self.base, "lease"), "Cleaning")
        shutil.rmtree(self.base, ignore_errors=True)
        return not os.path.exists(self.base)

    # The engine.

    def start(self, python: str, module: str, environment: dict[str, str]) -> int:
        """Start the engine.  Its stdout is forwarded in E frames, and its exit is reported."""
        self.end_engine()
        python = os.path.expanduser(python)
        if not os.access(python, os.X_OK):
            raise Refused(f"'{python}' is not a program there.")
        variables = dict(os.environ, TMPDIR=self.run, WORKBENCH_CACHE=os.path.join(self.base, "cache"), **environment)
        pipe = subprocess.PIPE
        with open(os.path.join(self.run, "engine.log"), "wb") as log:
            self.engine = engine = subprocess.Popen(
                [python, "-P", "-m", module],
                stdin=pipe,
                stdout=pipe,
                stderr=log,
                cwd=self.run,
                env=variables,
                start_new_session=True,
                preexec_fn=die_with_us,
            )
        mail: Any = queue.SimpleQueue()
        self.to_engine = mail
        self.say("started", pid=engine.pid)
        in_background(self.feed, engine, mail)
        self.engine_reader = threading.Thread(target=self.pass_on, args=(engine,), daemon=True)
        self.engine_reader.start()
        return engine.pid

    def feed(self, engine: Any, mail: Any) -> None:
        """Write to the engine's stdin.  An engine that does not read blocks nobody else."""
        try:
            while True:
                part = mail.get()
                if part is None:
                    return
                while part:
                    part = part[os.write(engine.stdin.fileno(), part) :]
        except OSError:
            pass

    def pass_on(self, engine: Any) -> None:
        """Forward the engine's output, and report how it ended."""
        while True:
            data = os.read(engine.stdout.fileno(), CHUNK)
            if not data:
                break
            self.send(ENGINE, data)
        kill(engine)
        code = engine.wait()
        with open(os.path.join(self.run, "engine.log"), "rb") as log:
            log.seek(max(0, os.path.getsize(log.name) - _LOG_TAIL))
            tail = log.read().decode(errors="replace")
        self.say("ended", pid=engine.pid, code=code, log=tail)

    def end_engine(self) -> None:
        """Kill the engine's process group and wait until its exit is reported."""
        engine, self.engine = self.engine, None
        if engine is not None:
            kill(engine)
            self.to_engine.put(None)
            if threading.current_thread() is not self.engine_reader:
                self.engine_reader.join(3.0)

    def signal_engine(self, name: str) -> None:
        """Kill, stop or continue the engine."""
        if self.engine is not None and self.engine.poll() is None:
            os.killpg(
                self.engine.pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}[name]
            )

    # Tensors between devices.  gloo neither encrypts nor knows whom it speaks to: it stays on the loopback, and relays
    # speak TLS 1.3.

    def expose(self, port: int) -> list[Any]:
        """Make a loopback port reachable for the run's other devices, and return the address and port at which they
        reach it.
        """
        ends = os.environ.get("SSH_CONNECTION", "").split()
        try:
            server = socket.create_server((ends[2], 0), family=socket.AF_INET6 if ":" in ends[2] else socket.AF_INET)
        except (OSError, IndexError):  # without a network
            server = socket.create_server(("127.0.0.1", 0))
        context = self.tls(ssl.PROTOCOL_TLS_SERVER)

        def join(other: Any) -> None:
            secure = context.wrap_socket(other, server_side=True)  # first, so that nobody else reaches gloo
            relay(socket.create_connection(("127.0.0.1", port)), secure)

        in_background(accept, server, join)
        return list(server.getsockname()[:2])

    def reach(self, host: str, port: int) -> int:
        """Return a port at LOWEST that is forwarded to another device's port."""
        server = socket.create_server((LOWEST, 0))
        context = self.tls(ssl.PROTOCOL_TLS_CLIENT)

        def join(local: Any) -> None:
            relay(local, context.wrap_socket(socket.create_connection((host, port), 10.0)))

        in_background(accept, server, join)
        return server.getsockname()[1]

    def tls(self, protocol: Any) -> Any:
        """Return the TLS settings for the run's devices: all have the run's one certificate and accept no other."""
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.load_cert_chain(self.place(CERTIFICATE))
        context.load_verify_locations(self.place(CERTIFICATE))
        return context

    def cpu_s(self) -> float:
        """Return the processor seconds that the engine has used."""
        engine = self.engine
        text = read_text(f"/proc/{engine.pid}/stat") if engine is not None else ""
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def check(name: str, fields: dict[str, Any]) -> None:
    """Raise Refused for an operation that is not in the table, or a field that does not fit."""
    if name not in OPERATIONS:
        raise Refused(f"It knows no '{name[:40]}'.")
    for field, value in fields.items():
        rule = OPERATIONS[name].get(field)
        if rule is bool:
            fits = isinstance(value, bool)
        elif isinstance(rule, str):
            fits = isinstance(value, str) and re.fullmatch(rule, value) is not None
        elif isinstance(rule, range):
            fits = type(value) is int and value in rule
        elif isinstance(rule, tuple):
            fits = type(value) in (int, float) and rule[0] <= value <= rule[1]
        else:
            fits = (
                rule == {}
                and isinstance(value, dict)
                and all(type(text) is str and "\0" not in text for text in value.values())
            )
        if not fits:
            raise Refused(f"It cannot {name} with such a '{field[:40]}'.")


def part_of(place: str, sha256: str) -> str:
    """Return the temporary path of a file while it is being received."""
    return f"{place}.{sha256[:16]}.part"


def explained(error: Any) -> dict[str, str]:
    """Return an error in words, and what to do about it."""
    number = getattr(error, "errno", None)
    if number == errno.ENOSPC:
        return {"error": "Its disk is full.", "todo": "Free some space there; `df -h` shows where."}
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        todo = "Let the user write to the home folder there; a worn card turns read-only."
        return {"error": f"It cannot write {error.filename or 'its files'}: {error.strerror}.", "todo": todo}
    return {"error": str(error)[:2000], "todo": getattr(error, "todo", "")}


def in_background(work: Any, *args: Any) -> threading.Thread:
    """Start work(*args) in a thread that does not keep the process alive."""
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def accept(server: Any, join: Any) -> None:
    """Serve each connection in its own thread."""

    def served(connection: Any) -> None:
        connection.settimeout(10.0)
        with connection, contextlib.suppress(OSError):  # also TLS errors, of clients without the certificate
            join(connection)

    while True:
        in_background(served, server.accept()[0])


def relay(plain: Any, secure: Any) -> None:
    """Forward bytes in both directions until one side ends.  One thread does both, because two must not use one TLS
    connection (Python 3.13.6).
    """
    with plain, secure:
        for end in (plain, secure):
            end.setblocking(False)
        with contextlib.suppress(OSError):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secure.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        out, back = b"", b""
        while True:
            readers = [end for end, pending in ((plain, out), (secure, back)) if not pending]
            writers = [end for end, pending in ((secure, out), (plain, back)) if pending]
            has_more = not back and secure.pending() > 0
            readable = select.select(readers, writers, [], 0.0 if has_more else None)[0]
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                if plain in readable:
                    out = plain.recv(CHUNK)
                    if not out:
                        return
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                if secure in readable or has_more:
                    back = secure.recv(CHUNK)
                    if not back:
                        return
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                out = out[secure.send(out) :] if out else out
            with contextlib.suppress(BlockingIOError):
                back = back[plain.send(back) :] if back else back


def kill(engine: Any) -> None:
    """Kill an engine with everything in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)


def memory_bytes(kind: str) -> int:
    """Return a value of /proc/meminfo in bytes, 0 if there is none."""
    return sum(
        int(line.split()[1]) * 1024 for line in read_text("/proc/meminfo").splitlines() if line.startswith(kind + ":")
    )


def has_atomics() -> bool | None:
    """Return whether an ARM processor has the atomic instructions of ARMv8.1 (LSE); None where /proc/cpuinfo does not
    say it.
    """
    lines = [
        line.split(":")[1].split() for line in read_text("/proc/cpuinfo").splitlines() if line.startswith("Features")
    ]
    return all("atomics" in features for features in lines) if lines else None


def torch_version(python: str) -> str:
    """Return the version of torch in an environment, '' if it has none.  torch is not imported: it may crash this
    processor.
    """
    command = [
        os.path.expanduser(python),
        "-P",
        "-c",
        "from importlib.metadata import version; print(version('torch'))",
    ]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=15.0
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    version = re.search(r"([\w.+!-]{1,60})\s*\Z", done.stdout)
    return version[1] if version else ""


def read_text(path: str) -> str:
    """Return a small file's text, '' if there is none."""
    try:
        with open(path) as file:
            return file.read(1 << 16)
    except (OSError, ValueError):
        return ""


_LIBC: Any = None
with contextlib.suppress(OSError):
    _LIBC = ctypes.CDLL(None)


def die_with_us() -> None:
    """Let the kernel kill the engine if the agent is killed (PR_SET_PDEATHSIG; Linux)."""
    if sys.platform == "linux" and _LIBC is not None:
        _LIBC.prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    Agent(os.path.expanduser("~")).serve()
