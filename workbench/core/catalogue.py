"""Read device models and clusters from TOML: data/devices.toml and data/clusters/ (the papers' testbeds and emulated
laptops).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core.cluster import MEGABIT_BYTES, Cluster, Device, Link, Processor
from workbench.core.errors import ConfigError, MissingDataError, did_you_mean
from workbench.core.heat import Levels, read_curve
from workbench.core.ranges import range_of, require_range
from workbench.core.serial import LARGEST_TOML, read_text, read_toml, shown

DEFAULT_CLUSTER = "laptop"
KIT = "kit"
"""The cluster of this name is the kit.toml of the current folder or of one above it: real devices (see `workbench
kit`)."""
MB = 1_000_000

_NUMBERS: dict[str, tuple[type, str, float]] = {
    "gflops": (Device, "flops_per_s", 1e9),
    "memory_mb": (Device, "memory_bytes", MB),
    "bandwidth_mbit_per_s": (Link, "bytes_per_s", MEGABIT_BYTES),
    "latency_ms": (Link, "latency_s", 1e-3),
    "host_share": (Device, "host_share", 1),
    "watts_busy": (Device, "watts_busy", 1),
    "watts_idle": (Device, "watts_idle", 1),
    "microjoule_per_byte": (Device, "joules_per_byte", 1e-6),
    "storage_mb_per_s": (Device, "storage_bytes_per_s", MB),
    "storage_write_mb_per_s": (Device, "storage_write_bytes_per_s", MB),
    "memory_gb_per_s": (Device, "memory_bytes_per_s", 1e9),
    "battery": (Device, "battery", 1),
    "battery_wh": (Device, "battery_wh", 1),
    "leave_below": (Device, "leave_below", 1),
}
"""For each key: the field that it sets (which has the range), and the key's unit, in units of the field."""
_CLUSTER_NUMBERS: dict[str, tuple[type, str, float]] = {
    "jitter_ms": (Cluster, "jitter_s", 1e-3),
    "frame_loss": (Cluster, "frame_loss", 1),
}
"""The same for the keys of the file."""

_MODEL_KEYS = (*_NUMBERS, "title", "processor", "leave_if_throttled", "sustained")
_DEVICE_KEYS = (
    *_NUMBERS,
    "name",
    "model",
    "address",
    "port",
    "key",
    "python",
    "processor",
    "framework",
    "leave_if_throttled",
    "sustained",
)
_LINK_KEYS = ("from", "to", "bandwidth_mbit_per_s", "latency_ms", "both_ways")
_CLUSTER_KEYS = (*_CLUSTER_NUMBERS, "name", "description", "data", "medium", "defaults", "device", "link")


def data_folder() -> Path:
    """Return the folder of the project's data: in the installed package, or else in the repository."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_data", package.parent / "data"):
        if (folder / "devices.toml").is_file():
            return folder
    raise MissingDataError(
        "The device catalogue was asked for.",
        f"Neither {package / '_data'} nor {package.parent / 'data'} holds it.",
        "Reinstall.",
    )


def kit_file() -> Path | None:
    """Return the file of the cluster named KIT; None if there is none."""
    working_folder = Path.cwd()
    return next(
        (file for folder in (working_folder, *working_folder.parents) if (file := folder / f"{KIT}.toml").is_file()),
        None,
    )


def cluster_names() -> tuple[str, ...]:
    """Return the names of the clusters that come with the project, and KIT if there is one."""
    kit_names = [KIT] if kit_file() is not None else []
    return tuple(sorted([*kit_names, *(path.stem for path in (data_folder() / "clusters").glob("*.toml"))]))


def device_models() -> tuple[str, ...]:
    """Return the names of the catalogue's device models."""
    return tuple(_catalogue())


def load_device(model: str, *, name: str | None = None) -> Device:
    """Return a device of the catalogue, named `name` or else like its model.  Raises ConfigError for an
    unknown model.
    """
    path = data_folder() / "devices.toml"
    return _device({"model": model, "name": name or model}, _Source(path))


