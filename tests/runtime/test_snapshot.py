"""A snapshot outlives a kill and a full disk, and one that is not complete is never gone on from."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import run_script
from torch import Tensor, nn

from tests.waiting import LIMIT_S
from workbench.core import files
from workbench.core.errors import WriteError
from workbench.methods.training.rank_snapshots import KeptInMemory, RankSnapshots
from workbench.models import sealed_tensors
from workbench.runtime import snapshot
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule
from workbench.runtime.snapshot import (
    SNAPSHOTS,
    Position,
    Snapshot,
    SnapshotWriter,
    covering,
    passing,
    remove_damaged,
    snapshot_files,
    weights_after,
)
from workbench.runtime.state import load_state

RUN, LAYERS = "a run", (0, 3)


def optimizer(seed: int = 0) -> FlatAdamW:
    torch.manual_seed(seed)
    return FlatAdamW(nn.Linear(3, 5), learning_rate=LinearSchedule(peak=0.1, num_steps=100), weight_decay=0.01)


def take_step(optimizer: FlatAdamW) -> None:
    optimizer.gradients.copy_(torch.linspace(-1, 1, optimizer.gradients.numel()) * (1 + optimizer.num_steps))
    optimizer.step()


def writer(folder: Path, optimizer: FlatAdamW, layers: tuple[int, int] = LAYERS) -> SnapshotWriter:
    return SnapshotWriter(folder, RUN, layers, optimizer)


def take(writer: SnapshotWriter, optimizer: FlatAdamW, *steps: tuple[int, int]) -> None:
    """Take a step and a snapshot for each position."""
    for at in steps:
        take_step(optimizer)
        writer.write(Position(*at), keeps_moments=True)


def whole(folder: Path, num_layers: int = LAYERS[1]) -> list[tuple[int, int]]:
    """The positions with a whole snapshot."""
    known = snapshot_files(folder)
    return sorted({file.position for file in known if covering(known, file.position, num_layers)})


def state_at(folder: Path, at: tuple[int, int]) -> dict[str, Tensor]:
    return load_state(covering(snapshot_files(folder), Position(*at), LAYERS[1]), RUN)


@pytest.mark.parametrize(
    ("every", "due", "last"),
    [(0, [], [0, 0, 0, 0, 0]), (1, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]), (2, [2, 4], [0, 2, 2, 4, 4])],
)
def test_when_a_snapshot_is_taken(every: int, due: list[int], last: list[int]) -> None:
    rule = Snapshot(every=every)
    assert [step for step in range(1, 6) if rule.is_due(step)] == due
    assert [rule.last(step) for step in range(1, 6)] == last


def test_a_run_goes_on_from_the_last_three_steps_and_from_the_end_of_every_epoch(tmp_path: Path) -> None:
    """Each as if nothing had been; the older one's place on the disk is used again."""
    first, states = optimizer(), {}
    places = writer(tmp_path, first)
    for at in ((0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)):
        take(places, first, at)
        states[at] = first.num_steps, [vector.clone() for vector in first.state_vectors()]
    take_step(first)
    assert whole(tmp_path) == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)] and remove_damaged(tmp_path, RUN) == []
    for at in whole(tmp_path):
        second = optimizer(seed=1)
        load_state(covering(snapshot_files(tmp_path), Position(*at), LAYERS[1]), RUN, second.named_tensors())
        second.set_num_steps(states[at][0])
        assert all(torch.equal(*pair) for pair in zip(second.state_vectors(), states[at][1], strict=True))
        while second.num_steps < first.num_steps:
            take_step(second)
        assert all(torch.equal(*pair) for pair in zip(second.state_vectors(), first.state_vectors(), strict=True))
    for path in list(passing(tmp_path)):
        path.unlink()
    assert sorted(path.name for path in (tmp_path / SNAPSHOTS).iterdir()) == [
        f"weights-epoch-{epoch}-step-0-layers-0-3.safetensors" for epoch in (1, 2)
    ]
    assert set(weights_after(tmp_path, RUN, 0, LAYERS[1])) == {"weight", "bias"}


def test_moments_of_old_epochs_are_not_kept_if_they_are_large(tmp_path: Path) -> None:
    mine = optimizer()
    places = writer(tmp_path, mine)
    for epoch in range(1, 5):
        places.write(Position(epoch, 0), keeps_moments=False)
    assert whole(tmp_path) == [(3, 0), (4, 0)]
    assert [file.position.epoch for file in snapshot_files(tmp_path) if file.kind == "weights"] == [1, 2, 3, 4]


