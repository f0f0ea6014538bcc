"""Linux namespaces: enter one, create one, and check whether this process may."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000


def unshare(flags: int) -> None:
    """Move this thread into new namespaces.  Raises OSError if that is not allowed."""
    _call("unshare", ctypes.c_int(flags))


def enter(descriptor: int, flags: int) -> None:
    """Move this thread into the namespace behind an open /proc/PID/fd/N or /proc/PID/ns/... descriptor.  Raises
    OSError.
    """
    _call("setns", ctypes.c_int(descriptor), ctypes.c_int(flags))


def become_root_of_new_user_namespace() -> None:
    """Enter a new user namespace as its root.  The process must have one thread.  Raises OSError if that is not
    allowed.
    """
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def new_network_namespace() -> int:
    """Return a descriptor that keeps a new, anonymous network namespace alive.  This thread stays in its namespace."""
    original = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        unshare(CLONE_NEWNET)
        created = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        enter(original, CLONE_NEWNET)
    finally:
        os.close(original)
    return created


def has_network_privilege() -> bool:
    """Return whether this process can create network namespaces (effective CAP_SYS_ADMIN and CAP_NET_ADMIN)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            capabilities = int(line.split()[1], 16)
            return bool(capabilities >> 21 & 1 and capabilities >> 12 & 1)
    return False


def _call(name: str, *arguments: ctypes.c_int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
