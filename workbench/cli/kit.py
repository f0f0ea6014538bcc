"""`workbench kit`: real devices over SSH; describe them, check them, put the libraries on them, remove everything
again.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import typer

from workbench.cli.output import USER_ERROR, Json, print_json, print_table, print_text, say
from workbench.core.catalogue import device_models, load_cluster
from workbench.core.cluster import Cluster, Device, split_address
from workbench.core.errors import ConfigError, WorkbenchError, did_you_mean
from workbench.core.files import require_writable
from workbench.core.ranges import Minutes, require_range
from workbench.core.serial import LARGEST_TOML, read_text, shown, write_text
from workbench.core.waiting import as_finished

if TYPE_CHECKING:
    from workbench.runtime.ssh import Connection

Action = Literal["init", "check", "setup", "upgrade", "measure", "clean"]
KIT_FILE = Path("kit.toml")
ANSWER_S = 20.0
LEAST_MEMORY_BYTES, LEAST_DISK_BYTES, MOST_CELSIUS, MOST_CLOCK_S = 600e6, 2e9, 80.0, 60.0


class DeviceCheck(NamedTuple):
    """The result of checking a device.  problem, todo: '' if the device can be used as it is."""

    device: str
    address: str
    problem: str = ""
    todo: str = ""
    facts: dict[str, Any] = {}  # noqa: RUF012 (never changed)


def kit(
    action: Annotated[
        Action,
        typer.Argument(
            help="init ADDRESS...: describe the devices; check: test the connections; setup: install; upgrade: install "
            "this machine's versions; measure: measure and store speeds; clean: remove everything."
        ),
    ],
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            help="For init: user@host of each device, user@10.0.0.0/24 for a subnet, or a file of such lines."
        ),
    ] = None,
    file: Annotated[
        Path, typer.Option("--file", help="The kit's file: a cluster file for `run --cluster`.")
    ] = KIT_FILE,
    discover: Annotated[
        bool, typer.Option("--discover", help="For init: take all devices that announce their SSH here.")
    ] = False,
    user: Annotated[str, typer.Option(help="For init --discover: the user to log in as.")] = "pi",
    model: Annotated[str, typer.Option(help="For init: the devices' model in the catalogue.")] = "rpi-4b-l",
    trust: Annotated[
        bool, typer.Option("--trust", help="For check: accept host keys that are not known yet, and show them.")
    ] = False,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget", help="For check: forget the devices' host keys, for example after a new installation."
        ),
    ] = False,
    sustained: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            help="For measure: compute for this many minutes, and store how much heat slows the devices.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Describe real devices that are reached over SSH, check them, prepare them, or remove everything from them."""
    if addresses and action != "init":
        raise ConfigError(
            f"`kit {action}` was called with addresses.",
            "Only init takes them.",
            f"They are those of '{file}'; see --file.",
        )
    if sustained is not None and action != "measure":
        raise ConfigError(f"`kit {action}` was called with --sustained.", "Only measure takes it.", "Leave it out.")
    if sustained is not None:
        require_range(sustained, Minutes, "`kit measure`", "--sustained")
    if action == "init":
        _init(_discovered_addresses(user) if discover else _named(addresses or []), file, model)
        return
    if not os.path.lexists(file):
        raise ConfigError(
            f"The kit '{file}' was asked for.",
            "There is no such file.",
            "Make it: workbench kit init pi@10.0.0.4 pi@10.0.0.5; or name another by --file.",
        )
    cluster = load_cluster(file)
    without = [device.name for device in cluster.devices if not device.address]
    if without:
        raise ConfigError(
            f"The kit '{file}' was asked for.", f"{', '.join(without)} has no address.", 'Write address = "user@host".'
        )
    if action == "measure":
        from workbench.cli.measure import measure_devices, measure_links, measure_sustained

        measured = measure_devices(cluster, file, as_json=as_json)
        if sustained is not None:
            measured |= measure_sustained(load_cluster(file), file, sustained, as_json=as_json)
        if cluster.world_size > 1:
            measured |= measure_links(load_cluster(file), file, as_json=as_json)
        if as_json:
            print_json(measured)
        return
    if forget and action == "check":
        from workbench.runtime.ssh_login import forget_host

        for device in cluster.devices:  # one after another: all keys are in one file, which ssh-keygen rewrites
            forget_host(device)
    work = {"check": _check, "setup": _setup, "upgrade": _setup, "clean": _clean}[action]
    findings = _on_all(cluster, work, trusts_new=trust and action == "check")
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        _show(cluster, findings)
    if any(finding.problem for finding in findings):
        raise typer.Exit(USER_ERROR)


def _discovered_addresses(user: str) -> list[tuple[str, int]]:
    """Return the addresses and ports of the devices in this network.  Raises ConfigError if there is none."""
    from workbench.runtime.discovery import discover

    addresses = [(f"{user}@{device.address}", device.port) for device in discover()]
    if not addresses:
        raise ConfigError(
            "The devices in this network were asked for.",
            "None announces its SSH.",
            "Install avahi-daemon on them, or give their addresses.",
        )
    return addresses


