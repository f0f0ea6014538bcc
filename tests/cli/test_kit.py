"""`workbench kit` with real OpenSSH servers, without a network: `ssh` reaches `sshd -i` through a pipe."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_process import answer, kit
from ssh_hosts import WHY_NOT, Hosts, over_pipes

from tests.waiting import LIMIT_S
from workbench.cli import measure
from workbench.cli.doctor import TORCH_FOR_ARMV8_0
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Link
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.core.heat import Level
from workbench.runs.survey import DeviceRates, LinkRow, LinkSurvey
from workbench.runtime import discovery, ssh_login, ssh_setup
from workbench.runtime.discovery import Candidate
from workbench.runtime.frames import Greeting
from workbench.runtime.measuring import HeatSample
from workbench.runtime.ssh import Connection
from workbench.runtime.ssh_setup import index_options


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Connection.open, "__defaults__", ("", LIMIT_S))  # a login takes a busy host long
    monkeypatch.setattr("workbench.cli.kit.ANSWER_S", LIMIT_S)
    hosts = Hosts(tmp_path, ("alpha", "beta"))
    monkeypatch.setenv("PATH", hosts.path)
    yield hosts
    hosts.close()


def test_from_addresses_to_devices_that_are_ready_and_clean_again(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hosts.home("alpha") / ".bashrc").write_text("echo Welcome to alpha\n")
    assert "2 devices" in kit("init", "alpha", "beta")
    refused = kit("check", code=2)
    assert refused.count("host key is not known yet") == 2 and "--trust" in refused

    trusting = kit("check", "--trust", code=2)
    assert trusting.count("trusted ED25519 SHA256:") == 2
    assert trusting.count("It has no libraries yet") == 2 and "kit setup" in trusting

    Path("kit.toml").write_text(
        Path("kit.toml").read_text().replace("[defaults]\n", f'[defaults]\npython = "{sys.executable}"\n')
    )
    content = answer("kit", "check")
    assert [one["problem"] for one in content] == ["", ""]
    assert content[0]["facts"]["cores"] >= 1 and abs(content[0]["facts"]["clock_off_s"]) < 60

    assert "is ready already" in kit("setup")
    [code] = (hosts.home("alpha") / ".workbench-kit").glob("code-*")
    assert (code / "workbench/runtime/pipe_engine.py").is_file()
    subprocess.run(
        [sys.executable, "-P", "-c", "import workbench.tasks"], env={"PYTHONPATH": str(code)}, check=True
    )  # with its data
    assert "is ready already" in kit("upgrade")

    hosts.new_host_key("beta")
    assert "not the one that was trusted" in kit("check", code=2)
    kit("check", "--forget", "--trust")

    kit("clean")
    (hosts.home("alpha") / ".bashrc").unlink()
    assert not list(hosts.home("alpha").iterdir()) and not list(hosts.home("beta").iterdir())


def test_a_host_that_refuses_is_named_with_what_to_do(hosts: Hosts) -> None:
    kit("init", "alpha", "nowhere.invalid", "127.0.0.1")
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))
    Path("kit.toml").write_text(Path("kit.toml").read_text() + f"port = {closed.getsockname()[1]}\n")
    kit("check", "--trust", code=2)
    result = kit("check", code=2)
    assert "It has no libraries yet" in result
    (hosts.folder / "keys-alpha").write_text("")
    (hosts.home("alpha") / ".workbench-kit").touch()
    result = kit("check", code=2)
    assert "It does not accept the key" in result and "ssh-copy-id" in result
    assert "nowhere" in result and "Its name is not known in this network" in result
    assert "Nothing listens at its SSH port" in result and "systemctl enable --now ssh" in result
    closed.close()


def test_keys_and_jump_hosts_that_cannot_be_used_are_named(hosts: Hosts) -> None:
    with open(
        hosts.folder / "config", "a"
    ) as config:  # both are reached by way of alpha, whose key this user does not know
        config.write("Host beyond\n  ProxyJump alpha\n")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(hosts.folder / "locked")], check=True
    )
    (hosts.folder / "config").write_text(
        (hosts.folder / "config").read_text().replace(f"IdentityFile {hosts.folder}/user", "", 1)
    )
    kit("init", "alpha", "beta", "beyond")
    described = Path("kit.toml").read_text().replace('address = "beta"', 'address = "beta"\nkey = "~/.ssh/id_nowhere"')
    Path("kit.toml").write_text(
        described.replace('address = "alpha"', f'address = "alpha"\nkey = "{hosts.folder}/locked"')
    )
    kit("check", "--trust", code=2)
    results = {
        finding["device"]: (finding["problem"], finding["todo"])
        for finding in json.loads(kit("check", "--json", code=2))
    }
    assert "has a passphrase, and no ssh-agent holds it" in results["alpha"][0] and "ssh-add" in results["alpha"][1]
    assert results["beta"] == (
        "There is no key file '~/.ssh/id_nowhere'.",
        "Name your private key with key = in the kit's file.",
    )
    assert "such as a jump host, is not trusted" in results["beyond"][0] and "ssh JUMPHOST" in results["beyond"][1]


@pytest.mark.parametrize(
    ("word", "address", "port"),
    [
        ("pi@host:2222", "pi@host", 2222),
        ("pi@[::1]", "pi@::1", None),
        ("pi@[fe80::1%eth0]:2222", "pi@fe80::1%eth0", 2222),
        ("ssh://pi@host:2222/", "pi@host", 2222),
        ("fe80::1", "fe80::1", None),
        ("ann.lee@pi-0.local", "ann.lee@pi-0.local", None),
    ],
)
def test_addresses_are_taken_as_people_write_them(
    word: str, address: str, port: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kit("init", word)
    [device] = load_cluster("kit.toml").devices
    assert (device.address, device.port) == (address, port)
    if address != word:
        Path("kit.toml").write_text(f'[defaults]\nmodel = "rpi-4b-m"\n[[device]]\nname = "a"\naddress = "{word}"\n')
        with pytest.raises(ConfigError, match="the parts apart"):
            load_cluster("kit.toml")


BAD_ADDRESSES = (
    "-oProxyCommand=x",
    "x@-oProxyCommand=x",
    "$(touch x)",
    "a;b",
    "-F file",
    "%h",
    "pi@host:0",
    "pi@",
    "a b",
    "pi@host:99999",
)


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_what_is_no_address_is_refused_where_it_is_described(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is not the address of a device" in kit("init", "--", address, code=2)
    Path("kit.toml").write_text(f'[defaults]\nmodel = "rpi-4b-m"\n[[device]]\nname = "a"\naddress = "{address}"\n')
    with pytest.raises(ConfigError, match="is not the address of a device"):
        load_cluster("kit.toml")


@pytest.mark.parametrize("word", ["boards.txt", "./boards", "~/boards", "lists/boards.csv", "BOARDS.TXT"])
def test_a_file_of_addresses_that_is_not_there_is_no_device(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "There is no such file" in kit("init", word, code=2)
    assert not list(tmp_path.iterdir())


def test_a_bad_kit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "No address is given" in kit("init", code=2)
    assert "named twice" in kit("init", "alpha", "alpha", code=2)
    assert "Known are laptop-core, " in kit("init", "alpha", "--model", "rpi-99", code=2)
    kit("init", "pi@10.0.0.4", "pi@10.0.0.5")
    assert "is there already" in kit("init", "alpha", code=2)
    described = Path("kit.toml").read_text()
    Path("kit.toml").write_text(described.replace("pi@10.0.0.5", "ann@10.0.0.4"))
    assert "'10.0.0.4' and '10.0.0.5' have it" in " ".join(kit("check", code=2).split())
    Path("kit.toml").write_text(described.replace("[defaults]\n", "[defaults]\nport = 99999\n"))
    assert "port" in kit("check", code=2)


def test_a_kit_from_discovery_and_with_measured_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(discovery, "discover", lambda: ())
    assert "None announces its SSH" in kit("init", "--discover", code=2)
    result = (Candidate("pi0", "10.0.0.4", 22, {}), Candidate("pi1", "10.0.0.5", 2222, {}))
    monkeypatch.setattr(discovery, "discover", lambda: result)
    kit("init", "--discover", "--user", "ann")
    first, second = load_cluster("kit.toml").devices
    assert (first.address, first.port, second.address, second.port) == ("ann@10.0.0.4", None, "ann@10.0.0.5", 2222)

    slow, fast = Link(bytes_per_s=1e7, latency_s=2e-3), Link(bytes_per_s=1.25e8)
    rates = [
        DeviceRates(
            name=one.name,
            emulated=False,
            flops_per_s=7e9,
            memory_bytes_per_s=2e9,
            storage_bytes_per_s=4e7,
            storage_write_bytes_per_s=2e7,
            memory_bytes=10**9,
        )
        for one in (first, second)
    ]
    pairs = ((first.name, second.name, slow), (second.name, first.name, fast))
    rows = tuple(LinkRow(source=a, destination=b, described=fast, measured=link, samples=()) for a, b, link in pairs)
    monkeypatch.setattr(measure, "survey_devices", lambda cluster: (None, tuple(rates)))
    monkeypatch.setattr(
        measure, "survey_links", lambda cluster, fidelity: LinkSurvey(fidelity="real", rows=rows, at_once=2.0)
    )
    shown = kit("measure")
    assert re.search(r"10\.0\.0\.4 > 10\.0\.0\.5 +\S+ +80 ", shown) and "swap" not in shown
    assert load_cluster("kit.toml").link(0, 1) == slow
    assert load_cluster("kit.toml").medium == "wifi"
    hot = [HeatSample(10.0 * n, 7e9 if n < 3 else 4.2e9, 50.0 + 10 * n, n > 3) for n in range(5)]
    requests: list[float] = []
    monkeypatch.setattr(
        measure,
        "survey_sustained",
        lambda cluster, seconds: requests.append(seconds) or {device.name: tuple(hot) for device in cluster.devices},
    )
    rates[0] = replace(rates[0], installed_bytes=9 * 10**8, swap_bytes=10**8)
    shown = " ".join(kit("measure", "--sustained", "2").split())
    assert f"{first.name} has 900 MB of memory, and a plan may use 1,000: it would swap to a disk of 40 MB/s" in shown
    assert "7.0 4.2 50 to 90 40 s [[0, 1], [30, 0.6]]" in shown and requests == [120]
    curves = [device.sustained for device in load_cluster("kit.toml").devices]
    assert curves == [(Level(heat_s=0.0, speed=1.0), Level(heat_s=30.0, speed=0.6))] * 2
    assert "at least 0.001" in kit("measure", "--sustained", "0", code=2)
    assert "Only measure takes it" in kit("check", "--sustained", "1", code=2)
    rows = (replace(rows[0], measured=fast), replace(rows[1], measured=slow))
    for words in (["--measure"], ["--links"]):  # the same measurement, kept in the same way
        answer("devices", *words, "--cluster", "kit.toml")
    measured = load_cluster("kit.toml")
    assert measured.link(1, 0) == slow
    slow, fast = fast, slow
    assert [
        (
            device.flops_per_s,
            device.storage_bytes_per_s,
            device.storage_write_bytes_per_s,
            device.memory_bytes_per_s,
        )
        for device in measured.devices
    ] == [(7e9, 4e7, 2e7, 2e9)] * 2
    assert measured.link(0, 1) == slow and measured.link(1, 0) == fast
    rate_names = ("flops_per_s", "storage_bytes_per_s", "storage_write_bytes_per_s", "memory_bytes_per_s")
    reset = {"sustained": ()} | dict.fromkeys(rate_names, 0.5)
    assert [replace(device, **reset) for device in measured.devices] == [
        replace(device, **reset) for device in (first, second)
    ]


def test_a_kit_from_a_file_of_addresses_and_a_subnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.2", 0)) as server:
        monkeypatch.setattr(discovery, "SSH_PORT", server.getsockname()[1])
        (tmp_path / "boards.txt").write_text("# the class's\nann@pi0.local  # the first\n\nbob@127.0.0.0/29\n")
        kit("init", "boards.txt", "pi@10.0.0.4")
    assert [device.address for device in load_cluster("kit.toml").devices] == [
        "ann@pi0.local",
        "bob@127.0.0.2",
        "pi@10.0.0.4",
    ]
    assert "more than 1024 addresses" in kit("init", "pi@10.0.0.0/8", "--file", "more.toml", code=2)
    assert "It is not a subnet" in kit("init", "pi@10.0.0.0/x", "--file", "more.toml", code=2)


def test_where_pip_finds_packages_uv_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pip.conf").write_text("[global]\nfind-links = /wheels\ntimeout = 9\n")
    assert index_options() == ["--find-links", "/wheels"]
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://one.example https://two.example")
    extra = ["--extra-index-url", "https://one.example", "--extra-index-url", "https://two.example"]
    assert index_options() == ["--find-links", "/wheels", *extra, "--index-strategy", "unsafe-best-match"]


def greeting(machine: str, python: str) -> Greeting:
    return Greeting(run="/run", kit="/kit", swept=0, machine=machine, python=python)


def test_libraries_are_installed_with_the_locks_digests_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, messages, brought = tmp_path / "torch-1.0+cpu-py3-none-any.whl", list[str](), list[str]()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/__init__.py", "")
        archive.writestr("torch-1.0+cpu.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 1.0+cpu\n")
        archive.writestr(
            "torch-1.0+cpu.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("torch-1.0+cpu.dist-info/RECORD", "")

    class Device:
        name, greeting = "alpha", greeting("aarch64", "3.13.5")

        def ask(self, operation: str, **fields: object) -> bool:
            return False

    monkeypatch.setattr(ssh_setup, "pinned", lambda packages, greeting: ("torch==1.0",))
    monkeypatch.setattr(ssh_setup, "index_options", lambda: ["--offline", "--no-index", "--find-links", str(tmp_path)])
    monkeypatch.setattr(ssh_setup, "data_folder", lambda: tmp_path)
    monkeypatch.setattr(
        ssh_setup,
        "_bring_archive",
        lambda device, folder, files, **how: brought.extend([*(str(name) for _, name in files), how["trial"]]),
    )
    for digest, is_taken in ((hashlib.sha256(wheel.read_bytes()).hexdigest(), True), (64 * "0", False)):
        (tmp_path / "hashes.txt").write_text(
            f"other==2.0 \\\n    --hash=sha256:{64 * '1'}\ntorch==1.0 \\\n    --hash=sha256:{digest}\n"
        )
        with nullcontext() if is_taken else pytest.raises(RuntimeSetupError, match="Hash mismatch for `torch"):
            ssh_setup.install(Device(), messages.append)  # type: ignore[arg-type]
    assert brought.count("torch/__init__.py") == brought.count(ssh_setup.TRIAL) == 1
    other = ssh_setup.locked(
        ["torch==1.0"], lambda pin: f"torch==1.0+cpu \\\n    --hash=sha256:{64 * '2'}", messages.append
    )
    assert (
        other == [f"torch==1.0+cpu --hash=sha256:{64 * '0'} --hash=sha256:{64 * '2'}"]
        and "no digest of this build" in messages[-1]
    )


def test_a_device_gets_the_locks_versions_for_its_own_python_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {
        (machine, python): dict(pin.split("==") for pin in ssh_setup.pinned(("torch",), greeting(machine, python)))
        for machine in ("x86_64", "aarch64")
        for python in ("3.11.2", "3.13.5")
    }
    assert {machine: pin["torch"] for (machine, _), pin in pins.items()} == {
        "x86_64": "2.13.0",
        "aarch64": TORCH_FOR_ARMV8_0,
    }
    assert {key for key, pin in pins.items() if "setuptools" in pin} >= {("x86_64", "3.13.5"), ("aarch64", "3.13.5")}
    assert all({"jinja2", "markupsafe", "numpy"} & set(pin) == {"jinja2", "markupsafe"} for pin in pins.values())

    installed = ssh_setup.distribution
    older = SimpleNamespace(version="1.9.9", requires=[])
    monkeypatch.setattr(ssh_setup, "distribution", lambda name: older if name == "sympy" else installed(name))
    with pytest.raises(RuntimeSetupError, match=r"lock does not know sympy==1\.9\.9\. .*make setup"):
        ssh_setup.pinned(("torch",), greeting("aarch64", "3.13.5"))


def test_what_crashes_on_a_device_does_not_count_as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ssh_login, "agent_command", over_pipes(tmp_path))
    monkeypatch.setattr(ssh_setup, "TRIAL", crash)
    kit("init", "alpha")
    described = Path("kit.toml").read_text()
    Path("kit.toml").write_text(described.replace("[defaults]\n", f'[defaults]\npython = "{sys.executable}"\n'))
    assert "ends with SIGILL" in kit("setup", code=2)
    monkeypatch.setattr(ssh_setup, "TRIAL", "import no_such_library")
    assert "fails: ModuleNotFoundError: No module named 'no_such_library'" in kit("setup", code=2)

    module = tmp_path / "module.py"
    module.write_text("answer = 42\n")
    with closing(Connection("alpha", ssh_login.agent_command(load_cluster("kit.toml").devices[0]))) as connection:
        connection.open()
        for trial, holds in ((crash, False), ("import module; assert module.answer == 42", True)):
            with nullcontext() if holds else pytest.raises(RuntimeSetupError, match="ends with SIGILL"):
                ssh_setup._bring_archive(connection, "env-1", [(module, Path("module.py"))], python=True, trial=trial)
            assert connection.ask("holds", folder="env-1") is holds
        assert sorted(path.name for path in Path(connection.greeting.kit).glob("env-1*")) == ["env-1"]
