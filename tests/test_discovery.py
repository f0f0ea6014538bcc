"""Devices find each other by multicast DNS; here on the loopback alone."""

from __future__ import annotations

import os

import pytest
from in_process import call

from tests.waiting import wait_for
from workbench.core.errors import ConfigError
from workbench.runtime import discovery
from workbench.runtime.discovery import Candidate, about_this_machine, announced, discover

LOOPBACK = ["127.0.0.1"]


def seen(name: str) -> Candidate | None:
    return next((candidate for candidate in discover(1.5, interfaces=LOOPBACK) if candidate.name == name), None)


def is_taken(name: str) -> str:
    """Return what the refusal of a name says; '' if it could be announced, as where no answer comes in time."""
    try:
        with announced(name, {}, interfaces=LOOPBACK):
            return ""
    except ConfigError as error:
        return str(error)


def test_a_device_that_announces_itself_is_found_with_what_it_says() -> None:
    name = f"device-{os.getpid()}"
    about = about_this_machine()
    with announced(name, about, interfaces=LOOPBACK) as addresses:
        assert addresses == "127.0.0.1"
        result = wait_for(lambda: seen(name), f"an announcement of {name}")
        assert result is not None
        assert (result.address, result.port, dict(result.about)) == ("127.0.0.1", 22, about)
        assert set(about) == {"cores", "memory_mb", "machine", "python", "framework", "battery", "version"}
        refusal = wait_for(lambda: is_taken(name), "a refusal of the name")
        assert f"'{name}' was asked for. Another device in this network has that name" in refusal
    wait_for(lambda: not seen(name), f"an end of {name}")


def test_what_is_seen_is_shown_as_text_and_is_a_candidate_only(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = Candidate("[red]al\x1b[31mpha", "10.0.0.4", 22, {"cores": "4", "version": "\x07" * 100})
    monkeypatch.setattr(discovery, "discover", lambda: (hostile,))
    answer = call("devices", "--discover", columns=200)
    assert (
        answer.exit_code == 0
        and "[red]al" in answer.stdout
        and "\x1b" not in answer.stdout
        and "\x07" not in answer.stdout
    )
    assert (
        "kit init USER@10.0.0.4" in answer.stdout
        and "candidate" in answer.stdout
        and "has the addresses" not in answer.stdout
    )
    twins = [Candidate("pi", f"10.0.0.{at}", 22, {}) for at in (4, 5)]
    monkeypatch.setattr(discovery, "discover", lambda: (*twins, hostile._replace(address="10.0.0.6")))
    text = call("devices", "--discover", columns=200).stdout
    assert "'pi' has the addresses 10.0.0.4, 10.0.0.5. Take one for each device" in text and "alpha' has" not in text
    monkeypatch.setattr(discovery, "discover", lambda: ())
    assert "--announce" in call("devices", "--discover").stdout
