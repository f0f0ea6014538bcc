"""Hosts with faults, scripted: `workbench kit check` names each one's mend, and ends when told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from in_process import kit
from ssh_hosts import over_pipes

from tests.waiting import LIMIT_S, wait_for
from workbench.cli.doctor import TORCH_FOR_ARMV8_0
from workbench.cli.output import INTERRUPTED
from workbench.core.cluster import Device
from workbench.runtime import ssh_login
from workbench.runtime.ssh import Connection


def refusing(log: str, code: int = 255, said: str = "") -> str:
    """Return a shell's line that behaves like ssh.  log: what ssh itself writes; said: what comes from the device's
    stderr."""
    return f"echo '{log}' >>$0; echo '{said}' >&2; exit {code}"


def processor(features: str, torch: str) -> str:
    """Return what makes a host an aarch64 one with these features and this torch."""
    text = "".join(
        f"processor\t: {core}\nBogoMIPS\t: 108.00\nFeatures\t: {features}\nCPU architecture: 8\n\n" for core in range(4)
    )
    return (
        f"import builtins, io, platform, subprocess, types\nread, run, text = open, subprocess.run, {text!r}\n"
        "platform.machine = lambda: 'aarch64'\n"
        "builtins.open = lambda path, *more, **named: io.StringIO(text) if path == '/proc/cpuinfo' else "
        "read(path, *more, **named)\n"
        "def said(command, **named):\n"
        f"    return types.SimpleNamespace(stdout='{torch}\\n') if 'importlib.metadata' in command[-1] else "
        "run(command, **named)\n"
        "subprocess.run = said"
    )


def telling(change: str) -> str:
    """Return what makes an agent's messages other ones.  change: of `said`, the fields of a message, or `found` in
    it."""
    return (
        "import json\nreal = json.dumps\ndef dumps(said):\n    found = said.get('found')\n"
        f"    found = found if isinstance(found, dict) else {{}}\n    {change}\n    return "
        "real(said)\njson.dumps = dumps"
    )


CHANGED_KEY = "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @"
LOGGED_IN = 'Authenticated to h ([10.0.0.4]:22) using "publickey".'
# what the host does: a shell's line in place of ssh, or what its Python runs before the agent; problem; mend
FAULTY = {
    "no key": (refusing("pi@h: Permission denied (publickey)."), "It does not accept the key.", "ssh-copy-id"),
    "another host key": (refusing(CHANGED_KEY), "not the one that was trusted", "--forget"),
    "imitates ssh": (
        refusing(LOGGED_IN, 255, CHANGED_KEY),
        "ends it with status 255 before Python starts.",
        "ordinary shell",
    ),
    "closed port": (
        refusing("ssh: connect to host h port 22: Connection refused"),
        "Nothing listens",
        "enable --now ssh",
    ),
    "no Python": (
        refusing(LOGGED_IN, 127, "sh: 1: exec: python3: not found"),
        "It has no python3.",
        "apt install python3",
    ),
    "no shell": (
        f"echo This account is not available.; {refusing(LOGGED_IN, 1, 'Keep out.')}",
        "says: This account is not",
        "chsh",
    ),
    "hot": (
        telling("'cores' in found and found.update(temperature_c='hot')"),
        "Expected `float | null`, got `str`",
        "same version",
    ),
    "much memory": (
        telling("'cores' in found and found.update(memory_bytes=2**70)"),
        "at `$.memory_bytes`",
        "same version",
    ),
    "no greeting": (telling("said = [said]"), "something else than a message of the agent", "same version"),
    "other number": (telling("said['id'] += 100"), "was not asked for", "same version"),
    "nests": (
        telling("real = lambda said: '[' * 100_000"),
        "something else than a message of the agent",
        "same version",
    ),
    "escapes": (
        "import os\ndef mkdir(path, mode=0): raise OSError('\\x1b[2J\\n  -> all is well')\nos.mkdir = mkdir",
        "\\x1b[2J\\n  -> all is well",
        "kit check",
    ),
    "Python 3.9": (
        "import sys, platform\nsys.version_info = (3, 9, 2, 'final', 0)\nplatform.python_version = lambda: '3.9.2'",
        "Its Python is 3.9.2; 3.11 or later is needed.",
        "Install a newer one",
    ),
    "full disk": (
        "import errno, os\ndef mkdir(path, mode=0): raise OSError(errno.ENOSPC, 'No space left on device', "
        "path)\nos.mkdir = mkdir",
        "Its disk is full.",
        "Free some space",
    ),
    "hardly any disk": (
        "import os, types\nos.statvfs = lambda path: types.SimpleNamespace(f_bavail=3000, f_frsize=4096)",
        "12 MB of disk are free",
        "Free some space",
    ),
    "read-only home": (
        "import errno, os\ndef mkdir(path, mode=0): raise OSError(errno.EROFS, 'Read-only file system', "
        "path)\nos.mkdir = mkdir",
        ".workbench-kit: Read-only file system",
        "write to the home folder",
    ),
    "50 MB of memory": (
        "import builtins, io\nreal, text = open, 'MemTotal: 900000 kB\\nMemAvailable: 50000 kB\\n'\n"
        "builtins.open = lambda path, *more, **named: io.StringIO(text) if path == '/proc/meminfo' else "
        "real(path, *more, **named)",
        "51 MB of memory are free",
        "End other programs",
    ),
    "clock off by a day": (
        "import time\nreal = time.time\ntime.time = lambda: real() + 86400",
        "Its clock is off by 86",  # 86,400 s, or what half a slow round trip makes of them
        "timedatectl set-ntp true",
    ),
    "a Raspberry Pi 4 with torch 2.10": (
        processor("fp asimd evtstrm crc32 cpuid", "2.10.0+cpu"),
        "torch 2.10.0+cpu crashes on its processor (ARMv8.0, no atomics).",
        f"Run: {sys.executable} -m pip install torch=={TORCH_FOR_ARMV8_0} there.",
    ),
    "a Raspberry Pi 4 with torch 2.9": (processor("fp asimd evtstrm crc32 cpuid", "2.9.1"), "", ""),
    "a Raspberry Pi 5 with torch 2.10": (processor("fp asimd evtstrm aes crc32 atomics fphp", "2.10.0"), "", ""),
    "printing .bashrc": ("print('Welcome!\\n' * 100, flush=True)", "", ""),
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """`kit check --json` of a kit of all faulty hosts, by their names."""
    folder = tmp_path_factory.mktemp("faulty")

    def command(device: Device, *, trusts_new: bool = False) -> list[str]:
        doing = FAULTY[device.name][0]
        words = over_pipes(folder)(device)
        return ["sh", "-c", doing, ssh_login.SSH_LOG] if "exit" in doing else [*words[:-1], f"{doing}\n{words[-1]}"]

    described = [f'[[device]]\nname = "{name}"\naddress = "h{number}"\n' for number, name in enumerate(FAULTY)]
    with_python = [text if "any disk" in text else f'{text}python = "{sys.executable}"\n' for text in described]
    (folder / "kit.toml").write_text('[defaults]\nmodel = "rpi-4b-m"\n' + "".join(with_python))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ssh_login, "agent_command", command)
        patched.setattr(Connection.open, "__defaults__", ("", LIMIT_S))  # all begin at once, and the host may be busy
        patched.setattr("workbench.cli.kit.ANSWER_S", LIMIT_S)
        patched.setenv("WORKBENCH_CACHE", str(folder / "cache"))
        return {
            finding["device"]: finding
            for finding in json.loads(kit("check", "--json", "--file", str(folder / "kit.toml"), code=2))
        }


@pytest.mark.parametrize("host", FAULTY)
def test_each_fault_of_a_host_is_one_sentence_with_its_mend(host: str, checked: dict[str, dict[str, Any]]) -> None:
    _, problem, todo = FAULTY[host]
    result = checked[host]
    assert problem in result["problem"] and todo in result["todo"]
    assert bool(result["problem"]) == bool(problem)


def test_a_check_ends_when_it_is_told_although_a_device_keeps_it_waiting(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep 600\n")
    (tmp_path / "ssh").chmod(0o755)
    described = "".join(f'[[device]]\nname = "{name}"\naddress = "{name}"\n' for name in ("alpha", "beta", "gamma"))
    (tmp_path / "kit.toml").write_text(f'[defaults]\nmodel = "rpi-4b-m"\n{described}')
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    patiently = (  # so that what ends is not the wait for a login
        "import sys\nfrom workbench.__main__ import main\nfrom workbench.runtime.ssh import Connection\n"
        "Connection.open.__defaults__ = ('', 1e6)\nmain()"
    )
    command = [sys.executable, "-c", patiently, "kit", "check", "--file", str(tmp_path / "kit.toml")]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as check:
        wait_for((tmp_path / "asked").exists, "a login")
        check.terminate()
        text = check.communicate(timeout=LIMIT_S)[0]
        assert check.returncode == INTERRUPTED and "Interrupted." in text and "Traceback" not in text
