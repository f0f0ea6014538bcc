"""What a run reads back names its owner and carries a digest: every change, cut and exchange is found."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from workbench.core.errors import DamagedError, WriteError
from workbench.core.sealed import SealedLog, lines_of, owner_of, read_lines, read_sealed, write_sealed
from workbench.models.sealed_tensors import damage_of, load_sealed, save_sealed

OWNER = {"run": "mine"}


def written(path: Path, owner: object = OWNER, count: int = 4) -> bytes:
    log = SealedLog(path, owner)
    for number in range(count):
        log.append([number, 0.5 + number])
    return path.read_bytes()


def test_a_log_is_read_and_goes_on_as_if_it_had_never_been_closed(tmp_path: Path) -> None:
    content = written(tmp_path / "whole.jsonl")
    path = tmp_path / "log.jsonl"
    for cut in range(len(content)):  # as a crash leaves it
        path.write_bytes(content[:cut])
        lines = read_lines(path)
        assert not lines.damage
        assert lines.owner == (OWNER if b"\n" in content[:cut] else None)
        log = SealedLog(path, OWNER, intact=lines)
        for number in range(len(lines.contents), 4):
            log.append([number, 0.5 + number])
        assert path.read_bytes() == content


def test_what_is_no_file_is_told_of(tmp_path: Path) -> None:
    """A folder, a pipe, a link to nothing: reading the pipe would never end."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nothing")
    for name in ("folder", "pipe", "link"):
        with pytest.raises(DamagedError, match=rf"'{name}' was to be read\. It is not a file\."):
            read_sealed(tmp_path / name, "mine", list)
        assert "It is not a file." in damage_of(tmp_path / name, "mine")
    with pytest.raises(FileNotFoundError):
        read_lines(tmp_path / "nothing")


def test_a_log_that_the_system_refuses_to_write_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = SealedLog(path, OWNER)
    path.unlink()
    path.mkdir()
    for write in (lambda: log.append(1), lambda: SealedLog(path, OWNER)):
        with pytest.raises(WriteError, match=r"Writing '.*log\.jsonl' was asked for\. Is a directory\."):
            write()


def test_every_changed_byte_of_a_log_is_found(tmp_path: Path) -> None:
    """The lines before it are intact, and no later one is."""
    content = written(tmp_path / "log.jsonl")
    for at, byte in enumerate(content):
        lines = lines_of(content[:at] + bytes([byte ^ 1]) + content[at + 1 :])
        number = content[:at].count(b"\n")
        is_last_newline = at == len(content) - 1  # cannot be told from a crash
        assert len(lines.contents) == max(0, number - 1)
        assert bool(lines.damage) != is_last_newline


def test_lines_that_are_left_out_exchanged_or_of_another_log_are_found(tmp_path: Path) -> None:
    first, *lines = written(tmp_path / "log.jsonl").splitlines(keepends=True)
    for chosen in itertools.permutations(lines, 3):
        result = lines_of(b"".join((first, *chosen)))
        is_beginning = list(chosen) == lines[:3]
        assert bool(result.damage) != is_beginning
    others = written(tmp_path / "other.jsonl", {"run": "another"}).splitlines(keepends=True)
    assert lines_of(b"".join((first, *others[1:]))).contents == ()
    assert lines_of(b"".join(others)).owner == {"run": "another"}


def test_a_document_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_sealed(path, "mine", {"a": 1.5})
    assert read_sealed(path, "mine", dict[str, float]) == {"a": 1.5}
    with pytest.raises(DamagedError, match=r"'plan.json' was to be read. It belongs to mine\."):
        read_sealed(path, "other", dict[str, float])
    with pytest.raises(DamagedError, match="does not read"):
        read_sealed(path, "mine", dict[str, str])
    content = path.read_bytes()
    for at, byte in enumerate(content):
        for data in (content[:at], content[:at] + bytes([byte ^ 1]) + content[at + 1 :]):
            path.write_bytes(data)
            with pytest.raises(DamagedError):
                read_sealed(path, "mine", dict[str, float])


def _exchanged(data: bytes) -> bytes:
    """Return a file in which the last two values have changed places."""
    return data[:-8] + data[-4:] + data[-8:-4]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "the values of b were changed"),
        (_exchanged, "the values of b were changed"),
        (lambda data: data[:-4], "was cut or changed"),
        (lambda data: data.replace(b'"owner":"state', b'"owner":"plate'), "header was changed"),
        (lambda data: data.replace(b'"b":{', b'"c":{'), "header was changed"),
        (lambda data: data.replace(b"[2,3]", b"[3,2]"), "the values of b were changed"),
        (lambda data: b"", "was cut or changed"),
    ],
)
def test_tensors_that_were_changed_are_not_read(damage: Callable[[bytes], bytes], said: str, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    tensors = {
        "a": torch.arange(4).double(),
        "a0": torch.zeros(0),
        "a1": torch.tensor(2.5),
        "b": torch.randn(2, 3),
    }  # in this order
    owner = owner_of("a run", path)
    save_sealed(path, owner, tensors)
    result = load_sealed(path, owner)
    assert damage_of(path, owner) == ""
    assert all(torch.equal(result[name], tensor) for name, tensor in tensors.items())
    into = {"b": torch.zeros(2, 3, dtype=torch.float64)}
    assert load_sealed(path, owner, into)["b"] is into["b"] and torch.equal(into["b"].float(), tensors["b"])
    assert "belongs to state.safetensors of run a run" in damage_of(path, owner_of("another", path))
    data = path.read_bytes()
    path.write_bytes(damage(data))
    assert path.read_bytes() != data
    assert said in damage_of(path, owner).lower()
    with pytest.raises(DamagedError):
        load_sealed(path, owner)
    path.unlink()
    assert "is missing" in damage_of(path, owner)
