"""Hosts for the tests of real devices: an agent over plain pipes, or a real OpenSSH server without a network (`ssh`
through `sshd -i`)."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import cluster_of
from tests.waiting import LIMIT_S
from workbench.assets.fetch import cache_folder
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster, Device
from workbench.core.errors import RuntimeSetupError
from workbench.runtime import ssh_devices
from workbench.runtime.ssh import Connection
from workbench.runtime.ssh_login import agent_command, forget_host

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
WHY_NOT = "" if SSHD and shutil.which("ssh") else "OpenSSH's server is not installed (apt install openssh-server)"


def real_cluster(names: Sequence[str] = ("alpha", "beta"), python: str = sys.executable, **fields: Any) -> Cluster:
    boards = {"flops_per_s": 3e10, "memory_bytes": 2 * 10**9, "address": list(names), "python": python}
    return cluster_of(names, name="kit", bytes_per_s=125e6, latency_s=1e-4, **boards | fields)


def home(folder: Path, name: str) -> Path:
    return folder / f"home-{name}"


def over_pipes(homes: Path) -> Callable[[Device], list[str]]:
    """Return what starts a device's agent as a child of this process, with a home folder of its own."""

    def command(device: Device, *, trusts_new: bool = False) -> list[str]:
        place = home(homes, device.name)
        place.mkdir(exist_ok=True)
        words = shlex.split(agent_command(device)[-1])
        return ["env", f"HOME={place}", sys.executable, *words[2:]]

    return command


class Hosts:
    """Real SSH servers, one a name, each with a home folder; `ssh` in the PATH of this process finds them.  No port is
    opened."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder = folder
        self._made: list[Path] = []
        if os.geteuid() == 0 and not Path("/run/sshd").exists():
            Path("/run/sshd").mkdir()
            self._made.append(Path("/run/sshd"))
        self._keygen("user")
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        settings = []
        for name in names:
            self._keygen(f"host-{name}")
            (self.home(name)).mkdir()
            (folder / f"keys-{name}").write_text((folder / "user.pub").read_text())
            self._write_config(name)
            settings.append(
                f"Host {name}\n  HostName {name}.invalid\n  User {user}\n"
                f"  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  IdentityAgent none\n"
                f"  ProxyCommand {SSHD} -i -f {folder}/sshd-{name} -E {folder}/log-{name}\n"
            )
        (folder / "config").write_text("".join(settings))
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        wrapper.chmod(0o755)

    @property
    def path(self) -> str:
        """A PATH in which `ssh` reaches these hosts."""
        return f"{self.folder}/bin:{os.environ['PATH']}"

    def home(self, name: str) -> Path:
        return home(self.folder, name)

    def trust(self, cluster: Cluster) -> None:
        for device in cluster.devices:
            forget_host(device)  # another test's
            deadline_s = time.monotonic() + LIMIT_S
            while True:
                connection = Connection(device.name, agent_command(device, trusts_new=True))
                try:
                    connection.open()
                    connection.close()
                    break
                except RuntimeSetupError:  # it may not listen yet
                    if time.monotonic() > deadline_s:
                        raise

    def new_host_key(self, name: str) -> None:
        for path in (self.folder / f"host-{name}", self.folder / f"host-{name}.pub"):
            path.unlink()
        self._keygen(f"host-{name}")

    def close(self) -> None:
        for path in self._made:
            with suppress(OSError):
                path.rmdir()

    def _keygen(self, name: str) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True)

    def _write_config(self, name: str) -> None:
        lines = [
            f"HostKey {self.folder}/host-{name}",
            f"AuthorizedKeysFile {self.folder}/keys-{name}",
            f"SetEnv HOME={self.home(name)}",
            "AuthenticationMethods publickey",
            "UsePAM no",
            "StrictModes no",
            "PidFile none",
            "PermitRootLogin yes",
            "PrintMotd no",
        ]
        (self.folder / f"sshd-{name}").write_text("\n".join(lines) + "\n")


_OUTER = """
set -e
ip link set lo up; ip link add br0 type bridge; ip addr add 10.77.0.254/24 dev br0; ip link set br0 up
number=0
for name in "$@"; do
    number=$((number + 1))
    unshare -nmupi --fork --kill-child --mount-proc sh {folder}/host.sh $name 10.77.0.$number &
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
    ip link add v$number type veth peer name eth0 netns $!
    ip link set v$number master br0 up
