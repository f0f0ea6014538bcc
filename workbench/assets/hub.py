"""Check within seconds whether the hub answers; the hub's client would retry for minutes."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

_WAIT_S = 3.0


def hub_endpoint() -> str:
    """Return the hub's address ($HF_ENDPOINT or the public one)."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hub_is_reachable(wait_s: float = _WAIT_S) -> bool:
    """Return whether the hub's host (or the proxy to it) accepts a connection; False in offline
    mode ($HF_HUB_OFFLINE).
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    parts = urlsplit(proxy or hub_endpoint())
    try:
        socket.create_connection(
            (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)), wait_s
        ).close()
    except OSError:
        return False
    return True
