"""What a live view shows of a run: who holds what, what travels, the losses, a measured step over the predicted one."""

from __future__ import annotations

import base64
import re
import threading
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hostile import shown_by
from widget_reports import CLUSTER, PLAN, PREDICTED, TIMELINE

from tests.plans import staged_plan
from workbench.core.job import Job
from workbench.core.timeline import Timeline
from workbench.methods.base import DeviceState, Event
from workbench.plots import svg
from workbench.plots.topology import Node, topology, traffic_of
from workbench.runs.progress import RunState
from workbench.widgets import live
from workbench.widgets.live import parts_of, still

ALONE = staged_plan((6, {0: 32}), method="pac_plus")
BEGUN = (
    Event("predicted", predicted=PREDICTED),
    Event("plan", step=0, plan=PLAN, timelines={"first epoch": TIMELINE}),
    Event("phase", message="Training", stage="train"),
    Event("device", 0, 0, 0, 5, device=DeviceState("first epoch", 2.0, 1.0, 150_000_000)),
    Event("device", 1, 0, 0, 5, device=DeviceState("first epoch", 2.0, 0.5, 50_000_000, "71 °C")),
    Event("step", epoch=0, step=0, num_steps=5, loss=0.7, samples=32),
    Event("spans", epoch=0, step=0, num_steps=5, spans=TIMELINE.spans),
)
LOST = (
    Event("device", 1, message="lost", device=DeviceState("lost")),
    Event("plan", step=1, plan=ALONE, timelines={"first epoch": replace(TIMELINE, spans=TIMELINE.spans[:1])}),
)


def parts_after(*events: Event) -> dict[str, str]:
    state = RunState(Job(epochs=2), CLUSTER)
    for event in events:
        state.update(event)
    return parts_of(state.snapshot(), state.course, CLUSTER)


def label_of(part: str) -> str:
    [label] = re.findall(r'aria-label="([^"]*)"', part)
    return label


def test_before_there_is_a_plan_nothing_is_drawn() -> None:
    parts = parts_after(Event("phase", message="Loading"))
    assert parts.keys() == {"head", "notes"} and "Loading (0 s)" in parts["head"]


def test_the_map_says_who_holds_what_and_what_travels() -> None:
    label = label_of(parts_after(*BEGUN)["map"])
    assert "alpha: 30 GFLOP/s (0.5 core), layers 0-3, 8 samples, computes 50% of a step" in label
    assert "uses 150 MB of 800 MB" in label and "gamma: 16.2 GFLOP/s (0.27 core), no part in the plan" in label
    assert label.endswith("In a step: alpha to beta 1.0 kB of activations.") and "71 °C" in label


def test_work_memory_losses_and_both_steps_are_drawn() -> None:
    parts = parts_after(*BEGUN)
    label = label_of(parts["devices"])
    watts = (CLUSTER.devices[0].watts_idle + CLUSTER.devices[0].watts_busy) / 2  # it computes half of the step of 2 s
    assert f"alpha first epoch, computes 50%, memory 150 MB of 800 MB, {2 * watts:.3g} J modelled" in label
    metered = Event("device", 1, 0, 1, 5, device=DeviceState("first epoch", metered_j=12.3))
    label = label_of(parts_after(*BEGUN, metered)["devices"])
    assert "12.3 J measured" in label and label.count("J modelled") == 1  # the others have done no step
    assert label_of(parts["loss"]) == "Training loss: 0.7 in step 1, now 0.7 (smoothed) in step 1."
    assert label_of(parts["step"]).endswith("measured 1,000 ms (step 1 of epoch 1), predicted 1,000 ms.")
    assert "first epoch, step 1 of 5" in shown_by(parts["more"]) and "activations" in shown_by(parts["more"])


def test_after_a_loss_the_device_is_away_and_the_new_plan_is_shown() -> None:
    parts = parts_after(*BEGUN, *LOST, Event("step", epoch=0, step=0, num_steps=5, loss=0.6))
    label = label_of(parts["map"])
    assert "beta: lost." in label and "alpha: 30 GFLOP/s (0.5 core), layers 0-5, 32 samples" in label
    assert "New plan" in parts["map"] and "beta lost" in shown_by(parts["loss"])
    assert label_of(parts["loss"]).startswith("Training loss: 0.6 in step 1")  # it was done again
    assert "measured" not in label_of(parts["step"])  # the spans were those of other devices


def test_epochs_from_the_cache_and_their_scores() -> None:
    cached = Event("step", epoch=1, step=0, num_steps=5, loss=0.5)
    scores = [Event("scores", epoch=epoch, metrics={"accuracy": 0.7 + epoch / 10, "f1": 0.1}) for epoch in range(2)]
    parts = parts_after(*BEGUN, cached, *scores)
    assert "from the cache" in parts["map"]
    assert "Accuracy on the validation split: 0.7 after step 5, 0.8 after step 10." in label_of(parts["loss"])
    assert "step" not in parts  # the known ones are of the first epoch


