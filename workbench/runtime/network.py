"""Emulate the rates of links in the kernel: anonymous network namespaces joined by a bridge, with HTB at both ends of
every veth.

Devices whose links are paced instead share one namespace with nothing but a loopback, where that is allowed: gloo has
no authentication, and on this machine's own loopback any other user could connect to it.
A holder process (`python -m workbench.runtime.network FOLDER`) owns the namespaces.  The caller therefore needs no
privileges and may have threads.  Nothing is left behind: the namespaces disappear when the holder and the engines end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import select
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.errors import RuntimeSetupError
from workbench.core.run_folder import child_environment
from workbench.core.serial import from_json, to_json
from workbench.runtime.namespaces import (
    CLONE_NEWNET,
    CLONE_NEWUSER,
    become_root_of_new_user_namespace,
    enter,
    has_network_privilege,
    unshare,
)

Fidelity = Literal["kernel", "paced"]

START_S = 15.0
"""Within which the holder of the namespaces answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSupport:
    """The link emulation that this machine supports.

    reason: why it does not support more.  remedy: how to get more.  private: whether the devices have their own
    network, which other users of this machine cannot reach.
    """

    fidelity: Fidelity
    reason: str
    remedy: str = ""
    private: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One device's end of the network.  The paths are entered with setns: the user namespace (if any) first."""

    network_path: str
    user_path: str
    interface: str
    address: str

    def enter(self) -> None:
        """Move this process into the namespaces.  It must have only one thread.  Raises OSError."""
        # Open both before entering the user namespace, which changes our access to /proc.
        network = os.open(self.network_path, os.O_RDONLY | os.O_CLOEXEC)
        if self.user_path:
            user = os.open(self.user_path, os.O_RDONLY | os.O_CLOEXEC)
            enter(user, CLONE_NEWUSER)
            os.close(user)
        enter(network, CLONE_NEWNET)
        os.close(network)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The holder's report once all links are up."""

    endpoints: tuple[Endpoint, ...]
    unprivileged: bool


