"""Read and write the core dataclasses as JSON and TOML (by msgspec)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import re
import stat
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.files import whole_file

T = TypeVar("T")

LARGEST_TOML = 1 << 20
LARGEST_TEXT = 1 << 30  # a report of a long stream has hundreds of megabytes
_CHUNK_BYTES = 1 << 20
MOST_LISTED = 20


NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""msgspec's errors for a text that is not JSON, or not of the expected type, or nested too deep."""


def to_json(value: Any, *, indent: int = 1) -> str:
    """Return a core dataclass as JSON text; NamedTuples become arrays."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()


def text_digest(text: str, length: int = 16) -> str:
    """Return the first hexadecimal digits of a text's SHA-256, for the name of a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def to_builtins(value: Any) -> Any:
    """Return a dataclass as dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value)


def from_json(text: str | bytes, kind: type[T], *, source: str = "JSON text") -> T:
    """Parse JSON text as a `kind`.

    Raises ConfigError naming `source`, the invalid field and its value, or a field that the `kind` and its parts do not
    have.
    """
    try:
        value = msgspec.json.decode(text, type=kind)
    except NOT_JSON as error:
        raise _malformed(kind, source, error, lambda: msgspec.json.decode(text)) from error
    _require_known_fields(
        _type_info(cast(Any, kind)), msgspec.Raw(text.encode() if isinstance(text, str) else text), source
    )
    return value


def from_builtins(value: Any, kind: type[T], *, source: str) -> T:
    """Convert dicts and lists to a `kind`.  Raises ConfigError naming `source`, the invalid field and its value."""
    try:
        return msgspec.convert(value, type=kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _malformed(kind, source, error, lambda: value) from error


def user_path(name: Path | str, what: str) -> Path:
    """Return the path that a user named, with ~ replaced by the home folder.  The file need not exist.

    what: its role in the error, such as 'The data'.

    Raises ConfigError for a path that no file can have: an unknown user's home, a name that is too long, links in a
    circle.
    """
    try:
        path = Path(name).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()
    except RuntimeError:
        problem = "There is no such user here."
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        problem = f"{getattr(error, 'strerror', None) or error}."
    else:
        return path
    raise ConfigError(f"{what} '{shown(str(name), 200)}' was asked for.", problem, "Check the path.")


def read_text(path: Path | str, what: str, *, most_bytes: int = LARGEST_TEXT) -> str:
    """Return the text of a file that a user named.  what: the file's role in error messages ('the job', 'the report').

    A byte-order mark is removed.  Raises ConfigError if the file is missing, not a regular file, too large or not
    UTF-8.
    """
    request = f"Asked to read {what} '{shown(str(path), 200)}'."
    data = bytearray()
    try:
        kind = stat.S_IFMT(Path(path).stat().st_mode)
        if kind == stat.S_IFREG:  # opening a pipe would wait for its writer, and a device may never end
            with open(path, "rb") as file:
                while len(data) <= most_bytes and (chunk := file.read(_CHUNK_BYTES)):
                    data += chunk
                    if 0 in chunk:  # no text, however large a file of holes may be
                        break
    except FileNotFoundError:
        problem = "It is a link to a file that does not exist." if Path(path).is_symlink() else "There is no such file."
        raise ConfigError(request, problem, "Check the path.") from None
    except (OSError, ValueError) as error:  # ValueError: a path that contains a zero byte
        raise ConfigError(request, f"{getattr(error, 'strerror', error)}.", "Check the path.") from error
    if kind != stat.S_IFREG:
        raise ConfigError(request, f"It is {_KINDS.get(kind, 'something else')}.", "Name a file.")
    if len(data) > most_bytes:
        raise ConfigError(request, f"It is larger than {most_bytes:,} bytes.", "Name a smaller file.")
    if (zero := data.find(0)) >= 0:
        raise ConfigError(request, f"It is not UTF-8 text: byte {zero} is zero.", "Save it as UTF-8.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            request, f"It is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}.", "Save it as UTF-8."
        ) from error


def read_toml(path: Path, what: str = "the TOML file") -> dict[str, Any]:
    """Return a TOML file's tables.  Raises ConfigError like read_text, and if the file is malformed."""
    text = read_text(path, what, most_bytes=LARGEST_TOML)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = f"It is malformed: {shown(str(error), 200)}."
    except RecursionError:
        problem = "Its brackets are nested too deep."
    except ValueError:
        problem = "A number in it has thousands of digits."
    raise ConfigError(f"Asked to read {what} '{path}'.", problem, "Fix that line.")