def cluster_file(name_or_path: str | Path) -> Path:
    """Return the file of a cluster, given by its name or its file.  Raises ConfigError for an unknown name."""
    if not isinstance(name_or_path, str | Path):
        todo = "Give a name, such as 'laptop', or a .toml file."
        raise ConfigError(f"The cluster {shown(name_or_path)} was asked for.", "It is neither text nor a path.", todo)
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.name != str(name_or_path):
        return path
    if name_or_path == KIT and kit_file() is None:
        raise ConfigError(
            f"The cluster '{KIT}' was asked for.",
            f"There is no {KIT}.toml in this folder or one above it, which describes real devices.",
            "Describe yours first: `workbench kit init USER@HOST USER@HOST`, or name a .toml file.",
        )
    if name_or_path not in cluster_names():
        raise ConfigError(
            f"The cluster '{shown(name_or_path)}' was asked for.",
            f"Known: {', '.join(cluster_names())}.",
            did_you_mean(str(name_or_path), cluster_names(), "Choose one of them, or name a .toml file."),
        )
    return (name_or_path == KIT and kit_file()) or data_folder() / "clusters" / f"{name_or_path}.toml"


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Return a cluster by name ('laptop', KIT) or from a TOML file.

    Raises ConfigError for any invalid entry; it names the file and, where possible, the line.
    """
    path = cluster_file(name_or_path)
    source = _Source(path)
    tables = read_toml(path, "the cluster")
    source.require_known(tables, _CLUSTER_KEYS, "the file")
    defaults = source.table(tables.get("defaults", {}), "[defaults]")
    source.require_known(defaults, _DEVICE_KEYS, "[defaults]")
    name = source.text({"name": path.stem} | tables, "name", "The cluster")
    described = source.tables(tables.get("device", []), "[[device]]")
    if not described:
        raise source.error(
            f"The cluster '{name}' was asked for.", "It has no devices.", "Describe at least one [[device]]."
        )
    devices = tuple(_device({**defaults, **device}, source, number) for number, device in enumerate(described, start=1))
    try:
        return Cluster(
            name=name,
            devices=devices,
            pairs=_pairs(source.tables(tables.get("link", []), "[[link]]"), source),
            description=" ".join(str(tables.get("description", "")).split()),
            data=tables.get("data", "tls"),
            medium=tables.get("medium", "switch"),
            jitter_s=source.number(tables, "jitter_ms", "The cluster", 0.0),
            frame_loss=source.number(tables, "frame_loss", "The cluster", 0.0),
        )
    except ConfigError as error:
        raise source.wrap(error) from error


class _Source:
    """The TOML file being read; it finds line numbers and builds error messages."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def error(self, request: str, problem: str, todo: str, *, line_of: str = "") -> ConfigError:
        return ConfigError(f"In '{shown(str(self.path), 200)}'{self._line(line_of)}: {request}", problem, todo)

    def wrap(self, error: ConfigError) -> ConfigError:
        """Return the error with the file's name added, unless the error has it already."""
        named = f"In '{shown(str(self.path), 200)}'"
        return (
            error if error.asked.startswith(named) else ConfigError(f"{named}: {error.asked}", error.found, error.todo)
        )

    def require_known(self, table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
        for key in table:
            if key not in known:
                raise self.error(
                    f"The key '{shown(key)}' in {where} was read.",
                    f"Known there: {', '.join(known)}.",
                    did_you_mean(key, known, "Rename or remove it."),
                    line_of=key,
                )

    def number(self, table: Mapping[str, Any], key: str, owner: str, default: float | None) -> float:
        """Return the number at `key`, in the unit of its field.  Raises ConfigError if it is missing or out of the
        field's range.
        """
        value = table.get(key, default)
        if value is None:
            raise self.error(f"{owner} was described.", f"It has no {key}.", f"Set {key}, or name a model that has it.")
        kind, name, unit = (_NUMBERS | _CLUSTER_NUMBERS)[key]
        try:
            require_range(value, range_of(kind, name), owner, key, unit=unit)
        except ConfigError as error:
            raise self.error(error.asked, error.found, error.todo, line_of=f"{key}={value}") from None
        return float(value * unit)

    def text(self, table: Mapping[str, Any], key: str, owner: str) -> str:
        value = table.get(key)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            problem = f"Its {key} is {shown(repr(value))}, not text without control characters."
            raise self.error(f"{owner} was described.", problem, f'Write {key} = "...".', line_of=key)
        return value

    def flag(self, table: Mapping[str, Any], key: str, owner: str) -> bool:
        """Return true or false at `key`; false if it is missing."""
        value = table.get(key, False)
        if not isinstance(value, bool):
            request = f"{owner} asks for {key} = {shown(repr(value))}."
            raise self.error(request, "It must be true or false.", "Write it without quotes.", line_of=key)
        return value

    def curve(self, table: Mapping[str, Any], owner: str) -> Levels:
        """Return the levels of a device's speed as it gets hot; () if there are none."""
        try:
            return read_curve(table.get("sustained", []), owner)
        except ConfigError as error:
            raise self.error(error.asked, error.found, error.todo, line_of="sustained") from None

    def table(self, value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"{where} was read.", "It is not a table.", f"Write {where} on a separate line.")
        return value

    def tables(self, value: object, where: str) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.error(
                f"{where} was read.", "It is not a list of tables.", f"Write {where} with double brackets."
            )
        return value

    def _line(self, setting: str) -> str:
        """Return ' line n' for the first line that sets a key ('key' or 'key=value'), '' if there is no such line."""
        key, _, value = setting.partition("=")
        if not key:
            return ""
        pattern = re.compile(rf"\s*\[{{0,2}}{re.escape(key)}\s*(?:\]|=\s*([^#\s]*))")
        for number, line in enumerate(
            read_text(self.path, "the cluster", most_bytes=LARGEST_TOML).splitlines(), start=1
        ):
            match = pattern.match(line)
            if match and (not value or _same(match[1] or "", value)):
                return f" line {number}"
        return ""


def _same(written: str, value: str) -> bool:
    """Return whether a number equals a value in another notation: 1e300 for 1e+300."""
    try:
        return repr(float(written)) == repr(float(value))
    except ValueError:
        return written.strip("\"'") == value.lower()


def _device(table: Mapping[str, Any], source: _Source, number: int = 1) -> Device:
    owner = f"Device '{shown(table['name'])}'" if isinstance(table.get("name"), str) else f"Device {number}"
    source.require_known(table, _DEVICE_KEYS, owner)
    name = source.text(table, "name", owner)
    entry: dict[str, Any] = {}
    if "model" in table:
        model = source.text(table, "model", owner)
        catalogue = _catalogue()
        if model not in catalogue:
            raise source.error(
                f"{owner} is a '{shown(model)}'.",
                f"Known models: {', '.join(catalogue)}.",
                did_you_mean(model, catalogue),
            )
        entry = {key: value for key, value in catalogue[model].items() if key != "title"}
    settings = {**entry, **table}
    described = source.tables(settings.get("processor", []), "[[device.processor]]")
    for processor in described:
        source.require_known(processor, ("name", "gflops"), f"[[device.processor]] of {owner[:1].lower()}{owner[1:]}")
    processors = tuple(
        Processor(
            name=source.text(processor, "name", owner), flops_per_s=source.number(processor, "gflops", owner, None)
        )
        for processor in described
    )
    required = ("gflops", "memory_mb")
    fields: dict[str, Any] = {
        name: source.number(settings, key, owner, None)
        for key, (kind, name, _) in _NUMBERS.items()
        if kind is Device and (key in settings or key in required)
    }
    fields |= {
        key: source.text(settings, key, owner)
        for key in ("address", "key", "python", "framework", "model")
        if key in settings
    }
    if (port := settings.get("port")) is not None:
        try:
            require_range(port, range_of(Device, "port"), owner, "port")
        except ConfigError as error:
            raise source.error(error.asked, error.found, error.todo, line_of="port") from None
    fields["leave_if_throttled"] = source.flag(settings, "leave_if_throttled", owner)
    fields["sustained"] = source.curve(settings, owner)
    try:
        fields["memory_bytes"] = round(fields["memory_bytes"])
        return Device(**fields, name=name, link=_link(settings, source, owner), port=port, processors=processors)
    except ConfigError as error:
        raise source.wrap(error) from error


def _link(table: Mapping[str, Any], source: _Source, owner: str) -> Link:
    return Link(
        bytes_per_s=source.number(table, "bandwidth_mbit_per_s", owner, 1000.0),
        latency_s=source.number(table, "latency_ms", owner, 0.0),
    )


def _pairs(tables: list[dict[str, Any]], source: _Source) -> dict[str, Link]:
    pairs: dict[str, Link] = {}
    for number, table in enumerate(tables, start=1):
        owner = f"Link {number}"
        source.require_known(table, _LINK_KEYS, owner)
        sender, receiver = source.text(table, "from", owner), source.text(table, "to", owner)
        both_ways = source.flag(table, "both_ways", owner)
        source.number(table, "bandwidth_mbit_per_s", owner, None)
        for pair in (f"{sender}>{receiver}", f"{receiver}>{sender}")[: 1 + both_ways]:
            if pair in pairs:
                raise source.error(
                    f"{owner} describes '{pair}'.",
                    "An earlier link describes it, too.",
                    "Describe each direction once.",
                )
            pairs[pair] = _link(table, source, owner)
    return pairs


def _catalogue() -> dict[str, dict[str, Any]]:
    path = data_folder() / "devices.toml"
    return _models(path, path.stat().st_mtime_ns if path.exists() else 0)


@functools.lru_cache(maxsize=1)  # each device of a cluster asks for it
def _models(path: Path, changed_ns: int) -> dict[str, dict[str, Any]]:
    source = _Source(path)
    tables = read_toml(path, "the device catalogue")
    for name, table in tables.items():
        source.require_known(source.table(table, f"[{name}]"), _MODEL_KEYS, f"[{name}]")
    return tables
