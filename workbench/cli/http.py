"""`workbench serve --http`: the HTTP server around a model, in one process or on devices, until it is interrupted."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from workbench.cli.output import say
from workbench.core.catalogue import load_cluster
from workbench.core.job import Fidelity

LOOPBACK = "127.0.0.1"
OF_BOTH = {"model", "cluster", "fidelity", "method", "option"}
OF_HTTP = {*OF_BOTH, "http", "host", "port", "token", "system", "draft"}
_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve_http(
    model: str,
    cluster: str | None,
    fidelity: Fidelity,
    *,
    method: str,
    options: Mapping[str, Any],
    draft: str,
    host: str,
    port: int,
    token: str,
) -> None:
    """Serve until Ctrl-C or a signal to end.  cluster: the devices that compute; None: this process."""
    described = None if cluster is None else load_cluster(cluster)
    from workbench.server.offers import offered
    from workbench.server.run import listening, run

    if host not in _LOCAL and not token:
        token = secrets.token_urlsafe(16)
    with listening(host, port) as socket, ExitStack() as stack:
        offer = stack.enter_context(
            offered(model, described, fidelity, token=token, say=say, method=method, options=options, draft=draft)
        )
        hosts = [*_LOCAL, "[::1]"] if host in _LOCAL else ["*"]
        name = f"http://{host if ':' not in host else f'[{host}]'}:{socket.getsockname()[1]}"
        say(f"Serving {offer.name} at {name}/v1 and a chat page at {name}/ until Ctrl-C")
        if token:
            say(f"Token       {token}")
        run(offer, socket, hosts)