def shown(value: Any, most: int = 80) -> str:
    """Format a value for an error message: on one line, without terminal control characters, and shortened if it is
    long.
    """
    if isinstance(value, int) and abs(value) >= 10**most:
        return f"a number of {int(abs(value).bit_length() * math.log10(2)) + 1} digits"
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def listed(names: Iterable[Any], most: int = MOST_LISTED) -> str:
    """List names for an error message, quoted, and no more than `most` of them."""
    names = list(names)
    first = [f"'{shown(str(name))}'" for name in names[:most]]
    return ", ".join(first) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def text_lines(text: str) -> list[str]:
    """Return the lines of a text.  Only the usual line ends divide it, whereas str.splitlines also splits at U+000B,
    U+0085 or U+2028.
    """
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def plain(text: str, *, as_json: bool = False) -> str:
    r"""Return text as a terminal may show it: control characters become escapes (\x1b), line breaks and tabs stay.

    as_json: whether to escape them as JSON does (\u001b), so that JSON keeps its value.
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}" if as_json else repr(match[0])[1:-1], text)


def write_text(path: Path, text: str) -> None:
    """Write a text file completely or not at all (see whole_file).  Raises WriteError."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as a JSON file, completely or not at all (see to_json, whole_file).  Raises WriteError."""
    write_text(path, to_json(value) + "\n")


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a disk",
    stat.S_IFCHR: "a device",
}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move the cursor or talk to the terminal, that turn the direction of writing, or that are half a
character."""
_PLACE = re.compile(r"(.*) - at `\$(.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def read_json(path: Path | str, kind: type[T], what: str, *, most_bytes: int = LARGEST_TEXT) -> T:
    """Return the content of a JSON file that a user named.  Raises ConfigError like read_text and from_json."""
    return from_json(read_text(path, what, most_bytes=most_bytes), kind, source=f"'{path}'")


def read_stored(path: Path, kind: type[T]) -> T | None:
    """Return a file's content from an earlier run; None if it is missing, truncated, or written by another version."""
    with contextlib.suppress(OSError, ConfigError):
        return from_json(path.read_bytes(), kind, source=str(path))
    return None


def load_or_compute(path: Path | None, kind: type[T], compute: Callable[[], T]) -> T:
    """Return a file's content from an earlier run, or compute it and store it there.  path: None stores nothing."""
    content = None if path is None else read_stored(path, kind)
    if content is None:
        content = compute()
        if path is not None:
            write_text(path, to_json(content, indent=-1))
    return content


def read_records(path: Path, kind: type[T], what: str) -> tuple[T, ...]:
    """Return the list in a file (see read_text); empty if there is no such file."""
    if not path.exists():
        return ()
    return read_json(path, cast(Any, tuple[kind, ...]), what)  # type: ignore[valid-type]


def _require_known_fields(kind: inspect.Type, data: msgspec.Raw, source: str) -> None:
    """Raise ConfigError for a field that the dataclasses of a `kind` do not have: msgspec itself ignores such fields.

    data: valid JSON of that kind.  Only the parts that may hold a dataclass are decoded again.
    """
    if not _holds_dataclass(kind):
        return
    match kind:
        case inspect.UnionType():
            first = bytes(data).lstrip()[:1]
            for choice in kind.types:
                is_list = isinstance(choice, inspect.ListType | inspect.VarTupleType | inspect.TupleType)
                if first == (b"[" if is_list else b"{"):
                    _require_known_fields(choice, data, source)
        case inspect.DataclassType():
            fields = {field.encode_name: field.type for field in kind.fields}
            for name, part in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items():
                if name not in fields:
                    request = f"Asked to read {source} as a {kind.cls.__name__}."
                    raise ConfigError(
                        request,
                        f"This version knows no field '{shown(name)}' there.",
                        did_you_mean(name, fields, "Leave it out, or read the file with the version that wrote it."),
                    )
                _require_known_fields(fields[name], part, source)
        case inspect.DictType():
            for part in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).values():
                _require_known_fields(kind.value_type, part, source)
        case inspect.ListType() | inspect.VarTupleType():
            for part in msgspec.json.decode(data, type=list[msgspec.Raw]):
                _require_known_fields(kind.item_type, part, source)
        case inspect.TupleType():
            for item_type, part in zip(kind.item_types, msgspec.json.decode(data, type=list[msgspec.Raw]), strict=True):
                _require_known_fields(item_type, part, source)


@functools.cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _holds_dataclass(kind: inspect.Type) -> bool:
    match kind:
        case inspect.UnionType():
            return any(map(_holds_dataclass, kind.types))
        case inspect.DictType():
            return _holds_dataclass(kind.value_type)
        case inspect.ListType() | inspect.VarTupleType():
            return _holds_dataclass(kind.item_type)
        case inspect.TupleType():
            return any(map(_holds_dataclass, kind.item_types))
    return isinstance(kind, inspect.DataclassType)


def _malformed(kind: type, source: str, error: Exception, decode_all: Callable[[], Any]) -> ConfigError:
    # A ConfigError from a dataclass's __post_init__ comes wrapped; its message is better than msgspec's.
    cause = error.__cause__
    if isinstance(cause, ConfigError):
        return ConfigError(f"In {source}: {cause.asked}", cause.found, cause.todo)
    request = f"Asked to read {source} as a {kind.__name__}."
    if isinstance(error, RecursionError):
        return ConfigError(request, "Its brackets are nested too deep.", "Fix the file.")
    place = _PLACE.fullmatch(str(error))
    if place is None:
        if "truncated" in str(error):
            return ConfigError(request, "It is truncated: it ends too early.", "Copy it again, or make it again.")
        return ConfigError(request, f"{error}.", "Fix that place.")
    if place[2].endswith("schema_version"):
        problem = f"Another version of the workbench wrote it: schema_version{_value_text(decode_all, place[2])}."
        return ConfigError(request, problem, "Read it with that version, or make it again.")
    return ConfigError(
        request, f"{place[2].lstrip('.')}{_value_text(decode_all, place[2])}: {place[1]}.", "Fix that field."
    )


def _value_text(decode_all: Callable[[], Any], path: str) -> str:
    """Return ' = value' for a path such as '.job.epochs' or '.steps[3].loss', '' if it cannot be shown."""
    try:
        value = decode_all()
        for step in _STEP.finditer(path):
            value = value[step[1] or int(step[2])]
    except (*NOT_JSON, LookupError, TypeError):  # LookupError: '[...]', an unnamed entry
        return ""
    return f" = {shown(repr(value) if isinstance(value, str) else value)}"
