"""Every count, size, speed and name has a range, which holds for what is decoded and for what is constructed."""

from dataclasses import replace

import pytest

from tests.clusters import cluster_of, device
from tests.plans import inference_plan
from workbench.core import Cluster, Device, Job, Link, Processor
from workbench.core.catalogue import load_cluster
from workbench.core.device_faults import Fault, parse_faults
from workbench.core.errors import ConfigError
from workbench.core.proportions import proportional_parts
from workbench.core.serial import from_builtins, to_builtins
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings, StreamSettings

NAN, INF = float("nan"), float("inf")
LINK = Link(bytes_per_s=1e6)
DEVICE = device("a", link=LINK)
WHOLE = {
    Job: Job(),
    Link: LINK,
    Device: DEVICE,
    Processor: Processor(name="cpu", flops_per_s=1e9),
    Cluster: Cluster(name="c", devices=(DEVICE,)),
    StreamSettings: StreamSettings(),
    ReschedulingSettings: ReschedulingSettings(),
    Fault: Fault(kind="slow", rank=0, start=1.0, end=2.0, factor=4.0),
}
OUTSIDE = [
    *(
        (Job, name, value)
        for name in ("epochs", "batch_size", "micro_batches", "max_length")
        for value in (0, -1, 10**12, 10**400)
    ),
    *((Job, f"{split}_samples", value) for split in ("train", "validation", "test") for value in (0, -5, 10**12)),
    *(
        (Job, name, value)
        for name in ("learning_rate", "weight_decay", "warmup_fraction")
        for value in (NAN, INF, -1.0, 1e300)
    ),
    (Job, "seed", 2**63),
    (Job, "epochs", True),
    (Job, "epochs", 1.5),
    (Job, "epochs", "3"),
    (Job, "model", "a\x1b[31m"),
    (Job, "method", "m" * 101),
    (Job, "data", "d" * 5000),
    *((Link, name, value) for name in ("bytes_per_s", "latency_s") for value in (NAN, INF, -1.0, 1e300)),
    *(
        (Device, name, value)
        for name in ("flops_per_s", "watts_busy", "storage_bytes_per_s")
        for value in (NAN, INF, -1.0, 1e300)
    ),
    *((Device, "memory_bytes", value) for value in (0, -1, 10**400)),
    *((Device, "host_share", value) for value in (0.0, -0.5, 100.0, NAN)),
    *((kind, "name", value) for kind in (Device, Processor) for value in ("a\nb", "n" * 101)),
    (Cluster, "name", "bell\a"),
    *((StreamSettings, "num_requests", value) for value in (0, -1, 10**12)),
    *((StreamSettings, "rate_per_s", value) for value in (NAN, INF, -1.0)),
    (StreamSettings, "length", -1),
    *(
        (ReschedulingSettings, f"{name}_s", value)
        for name in ("report_every", "probe_every", "silence")
        for value in (NAN, INF, 0.0, -1.0)
    ),
    *(
        (ReschedulingSettings, name, value)
        for name in ("slow_factor", "back_off", "calm_s")
        for value in (NAN, INF, -1.0)
    ),
    *((ReschedulingSettings, name, 0) for name in ("window", "repeats", "good_probes")),
    (ReschedulingSettings, "reaction", "excluded"),
    *((Fault, name, value) for name in ("start", "end", "factor") for value in (NAN, INF, -1.0)),
    (Fault, "factor", 0.5),
    (Fault, "rank", -1),
    (Fault, "kind", "slower"),
]


@pytest.mark.parametrize(("kind", "name", "value"), OUTSIDE)
def test_a_field_out_of_its_range_is_named_and_quoted(kind, name, value):
    quoted = f"{name} = a number of 401 digits" if value == 10**400 else f"{name} = "
    with pytest.raises(ConfigError) as constructed:
        replace(WHOLE[kind], **{name: value})
    with pytest.raises(ConfigError) as decoded:
        from_builtins(to_builtins(WHOLE[kind]) | {name: value}, kind, source="the file")
    for message in (str(constructed.value), str(decoded.value)):
        assert quoted in message
        assert message.isprintable()
        assert len(message) < 400