def test_the_layers_of_a_whole_snapshot_cover_the_model(tmp_path: Path) -> None:
    """From any plans: what lies across a gap does not count."""
    mine = optimizer()
    for layers, steps in {
        (0, 2): [(0, 1), (0, 2)],
        (2, 6): [(0, 1)],
        (0, 3): [(0, 2)],
        (3, 6): [(0, 2)],
        (4, 6): [(0, 1)],
    }.items():
        take(writer(tmp_path, mine, layers), mine, *steps)
    assert whole(tmp_path, 6) == [(0, 1), (0, 2)]
    assert (
        covering(snapshot_files(tmp_path), Position(0, 1), 6)[0].name == "moments-epoch-0-step-1-layers-0-2.safetensors"
    )
    next((tmp_path / SNAPSHOTS).glob("moments-epoch-0-step-2-layers-3-6*")).unlink()
    assert whole(tmp_path, 6) == [(0, 1)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-4], "cut or changed"),
        (lambda data: data[:20], "cut or changed"),
        (lambda data: b"", "cut or changed"),
        (lambda data: b"\xff" * 200, "cut or changed"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "were changed after they were written"),
        (lambda data: data.replace(b"of run a run", b"of run a ruN"), "its header was changed"),
    ],
)
def test_a_damaged_file_is_removed_and_reported(change, said: str, tmp_path: Path) -> None:
    mine = optimizer()
    take(writer(tmp_path, mine), mine, (0, 1), (0, 2))
    path = next((tmp_path / SNAPSHOTS).glob("moments-epoch-0-step-2-*"))
    path.write_bytes(change(path.read_bytes()))
    [sentence] = remove_damaged(tmp_path, RUN)
    assert said.lower() in sentence.lower() and path.name in sentence
    assert whole(tmp_path) == [(0, 1)] and remove_damaged(tmp_path, RUN) == []


@pytest.mark.parametrize(
    "place",
    [
        lambda path: path.symlink_to("nothing"),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: (path / "inside").mkdir(parents=True),
        os.mkfifo,
    ],
)
@pytest.mark.parametrize("suffix", ["", ".part"])
def test_what_is_no_file_is_removed_and_the_run_goes_on(
    place: Callable[[Path], None], suffix: str, tmp_path: Path
) -> None:
    """A link to nothing or to itself, a device, a folder, a pipe: in a file's place, or in the next one's."""
    mine = optimizer()
    places = writer(tmp_path, mine)
    take(places, mine, (0, 1), (0, 2))
    path = next((tmp_path / SNAPSHOTS).glob("moments-epoch-0-step-2-*"))
    if not suffix:
        path.unlink()
    place(path.with_name(path.name + suffix))
    damage = remove_damaged(tmp_path, RUN)
    assert [path.name in sentence and "It is not a file." in sentence for sentence in damage] == [True] * (not suffix)
    take(places, mine, (0, 2))
    assert whole(tmp_path) == [(0, 1), (0, 2)] and remove_damaged(tmp_path, RUN) == []
    assert not list(tmp_path.rglob("*.part"))