done
touch {folder}/up
cat  # until the tests end, however they do
"""
_HOST = """
set -e
until ip link set eth0 up 2>/dev/null; do sleep 0.02; done
ip addr add $2/24 dev eth0; ip link set lo up
mount --bind {folder}/passwd-$1 /etc/passwd
exec unshare -U --map-user=1000 --map-group=1000 {sshd} -D -f {folder}/sshd-$1 -E {folder}/log-$1
"""


class NetHosts(Hosts):
    """SSH servers in network namespaces of their own, joined by a bridge; with the process that holds them all ends."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        super().__init__(folder, names)
        shell = {"folder": folder, "sshd": SSHD}
        (folder / "outer.sh").write_text(_OUTER.format(**shell))
        (folder / "host.sh").write_text(_HOST.format(**shell))
        for name in names:
            (folder / f"passwd-{name}").write_text(f"pi:x:1000:1000::{self.home(name)}:/bin/sh\n")
            with open(folder / f"sshd-{name}", "a") as config:
                config.write("Port 2222\n")
        settings = [
            f"Host {name}\n  HostName 10.77.0.{number}\n  Port 2222\n  User pi\n  IdentityFile {folder}/user\n  "
            "IdentitiesOnly yes\n"
            f"  HostKeyAlias {name}\n  IdentityAgent none\n"
            for number, name in enumerate(names, start=1)
        ]
        (folder / "config").write_text("".join(settings))
        flags = ["-Urnm", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.process = subprocess.Popen(
            ["unshare", *flags, "sh", str(folder / "outer.sh"), *names], stdin=subprocess.PIPE, start_new_session=True
        )
        enter = f"nsenter -t {self.process.pid} -U -n --preserve-credentials"
        (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {enter} {shutil.which("ssh")} -F {folder}/config "$@"\n')

    def came_up(self) -> bool:
        while self.process.poll() is None:
            if (self.folder / "up").exists():
                return True
            time.sleep(0.02)
        return False

    def inside(self, *command: str) -> None:
        """Run a command where the hosts' bridge is."""
        subprocess.run(
            ["nsenter", "-t", str(self.process.pid), "-U", "-n", "--preserve-credentials", *command], check=True
        )

    def set_link(self, number: int, state: str) -> None:
        """Pull a host's cable ('down'), or put it back ('up')."""
        self.inside("ip", "link", "set", f"v{number}", state)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        super().close()


def best_hosts(folder: Path, names: tuple[str, ...]) -> Hosts:
    """Return servers with a network between them, or without one where namespaces are not allowed."""
    flags = ["-Urnm", "--pid", "--fork", "--mount-proc"]
    if (
        shutil.which("ip")
        and shutil.which("unshare")
        and not subprocess.run(["unshare", *flags, "true"], capture_output=True).returncode
    ):
        (folder / "net").mkdir()
        hosts = NetHosts(folder / "net", names)
        if hosts.came_up():
            return hosts
        hosts.close()
    (folder / "pipes").mkdir()
    return Hosts(folder / "pipes", names)


@contextmanager
def reachable(folder: Path, names: tuple[str, ...]) -> Iterator[tuple[Path, Hosts | None]]:
    """Let this process reach devices of these names: over OpenSSH and a network between them where they are to be had,
    else over pipes.

    Yields the folder of their homes, and the servers (None over pipes).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # as emulated devices have
        if WHY_NOT:
            patch.setattr(ssh_devices, "agent_command", over_pipes(folder))
            yield folder, None
            return
        hosts = best_hosts(folder, names)
        try:
            patch.setenv("PATH", hosts.path)
            hosts.trust(real_cluster(names))
            yield hosts.folder, hosts
        finally:
            hosts.close()


def bring_profiles(homes: Path, names: Sequence[str]) -> None:
    """Give devices the profiles measured so far: they are this machine."""
    for name in names:
        there = home(homes, name) / ".workbench-kit/cache/profiles"
        shutil.copytree(cache_folder() / "profiles", there, dirs_exist_ok=True)


def main(number: int, mbit_per_s: int, *command: str) -> int:
    """Run a command, by default the kit's benchmark, where a kit.toml names new servers with links of that rate."""
    from workbench.experiment import profile
    from workbench_studies.bench.kit import JOB

    names = tuple(f"pi{index}" for index in range(number))
    with tempfile.TemporaryDirectory(prefix="workbench-kit-") as temporary_directory:
        folder = Path(temporary_directory)
        hosts = best_hosts(folder, names)
        try:
            assert isinstance(hosts, NetHosts), "no network namespaces"
            for place in (
                "br0",
                *(f"v{index + 1}" for index in range(number)),
            ):  # what the laptop sends, and what each server receives
                hosts.inside(
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    place,
                    "root",
                    "tbf",
                    "rate",
                    f"{mbit_per_s}mbit",
                    "burst",
                    "256k",
                    "latency",
                    "50ms",
                )
            defaults = f'model = "rpi-4b-m"\nbandwidth_mbit_per_s = {mbit_per_s}\npython = "{sys.executable}"\n'
            devices = "".join(f'[[device]]\nname = "{name}"\naddress = "{name}"\n' for name in names)
            (folder / "kit.toml").write_text(f"[defaults]\n{defaults}{devices}")
            os.environ |= {"PATH": hosts.path, "OMP_NUM_THREADS": "1"}
            profile(
                JOB, load_cluster("laptop-equal"), "execute"
            )  # the servers are this machine, which is measured once
            bring_profiles(hosts.folder, names)
            hosts.trust(load_cluster(folder / "kit.toml"))
            return subprocess.run(command or [sys.executable, "-m", "workbench", "bench", "kit"], cwd=folder).returncode
        finally:
            hosts.close()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