def _named(words: list[str]) -> list[tuple[str, int]]:
    """Return the addresses and ports that words or the lines of files name; of a subnet those at which SSH listens.

    Raises ConfigError for a missing file, and for a word that is not an address.
    """
    from workbench.runtime.discovery import SSH_PORT, listening

    lines = [line for word in words for line in (_lines(word) if _is_file(word) else [word])]
    addresses: list[tuple[str, int]] = []
    for text in filter(None, (line.partition("#")[0].strip() for line in lines)):
        user, separator, host = text.rpartition("@")
        if "/" in host and "://" not in text:
            addresses += [(f"{user}{separator}{address}", SSH_PORT) for address in listening(host)]
        else:
            address, port = split_address(text)
            addresses.append((address, port or SSH_PORT))
    return addresses


_FILES = re.compile(r"[~./].*|.*\.(txt|list|lst|csv|tsv|md|toml|ini|conf|cfg|json|ya?ml)", re.IGNORECASE)


def _is_file(word: str) -> bool:
    """Return whether a word names a file, which may be missing, and not a device."""
    return "@" not in word and (_FILES.fullmatch(word) is not None or Path(word).is_file())


def _lines(word: str) -> list[str]:
    return read_text(os.path.expanduser(word), "the addresses", most_bytes=LARGEST_TOML).splitlines()


def _init(logins: list[tuple[str, int]], file: Path, model: str) -> None:
    addresses = [address for address, _ in logins]
    if not addresses:
        raise ConfigError(
            "A kit was to be described.", "No address is given.", "Give one for each device: pi@10.0.0.4 pi@10.0.0.5."
        )
    if model not in device_models():
        raise ConfigError(
            f"Devices of model '{shown(model)}' were asked for.",
            f"Known are {', '.join(device_models())}.",
            did_you_mean(model, device_models()),
        )
    if file.exists():
        raise ConfigError(
            f"Writing '{file}' was asked for.",
            "It is there already.",
            "Change it, remove it, or name another with --file.",
        )
    require_writable(file)
    names: list[str] = []
    for address, port in logins:
        host = address.rpartition("@")[2]
        name = host if host.replace(".", "").isdigit() else host.partition(".")[0]
        if (address, port) in logins[: len(names)]:
            raise ConfigError(
                f"A kit with '{shown(address)}' was asked for.", "It is named twice.", "Name each device once."
            )
        names.append(name if name not in names else host)
    tables = "".join(
        f'\n[[device]]\nname = "{name}"\naddress = "{address}"\n' + (f"port = {port}\n" if port != 22 else "")
        for name, (address, port) in zip(names, logins, strict=True)
    )
    write_text(file, f'name = "kit"\n\n[defaults]\nmodel = "{model}"\n{tables}')
    try:
        load_cluster(file)
    except WorkbenchError:
        file.unlink()
        raise
    print_text(f"{file}: {load_cluster(file).in_words}.  Next: workbench kit check --trust")


def _on_all(
    cluster: Cluster, work: Callable[[Device, Connection], DeviceCheck], *, trusts_new: bool
) -> list[DeviceCheck]:
    """Do something on all devices at once, and return what came of it by device.

    One device cannot hold up the others, and whoever ends the command ends the connections first, so that nothing
    waits.
    """
    from workbench.runtime.ssh import Connection
    from workbench.runtime.ssh_login import Failure, agent_command

    connections: list[Connection] = []
    is_over = threading.Event()
    interrupted = Failure("It was interrupted.", "Repeat the command.")

    def guarded(device: Device) -> DeviceCheck:
        try:
            with closing(Connection(device.name, agent_command(device, trusts_new=trusts_new))) as connection:
                connections.append(connection)
                if is_over.is_set():
                    connection.give_up(interrupted)
                return work(device, connection)
        except WorkbenchError as error:
            return DeviceCheck(device.name, device.address or "", error.found, error.todo)

    pool = ThreadPoolExecutor(cluster.world_size)
    try:
        futures = [pool.submit(guarded, device) for device in cluster.devices]
        for _ in as_finished(futures):
            pass
        return [future.result() for future in futures]
    except BaseException:
        is_over.set()
        for connection in list(connections):
            connection.give_up(interrupted)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _check(device: Device, connection: Connection) -> DeviceCheck:
    from workbench.runtime.ssh_login import fingerprints
    from workbench.runtime.ssh_setup import PROJECT, environment_name, pinned

    host_keys = fingerprints(device)
    connection.open()
    if not host_keys and (trusted := fingerprints(device)):
        say(f"{device.name}: trusted {', '.join(trusted)}")
    before_s = time.time()
    facts = msgspec.to_builtins(connection.ask("facts", ANSWER_S, python=device.python))
    facts["clock_off_s"] = facts["time_s"] - (before_s + time.time()) / 2
    facts |= {"clock_bound_s": connection.clock_bound_s, **msgspec.to_builtins(connection.greeting)}
    facts["expected"] = environment_name(connection.greeting, pinned((PROJECT,), connection.greeting))
    return DeviceCheck(device.name, device.address or "", *_judged(device, facts), facts)


