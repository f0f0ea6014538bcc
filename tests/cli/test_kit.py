"""`workbench kit` with real OpenSSH servers, without a network: `ssh` reaches `sshd -i` through a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssh_hosts import WHY_NOT, Hosts
from typer.testing import CliRunner

from workbench.cli.app import app


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    made = Hosts(tmp_path, ("alpha", "beta"))
    monkeypatch.setenv("PATH", made.path)
    yield made
    made.close()


def kit(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["kit", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_from_addresses_to_devices_that_are_ready_and_clean_again(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2 devices" in kit("init", "alpha", "beta")
    refused = kit("check", code=2)
    assert refused.count("host key is not known yet") == 2 and "--trust" in refused

    trusting = kit("check", "--trust", code=2)
    assert trusting.count("trusted ED25519 SHA256:") == 2
    assert trusting.count("It has no libraries yet") == 2 and "kit setup" in trusting

    Path("kit.toml").write_text(Path("kit.toml").read_text().replace("[defaults]\n", f'[defaults]\npython = "{sys.executable}"\n'))
    found = json.loads(kit("check", "--json"))
    assert [one["problem"] for one in found] == ["", ""]
    assert found[0]["facts"]["cores"] >= 1 and abs(found[0]["facts"]["clock_off_s"]) < 60

    kit("setup")
    [code] = (hosts.home("alpha") / ".workbench-kit").glob("code-*")
    assert (code / "workbench/runtime/pipe_engine.py").is_file()
    assert "is ready already" in kit("setup")

    hosts.new_host_key("beta")
    assert "not the one that was trusted" in kit("check", code=2)
    kit("check", "--forget", "--trust")

    kit("clean")
    assert not list(hosts.home("alpha").iterdir()) and not list(hosts.home("beta").iterdir())


def test_a_host_that_refuses_is_named_with_what_to_do(hosts: Hosts) -> None:
    kit("init", "alpha", "nowhere.invalid")
    kit("check", "--trust", code=2)
    (hosts.folder / "keys-alpha").write_text("")
    (hosts.home("alpha") / ".workbench-kit").touch()
    found = kit("check", code=2)
    assert "It does not accept the key" in found and "ssh-copy-id" in found
    assert "nowhere" in found and "Its name is not known in this network" in found


def test_a_bad_kit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "No address is given" in kit("init", code=2)
    assert "named twice" in kit("init", "alpha", "alpha", code=2)
    assert "is not known" in kit("init", "alpha", "--model", "rpi-99", code=2)
    kit("init", "pi@10.0.0.4", "pi@10.0.0.5")
    assert "is there already" in kit("init", "alpha", code=2)
    Path("kit.toml").write_text(Path("kit.toml").read_text().replace("[defaults]\n", "[defaults]\nport = 99999\n"))
    assert "port" in kit("check", code=2)
