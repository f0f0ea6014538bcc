"""Whether the hub answers."""

import socket

import pytest

from workbench.assets.hub import hub_endpoint, hub_is_reachable


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def test_a_listening_endpoint_is_reachable_and_a_closed_one_is_not(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # nobody else listens there while it is bound
        port = server.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert hub_endpoint().endswith(str(port)) and not hub_is_reachable()
        server.listen()
        assert hub_is_reachable()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert not hub_is_reachable()


def test_a_proxy_counts_instead_of_the_hub(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub_is_reachable()