def _judged(device: Device, facts: dict[str, Any]) -> tuple[str, str]:
    """Return the problem of a device that was reached, and the remedy; ('', '') without one."""
    from workbench.cli.doctor import TORCH_FOR_ARMV8_0, crashes_on_armv8_0
    from workbench.runtime.ssh_setup import OTHER_VERSIONS

    is_ready = bool(facts["environment"] or device.python)
    install_torch = (
        f"{device.python} -m pip install torch=={TORCH_FOR_ARMV8_0} there" if device.python else "workbench kit setup"
    )
    for is_wrong, problem, todo in (
        (
            facts["free_memory_bytes"] < LEAST_MEMORY_BYTES,
            f"{facts['free_memory_bytes'] / 1e6:.0f} MB of memory are free, torch alone takes 300.",
            "End other programs there.",
        ),
        (
            not is_ready and facts["free_disk_bytes"] < LEAST_DISK_BYTES,
            f"{facts['free_disk_bytes'] / 1e6:.0f} MB of disk are free, the libraries take 1000.",
            "Free some space there.",
        ),
        (
            device.memory_bytes > facts["memory_bytes"],
            f"A plan may use {device.memory_bytes / 1e6:,.0f} MB, and it has {facts['memory_bytes'] / 1e6:,.0f}: "
            "it would swap to its disk.",
            "Lower memory_mb in the kit's file.",
        ),
        (
            abs(facts["clock_off_s"]) > MOST_CLOCK_S,
            f"Its clock is off by {facts['clock_off_s']:.0f} s.",
            "Set it there: sudo timedatectl set-ntp true.",
        ),
        (
            facts["throttled"],
            f"It reports: {facts['throttled']}.",
            "Give it a supply of its own strength and a short cable; cool it.",
        ),
        (
            (facts["temperature_c"] or 0.0) > MOST_CELSIUS,
            f"It has {facts['temperature_c']} °C and slows itself down.",
            "Cool it.",
        ),
        (
            crashes_on_armv8_0(facts["torch"], facts["machine"], facts["has_atomics"]),
            f"torch {facts['torch']} crashes on its processor (ARMv8.0, no atomics).",
            f"Run: {install_torch}.",
        ),
        (not is_ready, "It has no libraries yet.", "Run: workbench kit setup."),
        (not device.python and facts["environment"] != facts["expected"], OTHER_VERSIONS, "Run: workbench kit setup."),
    ):
        if is_wrong:
            return problem, todo
    return "", ""


def _setup(device: Device, connection: Connection) -> DeviceCheck:
    from workbench.runtime.ssh_setup import TRIAL, bring_code, install

    connection.open(owner="`workbench kit setup`")
    did = not device.python and install(connection, say)
    if device.python:
        connection.ask("tries", 600.0, python=device.python, trial=TRIAL)
    bring_code(connection)
    say(f"{device.name}: {'ready' if did else 'is ready already'}")
    facts = msgspec.to_builtins(connection.ask("facts", ANSWER_S, python=device.python))
    return DeviceCheck(device.name, device.address or "", facts=facts | msgspec.to_builtins(connection.greeting))


def _clean(device: Device, connection: Connection) -> DeviceCheck:
    connection.open()
    connection.ask("clean")
    say(f"{device.name}: nothing of the workbench is left there")
    return DeviceCheck(device.name, device.address or "")


def _show(cluster: Cluster, findings: list[DeviceCheck]) -> None:
    rows = []
    for finding, device in zip(findings, cluster.devices, strict=True):
        facts, state = finding.facts, "see below" if finding.problem else "ok"
        if "cores" not in facts:
            rows.append((finding.device, finding.address, state, *("",) * 7))
            continue
        heat, clock = facts["temperature_c"], facts.get("clock_off_s")
        rows.append(
            (
                finding.device,
                finding.address,
                state,
                f"{facts['python']} {facts['machine']}",
                facts["cores"],
                f"{facts['free_memory_bytes'] / 1e6:.0f} of {facts['memory_bytes'] / 1e6:.0f}",
                f"{facts['free_disk_bytes'] / 1e9:.1f}",
                " ".join(word for word in ("" if heat is None else f"{heat:.0f}", facts["throttled"]) if word),
                "" if clock is None else f"{1000 * clock:+.1f} ± {1000 * facts['clock_bound_s']:.1f}",
                device.python or facts["environment"] or "nothing",
            )
        )
    columns = ("device", "address", "state", "Python", "cores", "free MB", "disk GB", "°C", "clock ms", "libraries")
    print_table(f"Kit {cluster.name}", columns, rows)
    for finding in findings:
        if finding.problem:
            print_text(f"{finding.device}: {finding.problem}\n  -> {finding.todo}")
