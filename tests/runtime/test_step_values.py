from __future__ import annotations

import threading

import pytest
import torch

from tests.waiting import LIMIT_S, wait_for
from workbench.core.errors import DeviceLostError
from workbench.core.schedule import Value
from workbench.runtime.step_values import StepValues

A, B = Value("a", 0), Value("b", 0)


def values(uses: dict[Value, int], **settings: object) -> StepValues:
    return StepValues(uses, settings.pop("sources", {}), settings.pop("carried", {}), timeout_s=0.0)  # type: ignore[arg-type]


def wait_for_streams(box: StepValues, count: int) -> None:
    wait_for(lambda: len(box._waiting.get(A, ())) == count, f"{count} streams that wait")


def test_a_value_lives_until_its_last_use() -> None:
    box = values({A: 2, B: 1})
    box.put(A, torch.zeros(4), 1.0)
    box.put(B, torch.zeros(2), 1.0)
    box.put(Value("nobody", 0), torch.zeros(100), 1.0)
    box.release(A, 1.5)
    assert box.get(A).time_s == 1.0
    box.release(A, 2.0)
    assert [sample.nbytes for sample in box.memory] == [16, 24, 8]
    assert box.take(B).shape == (2,)


def test_memory_is_used_when_the_emulated_device_uses_it() -> None:
    """Where this machine is behind, a message is put before the operation that ended earlier releases its input."""
    box = values({A: 1, B: 1})
    box.put(A, torch.zeros(4), 1.0)
    box.put(B, torch.zeros(2), 3.0)
    box.release(A, 2.0)
    box.release(B, 4.0)
    assert box.memory == [(1.0, 16), (2.0, 0), (3.0, 8), (4.0, 0)]


def test_several_streams_await_one_value() -> None:
    box, got = values({A: 2}), []
    threads = [threading.Thread(target=lambda: got.append(box.get(A).content)) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for_streams(box, 2)  # without a time-out: what this rank computes itself may take any time
    box.put(A, "there", 1.0)
    for thread in threads:
        thread.join(LIMIT_S)
    assert got == ["there", "there"]


def test_a_failure_wakes_whoever_waits() -> None:
    box, later = values({A: 1, B: 1}), values({A: 1})
    box.continue_in(later)
    threading.Thread(target=lambda: (wait_for_streams(box, 1), box.fail(ConnectionError("gone")))).start()
    with pytest.raises(DeviceLostError, match="gone"):
        box.get(A)
    with pytest.raises(DeviceLostError, match="gone"):
        later.get(A)
    with pytest.raises(DeviceLostError, match="gone"):
        box.raise_failure()
    assert str(box.fail(ValueError("second"))) == "gone", "the first error counts"
    box.put(B, "there", 1.0)
    assert box.get(B).content == "there"  # what has come stays readable


def test_a_silent_sender_is_named() -> None:
    with pytest.raises(DeviceLostError, match=r"a:0 was awaited from rank 3.*within 0 s"):
        values({A: 1}, sources={A: 3}).get(A)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_carried_value_is_the_next_steps(is_early: bool) -> None:
    box, later = values({}, carried={A: B}), values({B: 1})
    if is_early:
        box.put(A, "kept", 1.0, 0.25)
    box.continue_in(later)
    if not is_early:
        box.put(A, "kept", 1.0, 0.25)
    assert later.get(B) == ("kept", 1.0, 0, 0.25)
