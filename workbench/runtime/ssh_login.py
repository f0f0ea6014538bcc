"""Log in to a device with the system's ssh: the command, the host keys that are trusted, and the reason if it fails.

ssh writes its own messages into a log (-E), apart from the device's stderr.  Only the log is read for reasons, and only
up to the login, so that a device cannot make its own text look like ssh's.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from workbench.assets.fetch import cache_folder
from workbench.core.cluster import Device
from workbench.core.errors import RuntimeSetupError
from workbench.core.serial import shown

SSH_LOG = "{log}"
"""Stands in a command for the file to which ssh writes its messages."""
BEGAN = b"<workbench begins>\n"
"""The loader's first words on stderr: what stands before them is not the agent's, but a banner or a login shell's."""
_LOADER = (
    f'import os;os.write(2,b"{BEGAN.decode()[:-1]}\\n");'
    "r=lambda n:(lambda c:c+r(n-len(c)) if c and n>len(c) else c)(os.read(0,n));exec(r(int(r(8))))"
)
"""Reads the agent's length, then the agent, and runs it."""


def known_hosts() -> Path:
    """Return the file of the host keys that were trusted."""
    return cache_folder() / "kit" / "known_hosts"


def agent_command(device: Device, *, trusts_new: bool = False) -> list[str]:
    """Return the command that logs in and starts the agent's loader.

    trusts_new: whether to accept a host key that is not known yet.
    Raises RuntimeSetupError for a missing key file.
    """
    if trusts_new:
        known_hosts().parent.mkdir(parents=True, exist_ok=True)
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": "10",
        "LogLevel": "VERBOSE",  # says when the login has succeeded
        "ServerAliveInterval": "2",
        "ServerAliveCountMax": "3",
        "StrictHostKeyChecking": "accept-new" if trusts_new else "yes",
        "UserKnownHostsFile": f'"{known_hosts()}"',
        "GlobalKnownHostsFile": "none",
        "HostKeyAlias": _host_key_name(device),  # whatever name ~/.ssh/config gives the host
        "HashKnownHosts": "no",
        "UpdateHostKeys": "no",
        "ControlPath": "none",
        "ClearAllForwardings": "yes",
    }
    words = ["ssh", "-T", "-E", SSH_LOG, *(f"-o{name}={value}" for name, value in options.items())]
    if device.port is not None:
        words += ["-p", str(device.port)]
    if device.key:
        key = Path(os.path.expanduser(device.key))
        if not key.is_file():
            request, problem = (
                f"Device '{device.name}' was to be reached over SSH.",
                f"There is no key file '{shown(device.key)}'.",
            )
            raise RuntimeSetupError(request, problem, "Name your private key with key = in the kit's file.")
        words += ["-i", str(key)]
    return [*words, "--", device.address or device.name, f"exec python3 -I -c '{_LOADER}'"]


def with_log(command: Sequence[str], log: str) -> list[str]:
    """Return a command whose ssh writes its messages into a file."""
    return [log if word == SSH_LOG else word for word in command]


def fingerprints(device: Device) -> tuple[str, ...]:
    """Return the fingerprints of a device's trusted host keys."""
    listing = _keygen(device, "-l").splitlines()
    return tuple(
        " ".join(line.split()[1:2] + line.split()[-1:]) for line in listing if line and not line.startswith("#")
    )


def forget_host(device: Device) -> None:
    """Forget a device's host keys."""
    _keygen(device, "-R")
    known_hosts().with_suffix(".old").unlink(missing_ok=True)


def _host_key_name(device: Device) -> str:
    """Return the name under which a device's host key is stored."""
    host = (device.address or device.name).rpartition("@")[2]
    return host if device.port in (None, 22) else f"[{host}]:{device.port}"


def _keygen(device: Device, option: str) -> str:
    name = _host_key_name(device)
    words = ["ssh-keygen", "-f", str(known_hosts()), *(("-R", name) if option == "-R" else ("-l", "-F", name))]
    return subprocess.run(words, capture_output=True, text=True).stdout if known_hosts().exists() else ""


class Failure(NamedTuple):
    """Why a device cannot be used, and what to do about it."""

    found: str
    todo: str


class Login(NamedTuple):
    """The state of a login.

    log: ssh's messages.  said: the device's stdout before the agent began.  errors: its stderr.
    code: ssh's exit status, None if it runs.  has_begun: whether the agent has answered.
    """

    log: str
    code: int | None
    said: str = ""
    errors: str = ""
    has_begun: bool = False


