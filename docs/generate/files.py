"""The files that people write or read: the keys of a cluster, what comes with the project, report.json."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import msgspec

from generate.words import cell, meanings, table
from workbench.core.catalogue import _DEVICE_KEYS, _NUMBERS, cluster_names, data_folder, load_cluster
from workbench.core.cluster import Device, Link, Processor
from workbench.core.report import Report

UNITS = {
    "gflops": "10^9 FLOP/s",
    "memory_mb": "10^6 bytes",
    "bandwidth_mbit_per_s": "10^6 bits/s",
    "latency_ms": "ms",
    "host_share": "of a core",
    "watts_busy": "W",
    "watts_idle": "W",
    "microjoule_per_byte": "10^-6 J",
    "storage_mb_per_s": "10^6 bytes/s",
    "storage_write_mb_per_s": "10^6 bytes/s",
    "memory_gb_per_s": "10^9 bytes/s",
    "battery": "0 to 1",
    "battery_wh": "Wh",
    "leave_below": "0 to 1",
    "sustained": "pairs of s and 0 to 1",
}
OTHERS = {"processor": "processors"}


def cluster_keys() -> str:
    """Return the keys of a [[device]], each with its unit and meaning."""
    says = {**meanings(Link), **meanings(Device)}
    rows = []
    for key in sorted(_DEVICE_KEYS, key=lambda key: (key != "name", key)):
        _, name, _ = _NUMBERS.get(key, (Device, OTHERS.get(key, key), 1))
        rows.append((f"`{key}`", UNITS.get(key, ""), cell(says.get(name, EXTRA.get(key, "")))))
    return table(("key", "unit", "meaning"), rows)


EXTRA = {
    "name": "as reports, faults and figures call it",
    "model": "a model of the catalogue, below, whose numbers hold unless the device gives others",
    "processor": f"a table for each processor of the device, `[[device.processor]]`, with `name` and `gflops`: "
    f"{' '.join((Processor.__doc__ or '').split('.')[0].split())}",
}


def clusters() -> str:
    """Return the clusters that come with the project."""
    loaded = [load_cluster(name) for name in cluster_names() if name != "kit"]
    rows = ((f"`{one.name}`", str(one.world_size), cell(one.description)) for one in loaded)
    return table(("name", "devices", "what it is"), rows)


def device_models() -> str:
    """Return the catalogue of device models."""
    models: dict[str, dict[str, Any]] = tomllib.loads((data_folder() / "devices.toml").read_text(encoding="utf-8"))
    keys = (
        "gflops",
        "memory_mb",
        "bandwidth_mbit_per_s",
        "latency_ms",
        "watts_busy",
        "watts_idle",
        "memory_gb_per_s",
        "storage_mb_per_s",
        "storage_write_mb_per_s",
        "sustained",
    )
    rows = ((f"`{name}`", cell(of["title"]), *(str(of.get(key, "")) for key in keys)) for name, of in models.items())
    return table(("model", "what it is", *keys), rows)


def report_schema() -> str:
    """Return the JSON Schema of report.json."""
    return json.dumps(msgspec.json.schema(Report), indent=1) + "\n"


def report_tables() -> str:
    """Return a section for each kind of object in a report."""
    definitions = msgspec.json.schema(Report)["$defs"]
    kinds, sections = _kinds(), []
    for name in ("Report", *sorted(set(definitions) - {"Report"})):
        kind = kinds[name]
        properties = definitions[name].get("properties")
        if properties is None:
            properties = dict(zip(kind._fields, definitions[name]["prefixItems"], strict=True))
            sections.append(f"### {name}\n\nA list of these values.\n")
        else:
            sections.append(f"### {name}\n")
        says = meanings(kind)
        rows = ((f"`{key}`", cell(_type(one)), cell(says.get(key, ""))) for key, one in properties.items())
        sections.append(table(("field", "type", "meaning"), rows))
    return "\n".join(sections)


def _kinds() -> dict[str, Any]:
    """Return the dataclasses and named tuples of a report by name."""
    results: dict[str, Any] = {}
    waiting: list[Any] = [msgspec.inspect.type_info(Report)]
    while waiting:
        info = waiting.pop()
        is_record = isinstance(info, msgspec.inspect.DataclassType | msgspec.inspect.NamedTupleType)
        if is_record and info.cls.__name__ not in results:
            results[info.cls.__name__] = info.cls
            waiting += [field.type for field in info.fields]
        waiting += [getattr(info, part) for part in ("item_type", "value_type") if hasattr(info, part)]
        waiting += [*getattr(info, "types", ()), *getattr(info, "item_types", ())]
    return results


def _type(schema: dict[str, Any]) -> str:
    """Return a JSON type in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{one}`" if one != "" else "empty" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return f"object of {_type(inner)}" if isinstance(inner, dict) else "object"
    return str(schema.get("type", "any"))
