"""Texts that are ordered while devices serve equal one process's, also after a device was lost within one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from tests.methods.conftest import four_devices
from tests.methods.galaxy_plus.ranks import plans_for
from tests.plans import inference_plan
from tests.waiting import wait_for
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.methods.common.text_model import load_text_model
from workbench.methods.galaxy_plus.prepare import random_requests
from workbench.methods.galaxy_plus.profiles import made_up_host
from workbench.methods.galaxy_plus.serving import text_service
from workbench.methods.galaxy_plus.serving.panel import DevicePanel
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings, StreamSettings
from workbench.methods.galaxy_plus.serving.serve import serve, usual_length
from workbench.methods.galaxy_plus.serving.text_policy import DeviceWriter, TextPolicy
from workbench.models.generation import Sampling
from workbench.models.loading import load_model
from workbench.models.sharding import model_layout
from workbench.models.speculation import MOST_ROWS
from workbench.models.text import CachedModel, LocalWriter, Writer
from workbench.runtime.engines import EngineCluster
from workbench_studies.bench.serving import SOAK_FLOPS_PER_S

SAMPLINGS = (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=5))
PROMPTS = ("hello", "a longer text about the sea", "x", "four")


def written_together(writer: Writer, wanted: Sequence[tuple[list[int], int, Sampling]]) -> list[list[int]]:
    """Return texts that are asked for at the same time."""
    with ThreadPoolExecutor(len(wanted)) as threads:
        return list(threads.map(lambda one: list(writer.write(*one)), wanted))


@pytest.mark.parametrize(
    ("draft", "ranks"), [("layers:1", (1, 2, 3)), ("int4", (0, 1, 2, 3)), ("tiny-gpt2-2", (1, 2, 3))]
)
def test_a_draft_on_one_device_changes_no_text(
    draft: str, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It guesses on the fastest device that the plan leaves out, or on the plan's first; also after a loss."""
    model, messages = "tiny-llama-4", list[str]()
    monkeypatch.setattr(text_service, "host_profile", lambda asked, told: made_up_host(asked.model, SOAK_FLOPS_PER_S))
    patient = partial(ReschedulingSettings, slow_factor=1000.0)  # a busy host makes no device a straggler
    monkeypatch.setattr(text_service, "ReschedulingSettings", patient)
    local = load_text_model(model)
    wanted = [(local.tokenizer.prompt(text), 16, way) for text in PROMPTS for way in SAMPLINGS]
    wanted += wanted[:2]  # of more than eight texts nothing is guessed
    expected = written_together(local.writer, wanted)
    lasting = (local.tokenizer.prompt("one"), 60, SAMPLINGS[1])
    expected_last = list(local.writer.write(*lasting))
    layout = model_layout(model)
    plan = inference_plan(
        method="galaxy_plus",
        ranks=ranks,
        shares=(1.0,) * len(ranks),
        schemes=(1,) * layout.num_layers,
        units=(1,) * len(ranks),
        columns=(layout.stacks[0].columns // len(ranks),) * len(ranks),
    )
    cluster = four_devices()
    slow_first = replace(cluster.devices[1], host_share=0.4)  # of the first plan, so that another device guesses
    cluster = replace(cluster, devices=(cluster.devices[0], slow_first, *cluster.devices[2:]))
    with text_service.text_service(
        model, cluster, "paced", ends=[], say=messages.append, first_plan=plan, draft=draft
    ) as service:
        assert list(service.writer.write(*lasting)) == expected_last
        passes, panel = service.policy.passes, DevicePanel(service)
        assert passes.mean > 1 and passes.acceptance is not None and passes.count == 59 - passes.right
        state, round_ = panel.state(), service.policy.draft_round
        assert round_ is not None and state["guesser"] == {"name": "device-0", "break_even": round_.break_even}
        assert "device-0: 1 GFLOP/s (1 core), draft" in state["svg"]
        assert written_together(service.writer, wanted) == expected
        text = service.writer.write(*lasting)
        results = [next(text)]
        running = service.policy._running
        assert running is not None and running.job.draft_rank == 0
        panel.act(service.cluster.devices[running.job.draft_rank].name, "kill")
        assert results + list(text) == expected_last
    assert any("guesses tokens: a round of 4 takes" in line for line in messages)


@pytest.mark.parametrize("model", ["tiny-llama-2", "tiny-t5-4"])
def test_texts_of_mixed_lengths_equal_each_alone_and_go_on_after_a_loss(model: str) -> None:
    """Together in one process and on devices, they equal those that transformers' model writes one by one."""
    local, layout, alone = (
        load_text_model(model),
        model_layout(model),
        LocalWriter(model, CachedModel(load_model(model))),
    )
    prompts = [local.tokenizer.prompt(text) for text in PROMPTS]
    wanted = [(ids, number, way) for ids in prompts for number, way in zip((3, 24), SAMPLINGS, strict=True)] * 3
    expected = [list(alone.write(*one)) for one in wanted]
    lasting = (prompts[1], 200, SAMPLINGS[1])  # longer than a kill takes
    expected_last = list(alone.write(*lasting))
    assert written_together(local.writer, wanted) == expected
    first_plan = plans_for(layout)["overlapped tiles"]
    with text_service.text_service(
        model, four_devices(), "paced", ends=[], say=lambda text: None, first_plan=first_plan
    ) as service:
        panel, policy = DevicePanel(service), service.policy
        assert len(wanted) > MOST_ROWS and written_together(service.writer, wanted) == expected
        state = panel.state()
        assert "4 of 4 devices compute each token" in state["svg"] and all(device["up"] for device in state["devices"])
        results, text = list[int](), service.writer.write(*lasting)
        results += [next(text), next(text)]
        panel.act(state["devices"][1]["name"], "kill")
        assert written_together(service.writer, wanted) == expected  # they come before, while and after it is lost
        assert results + list(text) == expected_last and policy.num_again
        wait_for(lambda: not panel.state()["devices"][1]["up"], "the loss is shown")
        stopped = service.writer.write(*wanted[1])
        assert next(stopped) == expected[1][0]
        stopped.close()  # the client is gone: the devices stop, and write the next text
        assert list(service.writer.write(*wanted[0])) == expected[0]
        wait_for(lambda: policy.step == 2 * len(wanted) + 3, "every text is counted")


def test_a_slow_device_is_left_out_and_taken_back_while_texts_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is found by its times or taken back, every text equals the one written in one process."""
    model = "tiny-llama-2"
    wanted = [([5 + number] * (4 + number), 60, SAMPLINGS[1]) for number in range(3)]
    local = load_text_model(model).writer
    expected = [list(local.write(*one)) for one in wanted]
    monkeypatch.setattr(text_service, "host_profile", lambda *asked: made_up_host(model, SOAK_FLOPS_PER_S))
    first_plan = plans_for(model_layout(model))["overlapped tiles"]
    with text_service.text_service(
        model, four_devices(), "paced", ends=[], say=lambda text: None, first_plan=first_plan
    ) as service:
        panel, policy = DevicePanel(service), service.policy
        slow = policy.cluster.devices[1].name
        for action, is_served_by in (("slow", False), ("return", True)):
            panel.act(slow, action)
            while not (serving := policy.state.serving) or (slow in serving) != is_served_by:
                assert written_together(service.writer, wanted) == expected
            assert written_together(service.writer, wanted) == expected
        device = panel.state()["devices"][1]
    kinds = [event.kind for event in policy.log.events if event.rank == 1]
    # A busy host may make it a straggler before, and again.
    assert in_order(["slowed", "restored", "recovered", "readmitted"], kinds)
    assert in_order(["straggler", "excluded", "probed", "readmitted"], kinds)
    assert device["up"] and not device["slow"]


def in_order(wanted: Sequence[str], kinds: Sequence[str]) -> bool:
    rest = iter(kinds)
    return all(kind in rest for kind in wanted)


@pytest.mark.parametrize("model", ["tiny-llama-2", "tiny-vit-2", "tiny-t5-4"])
def test_a_stream_is_served_for_models_without_a_limit_and_of_pictures(model: str, engines: EngineCluster) -> None:
    layout = model_layout(model)
    stream = StreamSettings(num_requests=3, length=usual_length(layout))
    report = serve(model, four_devices(), engines, made_up_host(model, 1e9), stream=stream)
    assert len(report.requests) == 3 and not report.num_wrong and not report.num_lost
    with pytest.raises(ConfigError, match="Its pictures have 17" if layout.family.reads_images else "one at least"):
        random_requests(layout, 0)


def test_a_text_that_comes_after_the_service_has_ended_does_not_wait() -> None:
    ended: Any = SimpleNamespace(inbox=Queue(), error=RuntimeSetupError("A text was to be written.", "It has ended."))
    writer = DeviceWriter(model_layout("tiny-llama-2"), [], ended)
    with pytest.raises(RuntimeSetupError, match="It has ended"):
        next(writer.write([1], 4, Sampling()))


def test_who_guesses_is_asked_for_while_the_devices_change() -> None:
    generations: list[Any] = [SimpleNamespace(job=SimpleNamespace(draft_rank=1))]

    class Changing:
        """A policy whose coordinator ends the generation as soon as it has been read."""

        _round = "the round"

        @property
        def _running(self) -> Any:
            return generations.pop() if generations else None

    assert TextPolicy.draft_round.fget(Changing()) == "the round"  # type: ignore[attr-defined]