def failure_of(login: Login, command: Sequence[str] = ()) -> Failure:
    """Return why a login failed, or why its connection ended.

    command: the command that logged in, whose keys are examined.
    """
    # A server's farewell may have several lines, in which it may write anything.
    parts = re.split(r"(?m)^(?:Received disconnect|Disconnected) from ", login.log, maxsplit=1)
    before, has_logged_in, after = parts[0].partition("Authenticated to ")
    errors = login.errors.rpartition(BEGAN.decode())[2] if BEGAN.decode() in login.errors else ""
    if login.has_begun:
        last = _last(errors) or _last(after.partition("\n")[2])
        return Failure(
            f"The connection ended with status {login.code}{last and f': {last}'}.",
            "Check power and cable, or run again.",
        )
    if has_logged_in:
        return _of_shell(login, errors)
    for pattern, problem, todo in _MEANINGS:
        if match := re.search(rf"(?m)^(?:{pattern})", before):
            failure = Failure(match.expand(problem), todo)
            return (_of_keys(command) or failure) if "Permission denied" in pattern else failure
    if "UNKNOWN port 65535" in before:  # a command stands between, such as a jump host's ssh
        unknown = re.search(r"(?m)^(?:Host key verification failed|No \S+ host key is known)", login.errors)
        if unknown:
            todo = (
                "Log in there once by hand (ssh JUMPHOST), and compare and accept its key: --trust is for the "
                "devices alone."
            )
            return Failure("The key of a host on the way to it, such as a jump host, is not trusted.", todo)
        last = _last(login.errors)
        return Failure(f"The way to it is closed{last and f': {last}'}.", "Try it by hand: ssh ADDRESS.")
    last = _last(login.log) or "it said nothing"
    if login.code is None:
        return Failure(f"It did not answer: {last}.", "Check power, cable and address.")
    return Failure(f"ssh ended with status {login.code}: {last}.", "Try it by hand: ssh ADDRESS.")


def _of_shell(login: Login, errors: str) -> Failure:
    """Return why a login that succeeded did not start the agent."""
    if login.code == 127:
        return Failure("It has no python3.", "Install Python 3.11 or later there: sudo apt install python3.")
    if login.code is None:
        todo = "Log in by hand (ssh ADDRESS), and see what waits, for example in ~/.bashrc or ~/.profile."
        return Failure("It accepts the login, but does not come to start Python.", todo)
    last = _last(errors) or _last(login.said)
    problem = (
        f"It accepts the login, but ends it with status {login.code} before Python "
        f"starts{last and f', and says: {last}'}."
    )
    return Failure(problem, "Give that user an ordinary shell there: sudo chsh -s /bin/bash USER.")


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if not line.startswith(("Transferred: ", "Bytes per second: "))]
    return shown((lines or [""])[-1].strip().rstrip("."), 200)


_UNREACHABLE = r"Connection timed out|Operation timed out|No route to host|Network is unreachable"
_MEANINGS = (
    (
        r"@ +WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED",
        "Its host key is not the one that was trusted.",
        "If you installed it again, replace its old key: workbench kit check --forget --trust; if not, find out who "
        "answers there.",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "Its host key is not known yet.",
        "Compare and accept it: workbench kit check --trust.",
    ),
    (
        r'Load key "([^"\n]*)": ([^\n]*)',
        r"The key file '\1' cannot be read: \2.",
        "Name your private key with key = in the kit's file.",
    ),
    (
        r"\S+: Permission denied|\S+: Too many authentication failures",
        "It does not accept the key.",
        "Copy your public key there: ssh-copy-id USER@HOST.",
    ),
    (
        r"ssh: connect to host [^\n]*: Connection refused",
        "Nothing listens at its SSH port.",
        "Switch SSH on there: sudo systemctl enable --now ssh.",
    ),
    (
        r"ssh: Could not resolve hostname",
        "Its name is not known in this network.",
        "Check the address, or give its IP address, such as pi@192.168.1.20.",
    ),
    (
        rf"ssh: connect to host [^\n]*: (?:{_UNREACHABLE})|Connection timed out|Connection to \S+ port \d+ timed out",
        "It cannot be reached.",
        "Check power, cable and address.",
    ),
)
"""Beginnings of lines in ssh's log, what each means, and what to do."""


def _of_keys(command: Sequence[str]) -> Failure | None:
    """Return the problem with the private keys that ssh could offer; None if it had a usable key, which the device did
    not accept.
    """
    if not command or Path(command[0]).name != "ssh":
        return None
    settings_command = [command[0], "-G", *command[1:-1]]
    settings: dict[str, list[str]] = {}
    for line in subprocess.run(settings_command, capture_output=True, text=True).stdout.splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name, []).append(value)
    agent = settings.get("identityagent", ["SSH_AUTH_SOCK"])[0]
    if agent != "none":
        environment = (
            os.environ if agent == "SSH_AUTH_SOCK" else os.environ | {"SSH_AUTH_SOCK": os.path.expanduser(agent)}
        )
        if subprocess.run(["ssh-add", "-l"], capture_output=True, env=environment).returncode == 0:
            return None
    keys = [path for path in map(os.path.expanduser, settings.get("identityfile", [])) if os.path.isfile(path)]
    if not keys:
        todo = (
            "Make one (ssh-keygen -t ed25519) and copy it there (ssh-copy-id USER@HOST), or name yours with key = in "
            "the kit's file."
        )
        return Failure("This machine has no private key to offer it.", todo)
    locked = [key for key in keys if _has_passphrase(key)]
    if len(locked) < len(keys):
        return None
    problem = f"The key '{shown(locked[0])}' has a passphrase, and no ssh-agent holds it."
    return Failure(problem, f'Start an agent and add the key: eval "$(ssh-agent)"; ssh-add {shown(locked[0])}.')


def _has_passphrase(key: str) -> bool:
    done = subprocess.run(
        ["ssh-keygen", "-y", "-P", "", "-f", key], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return done.returncode != 0 and "passphrase" in done.stderr
