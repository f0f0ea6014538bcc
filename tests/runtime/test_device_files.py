"""What a real device sends to the laptop: files of a run, and questions to the store; what does not fit is refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssh_hosts import over_pipes, real_cluster

from workbench.core.errors import MessageError
from workbench.runtime import kept_files
from workbench.runtime.engine_slots import KeyStore
from workbench.runtime.frames import Asked, FilePart, Message
from workbench.runtime.messages import CallTable, encode
from workbench.runtime.ssh_devices import SshEngines, SshSlot

LOG, SNAPSHOT = "steps/epoch-0-from-0-rank-1.jsonl", "snapshots/weights-epoch-1-step-0-layers-0-3.safetensors"


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[SshSlot]:
    """The laptop's side of a device whose files go to tmp_path / 'run' and may have 1000 bytes."""
    engines = SshEngines(real_cluster(), tmp_path / "run", CallTable({}), command_of=over_pipes(tmp_path))
    engines.inbox.most_bytes = 1000
    ssh_slot = SshSlot(0, engines.cluster.devices[0], engines)
    yield ssh_slot
    ssh_slot.close()


def keep(slot: SshSlot, *parts: FilePart) -> None:
    for part in parts:
        slot._take_message(Message("file", 0, encode(part)))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_devices_files_come_into_the_runs_folder(slot: SshSlot, tmp_path: Path) -> None:
    keep(slot, FilePart(SNAPSHOT, 0, b"ab", False), FilePart(SNAPSHOT, 2, b"c", True))
    keep(
        slot,
        FilePart(LOG, 0, b"old and longer\n", True),
        FilePart(LOG, 0, b"new\n", True),
        FilePart(LOG, 4, b"newer\n", True),
    )
    keep(slot, FilePart("snapshots/x.json", 0, b"begun", False))
    slot.close()
    assert files_of(tmp_path / "run") == {SNAPSHOT: b"abc", LOG: b"new\nnewer\n"}


@pytest.mark.parametrize(
    "parts",
    [
        *(
            [FilePart(path, 0, b"", True)]
            for path in ("../outside", "steps/../../outside", "/etc/passwd", "fingerprint.txt", "steps/a/b")
        ),
        *(
            [FilePart(path, 0, b"", True)]
            for path in ("steps/.x", "steps/a\n", "steps/\\", "steps/" + "a" * 300, "steps/")
        ),
        [FilePart(LOG, 7, b"x", True)],  # of a log that is not there
        [FilePart(LOG, 0, b"x", True), FilePart(LOG, 2**40, b"x", True)],
        [FilePart(LOG, -1, b"x", True)],
        [FilePart(LOG, 2**64 - 1, b"x", True)],
        [FilePart(LOG, 0, bytes(1001), True)],
        [FilePart(SNAPSHOT, 1, b"x", False)],
        [FilePart(SNAPSHOT, 0, b"x", False), FilePart(SNAPSHOT, 2, b"x", True)],
        [FilePart(SNAPSHOT, 0, bytes(600), False), FilePart(SNAPSHOT, 600, bytes(600), False)],
        [FilePart(f"snapshots/{number}", 0, b"", False) for number in range(5)],
    ],
)
def test_a_part_of_a_file_that_does_not_fit_is_refused(parts: list[FilePart], slot: SshSlot, tmp_path: Path) -> None:
    with pytest.raises(MessageError, match="a part of a file"):
        keep(slot, *parts)
    slot.close()
    assert sum(len(data) for data in files_of(tmp_path).values()) <= 1
    assert not (tmp_path / "outside").exists()


def test_a_device_keeps_so_many_files_and_no_more(
    slot: SshSlot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kept_files, "MOST_FILES", 3)
    keep(slot, *(FilePart(f"snapshots/{number}", 0, b"x", True) for number in range(3)))
    (tmp_path / "run/snapshots/0").unlink()  # no longer needed: it counts no more
    keep(slot, FilePart("snapshots/3", 0, b"x", True))
    with pytest.raises(MessageError, match="one more than 3 files"):
        keep(slot, FilePart("snapshots/4", 0, b"x", True))


def test_a_devices_files_take_so_many_bytes_and_no_more(slot: SshSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "MOST_TIMES", 2)
    with pytest.raises(MessageError, match="above 2,000 bytes"):
        keep(slot, *(FilePart(f"snapshots/{number}", 0, bytes(900), True) for number in range(1, 4)))


def test_a_full_disk_of_the_laptop_ends_the_run(slot: SshSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(part: FilePart) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(slot._files, "take", refuse)
    keep(slot, FilePart(LOG, 0, b"x", True))
    [(rank, kind, outcome)] = slot.inbox.take(0)
    assert (rank, kind) == (0, "ended") and "No space left" in outcome.text


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ([(1, Asked("set", ("a",), b"1")), (0, Asked("set", ("a",), b"2"))], "'a' of another device"),
        ([(0, Asked("set", ()))], "set with 0 keys"),
        ([(0, Asked("get", ("a", "b")))], "get with 2 keys"),
        ([(0, Asked("get", ("a",)))] * 1001, "more than 1,000 at once"),
    ],
)
def test_a_question_to_the_store_that_no_device_asks_is_refused(asked: list[tuple[int, Asked]], why: str) -> None:
    store = KeyStore()
    with pytest.raises(MessageError, match=why):
        for rank, one in asked:
            store.ask(rank, one, lambda reply: None)