def test_inference_requests_have_their_seconds_rates_and_a_measured_request() -> None:
    state = RunState(Job(method="galaxy_plus", micro_batches=1), CLUSTER, clock=iter(range(100)).__next__)
    answered = [
        Event("step", 0, 0, number, 5, seconds=1.0 + number / 10, samples=1, tokens=8 * (number > 0))
        for number in range(3)
    ]
    predicted = tuple(replace(record, epoch=0, step=number) for number, record in enumerate(PREDICTED[:5]))
    predicted = (*predicted[:2], replace(predicted[2], predicted_s=1.1), *predicted[3:])  # the third is longer
    begun = (Event("predicted", predicted=predicted), replace_timelines(BEGUN[1], "request"), *BEGUN[2:5])
    for event in (*begun, *answered, Event("spans", 0, 0, 2, 5, spans=TIMELINE.spans)):
        state.update(event)
    now = state.snapshot()
    assert "1 requests/s, 8 tokens/s" in now.headline and now.epochs[0].words.startswith("3 of 5 answered")
    parts = parts_of(now, state.course, CLUSTER)
    assert label_of(parts["loss"]) == "Seconds of requests: 1,200 ms measured in request 3, 1,100 ms predicted."
    assert label_of(parts["step"]).endswith(
        "measured 1,000 ms (request 3, 1,100 ms predicted for its length), predicted 1,000 ms (of typical length)."
    )
    assert label_of(parts["map"]).endswith("In a request: alpha to beta 1.0 kB of activations.")
    assert "share of a request" in parts["devices"] and "bytes in a request" in parts["more"]


def replace_timelines(event: Event, name: str) -> Event:
    return event._replace(timelines={name: TIMELINE})


def test_a_collective_goes_round_its_members() -> None:
    from workbench.core.schedule import ALLREDUCE, Op
    from workbench.core.timeline import Span

    ring = tuple(Span(rank, Op(ALLREDUCE, ranks=(0, 1, 2)), 0.0, 1.0, 400) for rank in range(3))
    timeline = Timeline(source="simulated", device_names=("a", "b", "c"), spans=ring)
    result = traffic_of(timeline, [0, 2, 3])
    assert [(one.source, one.target, one.nbytes, one.is_collective) for one in result] == [
        (0, 2, 400, True),
        (2, 3, 400, True),
        (3, 0, 400, True),
    ]


@pytest.mark.parametrize(("name", "words"), [("loss", "losses"), ("tokens", "tokens"), ("act", "activations")])
def test_what_travels_is_named_as_several(name: str, words: str) -> None:
    from workbench.core.schedule import Value, send
    from workbench.core.timeline import Span

    span = Span(0, send(Value(name, 0, 0), 0, 1), 0.0, 1.0, 4)
    [result] = traffic_of(Timeline(source="simulated", device_names=("a", "b"), spans=(span,)), [0, 1])
    assert result.what == (words,)


@pytest.mark.parametrize("count", [1, 2, 4, 7, 16, 40])
def test_a_map_of_any_size_stays_inside_its_frame(count: int) -> None:
    drawn = topology([Node(name=f"d{rank}", speed="1 GFLOP/s") for rank in range(count)], [])
    frames = re.findall(
        r'<rect x="([-\d.]+)" y="([-\d.]+)" width="([\d.]+)" height="([\d.]+)"[^>]*workbench-node', drawn
    )
    assert len(frames) == count
    for x, y, width, height in (map(float, frame) for frame in frames):
        assert x >= 0 and y >= 0 and x + width <= 480 and y + height <= 300


def test_a_still_picture_needs_no_script_and_no_kernel() -> None:
    picture = still(parts_after(*BEGUN))
    assert "<script" not in picture and "<style>" in picture and "<svg" not in picture
    images = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="[^"]+"', picture)
    drawings = [base64.b64decode(image).decode() for image in images]
    assert len(drawings) == 4 and all("prefers-color-scheme: dark" in drawing for drawing in drawings)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    swatches = re.findall(r'<img src="[^"]+" alt="" width="10" height="10"> ([a-z ]+)<', picture)
    assert swatches == ["forward", "send", "receive"]


@pytest.mark.parametrize(("file", "others"), [("widgets/live.css", set()), ("server/page.html", {"paper"})])
def test_a_drawing_has_the_same_dark_colours_as_an_image_and_on_the_page(file: str, others: set[str]) -> None:
    sheet = Path(live.__file__).parents[1] / file
    text = sheet.read_text(encoding="utf-8").lower()
    dark = text[text.index("prefers-color-scheme: dark") :]
    colours = {name: colour for name, colour in svg.DARK.items() if name not in others}
    assert all(f"--workbench-{name}: {colour.lower()};" in dark for name, colour in colours.items())


def test_a_picture_of_nothing_is_empty() -> None:
    assert still({}) == '<div class="workbench-live"></div>'


def test_ticks_are_round_numbers() -> None:
    assert svg.ticks(0.63, 0.69, 3) == pytest.approx([0.64, 0.66, 0.68])
    assert svg.ticks(2, 2) == [2]


def test_events_may_come_while_a_picture_is_drawn() -> None:
    state, ended = RunState(Job(epochs=2), CLUSTER), threading.Event()
    for event in BEGUN:
        state.update(event)

    def feed() -> None:
        for step in range(300):
            state.update(Event("step", epoch=0, step=step, num_steps=300, loss=0.5))
        ended.set()

    thread = threading.Thread(target=feed)
    thread.start()
    while not ended.is_set():
        assert "loss" in parts_of(state.snapshot(), state.course, CLUSTER)
    thread.join()
    assert len(state.course.losses) == 300