@pytest.mark.parametrize(
    ("value", "todo"), [(0, "Raise epochs."), (10**12, "Lower epochs."), (NAN, "Write a number, without quotes.")]
)
def test_the_range_is_said_and_what_to_do(value, todo):
    with pytest.raises(ConfigError) as caught:
        Job(epochs=value)
    assert caught.value.todo == todo
    if value == value:
        assert caught.value.found == "It must be at least 1 and at most 1,000."


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("slow:\u00b2:4@1-2", "The devices of 'laptop' are"),
        ("slow:1" + 400 * "0" + ":4@1-2", "The devices of 'laptop' are"),
        ("slow:9:4@1-2", "The devices of 'laptop' are"),
        ("slow:0:0.5@1-2", "factor = 0.5. It must be at least 1"),
        ("slow:0:1@1-2", "That changes nothing"),
        ("slow:0:nan@1-2", "factor = nan"),
        ("slow:0:1e300@1-2", "factor = 1e+300"),
        ("kill:0:4@1-2", "Only slow and memory have a factor"),
        ("freeze:0:1@1-2", "Only slow and memory have a factor"),
        ("melt:0@1-2", "Kinds are slow, kill, freeze, return"),
        ("kill:0@step2", "Here faults are counted in seconds"),
        ("kill:0@2-1", "must end after it begins"),
        ("kill:0@nan", "start = nan"),
        ("kill:0@1-inf", "end = inf"),
        ("kill:0@-1-2", "names no step and no seconds"),
        ("kill:0@x-\x1b", r"'x-\x1b' names no step"),
        ("kill:0", "It is not KIND:DEVICE[:FACTOR]@FROM"),
        ("\x1b[31m", r"'\x1b[31m' was asked for"),
    ],
)
def test_a_serving_fault_that_cannot_be_meant(word, found):
    with pytest.raises(ConfigError) as caught:
        parse_faults(word, load_cluster("laptop"), "s")
    assert found in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("kill:a@0", "step = 0. It must be at least 1"),
        ("kill:a@step1" + 30 * "0", "at most 1,000,000,000"),
        ("kill:a@\u00b2", "names no step and no seconds"),
        ("kill:a@nan", "step = nan"),
        ("kill:a@3s; return:a@5", "By then 'a' has not gone"),
        ("kill:a@3-2s", "must end after it begins"),
        ("kill:a@4-3", "must end after it begins"),
        ("kill:a:4@3", "Only slow and memory have a factor"),
        ("leave:a:0@3", "give notice is computed, not set"),
        ("kill a 3", "It is not KIND:DEVICE"),
        ("slow:a:0.5@3", "factor = 0.5"),
        ("slow:a:nan@3", "factor = nan"),
        ("slow:b:4@3", "The devices of .* are a"),
        ("burn:a@3", "Kinds are slow, memory, kill, freeze, leave, return"),
        ("return:a@3", "By then 'a' has not gone"),
        ("slow:a:4@3; return:a@5", "By then 'a' has not gone"),
    ],
)
def test_a_step_fault_that_cannot_be_meant(text, found):
    with pytest.raises(ConfigError, match=found):
        parse_faults(text, WHOLE[Cluster])


def test_a_fault_names_a_device_whose_name_has_a_colon():
    colons = cluster_of(("a", "a:4", "x:y"), link=LINK)
    faults = parse_faults("slow:a:4@3; slow:a:4:2@4; kill:x:y@5; slow:x:y:8@2", colons)
    assert [(fault.kind, fault.rank, fault.factor) for fault in faults] == [
        ("slow", 2, 8.0),
        ("slow", 1, 4.0),
        ("slow", 1, 2.0),
        ("kill", 2, 1.0),
    ]


@pytest.mark.parametrize("parts", [(NAN, 1.0), (INF, 1.0), (-1.0, 2.0), (0.0, 0.0)])
def test_parts_of_a_sequence_are_finite(parts):
    with pytest.raises(ConfigError):
        inference_plan(shares=parts)
    with pytest.raises(ConfigError):
        proportional_parts(8, parts)