class EmulatedNetwork:
    """The namespaces and links of one cluster; close it.  endpoints[rank]: the network end of that device's engine."""

    def __init__(self, holder: subprocess.Popen[str], layout: Layout) -> None:
        self._holder, self.holder_pid = holder, holder.pid
        self.endpoints = layout.endpoints
        self.unprivileged = layout.unprivileged

    @classmethod
    def create(cls, cluster: Cluster, folder: Path, fidelity: Fidelity = "kernel") -> EmulatedNetwork:
        """Set up the links, or only a private loopback for all devices (fidelity 'paced').

        `folder` shows in `ps` to which run the holder belongs.  Raises RuntimeSetupError.
        """
        request = f"A network of {cluster.in_words} in network namespaces was asked for."
        if sys.platform != "linux":
            raise RuntimeSetupError(request, f"They need Linux; this is {sys.platform}.", "Use fidelity='paced'.")
        holder = subprocess.Popen(
            [sys.executable, "-m", "workbench.runtime.network", str(folder), fidelity],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # protects it from Ctrl-C in the terminal
            env=child_environment(),
        )
        assert holder.stdin is not None and holder.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                holder.stdin.write(to_json(cluster, indent=-1) + "\n")
                holder.stdin.flush()
            if not select.select([holder.stdout], [], [], START_S)[0]:
                raise RuntimeSetupError(
                    request,
                    f"The process that holds them said nothing for {START_S:g} s.",
                    "Try again, or use fidelity='paced'.",
                )
            answer = holder.stdout.readline()
            if not answer.startswith("{"):
                _, complaint = holder.communicate(timeout=START_S)
                raise RuntimeSetupError(
                    request,
                    f"The system refused: {(complaint.strip().splitlines() or ['no reason given'])[-1]}.",
                    "Run as root, allow unprivileged user namespaces, or use fidelity='paced'.",
                )
        except BaseException:
            _end(holder)
            raise
        return cls(holder, from_json(answer, Layout, source="the network holder's answer"))

    def shape(self, cluster: Cluster) -> None:
        """Set the links to the rates of another cluster of the same devices.  Raises RuntimeSetupError."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.write(to_json(cluster, indent=-1) + "\n")
        self._holder.stdin.flush()
        if not self._holder.stdout.readline():
            raise RuntimeSetupError(
                "Other rates of the emulated links were asked for.", "The process that holds them ended.", "Run again."
            )

    def close(self) -> None:
        """End the holder.  The namespaces disappear once the engines have ended too."""
        _end(self._holder)


def probe() -> NetworkSupport:
    """Test with two devices which links can be emulated here (takes a third of a second)."""
    if sys.platform != "linux":
        return NetworkSupport(fidelity="paced", reason=f"network namespaces need Linux; this is {sys.platform}")
    link = Link(bytes_per_s=12.5e6, latency_s=1e-4)
    devices = tuple(Device(name=name, flops_per_s=1e9, memory_bytes=1, link=link) for name in ("a", "b"))
    cluster, folder = Cluster(name="probe", devices=devices), Path("workbench-probe")

    def has_private_loopback() -> bool:
        try:
            EmulatedNetwork.create(cluster, folder, "paced").close()
        except (RuntimeSetupError, OSError):
            return False
        return True

    if importlib.util.find_spec("pyroute2") is None:
        reason = "the package 'pyroute2' is not installed"
        return NetworkSupport(fidelity="paced", reason=reason, private=has_private_loopback())
    try:
        with contextlib.closing(EmulatedNetwork.create(cluster, folder)) as network:
            how = "in a user namespace" if network.unprivileged else "as root"
            reason = f"network namespaces with HTB links work {how}; our transport adds latency"
            return NetworkSupport(fidelity="kernel", reason=reason, private=True)
    except (RuntimeSetupError, OSError) as error:
        reason = error.found if isinstance(error, RuntimeSetupError) else str(error)
        return NetworkSupport(
            fidelity="paced",
            reason=reason.rstrip("."),
            remedy="Run as root, or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1 or "
            "kernel.apparmor_restrict_unprivileged_userns=0), for links that the kernel shapes.",
            private=has_private_loopback(),
        )


def require_open_files(num_devices: int) -> None:
    """Raise RuntimeSetupError if a process may not open the files and sockets that it needs to emulate so many devices.

    The soft limit is raised as far as the hard one allows.  Measured in an engine: 12, and one for each device of each
    group that it is a member of.
    """
    num_files = 48 + 12 * num_devices
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        if hard != resource.RLIM_INFINITY and hard < num_files:
            request, problem = (
                f"{num_devices} devices were to be emulated.",
                f"A process may have {hard} open files here; {num_files} are needed.",
            )
            raise RuntimeSetupError(request, problem, "Raise the limit (ulimit -n 1024), or use fewer devices.")
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


def require_loopback() -> None:
    """Raise RuntimeSetupError if devices could not reach each other at 127.0.0.1 (a namespace whose loopback
    is down).
    """
    addresses = [address.address for interface in psutil.net_if_addrs().values() for address in interface]
    if "127.0.0.1" not in addresses:
        raise RuntimeSetupError(
            "Devices that talk over this machine's loopback interface were asked for.",
            "It has no address: the interface is down.",
            "Set it up: ip link set lo up",
        )


def _end(holder: subprocess.Popen[str]) -> None:
    if holder.poll() is None:
        holder.kill()
    holder.wait()
    for stream in (holder.stdin, holder.stdout, holder.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _hold(fidelity: str) -> None:
    """Main function of the holder: read a cluster, set up its links, report them; reshape them for each further cluster
    on stdin.
    """
    cluster = from_json(sys.stdin.readline(), Cluster, source="the caller's cluster")
    unprivileged = not has_network_privilege()
    if unprivileged:
        become_root_of_new_user_namespace()
    if fidelity == "paced":
        _hold_loopback(cluster.world_size, unprivileged)
        return
    from workbench.runtime.veth import build_links, shape_links

    ends = build_links(cluster)
    user_path = f"/proc/{os.getpid()}/ns/user" if unprivileged else ""
    endpoints = tuple(
        Endpoint(
            network_path=f"/proc/{os.getpid()}/fd/{end.descriptor}",
            user_path=user_path,
            interface=end.interface,
            address=end.address,
        )
        for end in ends
    )
    layout = to_json(Layout(endpoints=endpoints, unprivileged=unprivileged), indent=-1)
    print(layout, flush=True)
    for line in sys.stdin:
        shape_links(from_json(line, Cluster, source="the caller's cluster"), [end.descriptor for end in ends])
        print(flush=True)


def _hold_loopback(world_size: int, unprivileged: bool) -> None:
    import fcntl  # not on every system

    unshare(CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP_RUNNING))
    namespaces = f"/proc/{os.getpid()}/ns"
    end = Endpoint(
        network_path=f"{namespaces}/net",
        user_path=f"{namespaces}/user" if unprivileged else "",
        interface="lo",
        address="127.0.0.1",
    )
    print(to_json(Layout(endpoints=(end,) * world_size, unprivileged=unprivileged), indent=-1), flush=True)
    for _ in sys.stdin:  # other rates: paced links are not the kernel's
        print(flush=True)


_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41


if __name__ == "__main__":
    try:
        _hold(sys.argv[2])
    except OSError as failure:
        sys.exit(f"{failure.strerror or failure}")
