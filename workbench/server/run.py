"""Run the HTTP application on a socket until a signal ends it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import uvicorn

from workbench.core.errors import ConfigError
from workbench.server.app import Offer, application

GRACE_S = 1
"""Seconds that texts under way get at the end."""


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a socket, before any model is loaded.  Raises ConfigError if the address or port cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, port))
            opened.listen(128)
        except OSError as error:
            raise ConfigError(
                f"A server at {host}, port {port}, was asked for.",
                f"{error.strerror or error}.",
                "Choose another --port or --host.",
            ) from error
        yield opened


def run(offer: Offer, opened: socket.socket, hosts: Sequence[str]) -> None:
    """Answer requests until Ctrl-C or SIGTERM.  hosts: names by which the server may be called."""
    application_ = application(replace(offer, hosts=hosts))
    config = uvicorn.Config(application_, log_level="error", lifespan="off", timeout_graceful_shutdown=GRACE_S)
    uvicorn.Server(config).run(sockets=[opened])