def test_a_snapshot_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Nor into the file that it names, if the one whose place it takes is a link."""
    for name in ("new.part", "old"):
        (tmp_path / f"another for {name}").write_text("precious")
        (tmp_path / name).symlink_to(f"another for {name}")
    with files.quick_file(tmp_path / "new", tmp_path / "old") as part:
        part.write_bytes(b"snapshot")
    assert (tmp_path / "new").read_bytes() == b"snapshot" and not (tmp_path / "new").is_symlink()
    assert [path.read_text() for path in tmp_path.glob("another*")] == ["precious"] * 2


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    mine = optimizer()
    take(writer(tmp_path, mine), mine, (0, 1))
    for path in (tmp_path / SNAPSHOTS).iterdir():
        with open(path, "r+b") as file:
            file.write((1 << 36).to_bytes(8, "little"))
            file.truncate(1 << 37)
    assert ["It was cut or changed." in sentence for sentence in remove_damaged(tmp_path, RUN)] == [True] * 2


def test_another_runs_or_another_positions_file_is_not_used(tmp_path: Path) -> None:
    mine = optimizer()
    take(writer(tmp_path, mine), mine, (0, 1))
    for path in (tmp_path / SNAPSHOTS).iterdir():
        path.rename(path.with_name(path.name.replace("step-1", "step-2")))
    damage = remove_damaged(tmp_path, RUN)
    assert (
        len(damage) == 2
        and "belongs to moments-epoch-0-step-1-layers-0-3.safetensors of run a run" in damage[0].lower()
    )
    take(writer(tmp_path, mine), mine, (0, 1))
    assert len(remove_damaged(tmp_path, "another")) == 2 and not whole(tmp_path)


def test_a_full_disk_costs_the_snapshot_being_taken_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it stays, and with room again the next one is taken; nothing half written is left."""
    mine = optimizer()
    places = writer(tmp_path, mine)
    take(places, mine, (0, 1), (0, 2), (0, 3))
    expected = state_at(tmp_path, (0, 3))

    def refuse(*about: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sealed_tensors, "_digest", refuse)
        with pytest.raises(WriteError, match="No space left on device"):
            take(places, mine, (0, 4))
    assert whole(tmp_path) == [(0, 2), (0, 3)] and not list(tmp_path.rglob("*.part"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_at(tmp_path, (0, 3)).items())
    take(places, mine, (0, 5))
    assert whole(tmp_path) == [(0, 2), (0, 3), (0, 5)]


def test_a_snapshot_takes_the_place_of_the_oldest_one(tmp_path: Path) -> None:
    """The same blocks of the disk, so that a disk that filled up meanwhile does not matter."""
    mine = optimizer()
    places = writer(tmp_path, mine)
    take(places, mine, (0, 9), (0, 10), (0, 11))
    older = {path.stat().st_ino for path in (tmp_path / SNAPSHOTS).glob("*-step-9-*")}
    take(places, mine, (0, 12))
    assert {path.stat().st_ino for path in (tmp_path / SNAPSHOTS).glob("*-step-12-*")} == older
    path = tmp_path / "short"
    path.write_bytes(b"longer than that")
    with files.quick_file(tmp_path / "new", path) as part:
        part.write_bytes(b"short")
    assert (tmp_path / "new").read_bytes() == b"short" and not path.exists()


def test_what_was_written_outlives_a_kill(tmp_path: Path) -> None:
    """Also if the next snapshot is half written: its place was the oldest one's."""
    script = f"""
import os, signal, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]
from pathlib import Path
from test_snapshot import optimizer, take, writer
from workbench.runtime import snapshot
mine = optimizer()
places = writer(Path({str(tmp_path)!r}), mine)
take(places, mine, (0, 1), (0, 2), (0, 3), (0, 4))
def die(path, owner, contents):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
snapshot.write_sealed_tensors = die
take(places, mine, (0, 5))
"""
    with run_script(script, tmp_path / "printed") as process:
        process.join(LIMIT_S)
        assert process.exitcode == -signal.SIGKILL
    expected = optimizer()
    for _ in range(4):
        take_step(expected)
    assert whole(tmp_path) == [(0, 3), (0, 4)] and remove_damaged(tmp_path, RUN) == []
    assert all(
        torch.equal(state_at(tmp_path, (0, 4))[name], tensor) for name, tensor in expected.named_tensors().items()
    )
    assert len([path for path in passing(tmp_path) if path.suffix == ".part"]) == 1


def test_a_copy_is_written_while_the_state_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the state as it was, and is written before the next one and before the writer is closed."""
    mine, may_write, messages = optimizer(), threading.Event(), list[list[tuple[int, int]]]()
    places = writer(tmp_path, mine)

    def wait_and_write(*contents: Any) -> None:
        assert may_write.wait(LIMIT_S)
        sealed_tensors.write_sealed_tensors(*contents)

    monkeypatch.setattr(snapshot, "write_sealed_tensors", wait_and_write)
    take_step(mine)
    expected = {name: tensor.clone() for name, tensor in mine.named_tensors().items()}
    places.write_copy(Position(0, 1), lambda: messages.append(whole(tmp_path)))
    take_step(mine)
    assert whole(tmp_path) == [] and messages == []
    may_write.set()
    places.write_copy(Position(0, 2), lambda: messages.append(whole(tmp_path)))
    places.close()
    assert messages == [[(0, 1)], [(0, 1), (0, 2)]]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_at(tmp_path, (0, 1)).items())
    newest = state_at(tmp_path, (0, 2))
    assert all(torch.equal(tensor, newest[name]) for name, tensor in mine.named_tensors().items())


@pytest.mark.parametrize("room_bytes", [3 * 20 * 4, 3 * 20 * 4 - 1])
def test_no_copy_is_made_for_which_no_plan_leaves_room(
    room_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters of PAC+'s side network and their moments may be of any size; the snapshot is written all the
    same."""
    monkeypatch.setattr(snapshot, "SMALL_BYTES", room_bytes)
    copied, reported = list[Position](), list[list[tuple[int, int]]]()
    write_copy = SnapshotWriter.write_copy

    def note_and_write(places: SnapshotWriter, at: Position, written: Callable[[], None]) -> None:
        copied.append(at)
        write_copy(places, at, written)

    monkeypatch.setattr(SnapshotWriter, "write_copy", note_and_write)
    mine = optimizer()
    rank_job = SimpleNamespace(snapshot=Snapshot(every=1), folder=tmp_path, fingerprint=RUN)
    phase: Any = SimpleNamespace(
        rank_job=rank_job, optimizer=mine, session=None, result=None, is_writer=True, layers=LAYERS
    )
    with RankSnapshots(phase, Position(0, 0), KeptInMemory()) as snapshots:
        take_step(mine)
        snapshots.stepped(Position(0, 1), lambda: reported.append(whole(tmp_path)))
    assert copied == [(0, 1)] * (room_bytes == sum(vector.nbytes for vector in mine.state_vectors()))
    assert reported == [[(0, 1)]]


def test_a_copy_that_could_not_be_written_is_told_of_at_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, messages = optimizer(), list[int]()
    places = writer(tmp_path, mine)

    def refuse(*about: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sealed_tensors, "_digest", refuse)
        places.write_copy(Position(0, 1), lambda: messages.append(1))
        with pytest.raises(WriteError, match="No space left on device"):
            places.write_copy(Position(0, 2), lambda: messages.append(2))
    places.close()
    assert messages == [] and whole(tmp_path) == []
