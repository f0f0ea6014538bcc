"""Real devices over SSH do what emulated ones do: every method, requests, the measurement of devices and links; nobody
on their network reads what they send.

Over OpenSSH and a network of its own where they are to be had, else over pipes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from network_observer import observed
from ssh_hosts import WHY_NOT, Hosts, NetHosts, bring_profiles, home, reachable, real_cluster

from tests.clusters import with_devices
from tests.experiment.running import losses, run
from tests.plans import inference_plan, staged_plan
from tests.waiting import wait_for
from workbench import experiment
from workbench.core import Job, Report
from workbench.core.device_faults import Fault, FaultSchedule
from workbench.core.errors import ConfigError, DeviceLostError, MemoryBudgetError, RuntimeSetupError
from workbench.methods.base import Event
from workbench.methods.common.text_model import load_text_model
from workbench.methods.devices import over_ssh
from workbench.methods.galaxy_plus.profiles import analytic_profile
from workbench.methods.galaxy_plus.serving import text_service
from workbench.methods.galaxy_plus.serving.drafts import DraftPrices
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings, ServingEvent, StreamSettings
from workbench.methods.galaxy_plus.serving.serve import serve
from workbench.models.generation import Sampling
from workbench.models.loading import load_model, load_tokenizer
from workbench.models.saving import save_tokenizer
from workbench.models.stored_tensors import tensors_in
from workbench.runtime.measuring import measure_rank_host, measure_rank_links, measure_rank_sustained
from workbench.runtime.ssh_devices import SshEngines
from workbench.tasks import load_task
from workbench_studies.bench.serving import SOAK_FLOPS_PER_S, SOAK_LENGTH, SOAK_MODEL

NAMES = ("alpha", "beta")
JOBS: dict[str, dict[str, Any]] = {
    "pac_plus": {"options": {"paradigm": "pipeline_parallel"}},
    "confidant": {},
    "ringada": {
        "options": {"local_iterations": 1, "unfreeze_every": 3, "bottleneck": 8, "replan": False},
        "train_samples": 56,
    },
    "p_rge": {"model": "tiny-llama-2"},
    "galaxy_plus": {"options": {"system": "megatron_lm"}},
}

HALVES = staged_plan((3, {0: 8}), (3, {1: 8}), method="fine_tuning", micro_batches=2)


class Place:
    """Where the devices are: the folder of their homes; hosts: None over pipes.  real: their engines, all tests'."""

    def __init__(self, folder: Path, hosts: Hosts | None, real: SshEngines) -> None:
        self.folder, self.hosts, self.real = folder, hosts, real


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        reachable(tmp_path_factory.mktemp("devices"), NAMES) as (folder, hosts),
        over_ssh(real_cluster(NAMES), tmp_path_factory.mktemp("run")) as real,
    ):
        yield Place(folder, hosts, real)


def run_there(job: Job, emulated: Report, place: Place, tolerance: float, **options: Any) -> Report:
    """Run a job on the real devices; its losses must be those of an emulated run."""
    bring_profiles(place.folder, NAMES)
    shutil.rmtree(place.real.folder, ignore_errors=True)
    report = experiment.run(job, place.real.cluster, workdir=place.real.folder, engines=place.real, **options)
    result, expected = ([loss or 0.0 for *_, loss in losses(one)] for one in (report, emulated))
    assert result == pytest.approx(expected, rel=tolerance)
    return report


@pytest.mark.parametrize("method", JOBS)
def test_a_run_is_the_emulated_one(method: str, job: Job, place: Place, tmp_path: Path) -> None:
    epochs = 2 if method == "pac_plus" else 1  # the second one runs from its cache
    job = replace(job, method=method, epochs=epochs, **JOBS[method])
    emulated = run(job, tmp_path)
    report = run_there(job, emulated, place, 1e-5, chosen_plan=emulated.plan)
    assert report.source == "real" and report.plan.busy_ranks == {0, 1}
    expected = emulated.metrics if method != "galaxy_plus" else {"largest error": pytest.approx(0, abs=1e-4)}
    assert {name: report.metrics[name] for name in expected} == expected


def test_a_device_gets_the_weights_of_its_stage_alone(job: Job, place: Place, tmp_path: Path) -> None:
    model = tmp_path / "model"
    load_model("tiny-bert").save_pretrained(model)
    save_tokenizer("tiny-bert", model)
    options = {"technique": "lora", "paradigm": "pipeline_parallel"}
    job = replace(job, method="fine_tuning", model=str(model), options=options, epochs=1)
    emulated = run(job, tmp_path / "emulated", chosen_plan=HALVES)
    place.real.bring_model(job.model)
    run_there(job, emulated, place, 1e-5, chosen_plan=HALVES)
    stored = {
        name: tensor for name, tensor in tensors_in(model / "model.safetensors")[0].items() if "pooler" not in name
    }
    late = {name for name in stored if any(f".layer.{layer}." in name for layer in (3, 4, 5))}
    for name, wanted in (("alpha", stored.keys() - late), ("beta", late)):
        [kept] = (home(place.folder, name) / ".workbench-kit/cache/brought").iterdir()
        assert not (kept / "model.safetensors").exists()
        results = {int(path.name.partition("-")[0]) for path in (kept / "model.safetensors.tensors").iterdir()}
        assert results == {stored[one].offset for one in wanted}
    load_model("tiny-bert-5").save_pretrained(model)  # another model in its place
    place.real.bring_model(job.model)
    assert not (kept / "model.safetensors.tensors").exists()
    with pytest.raises(RuntimeSetupError, match="No model of this run has it"):
        place.real.bring_weights(place.real.slots[0].link, ["brought/0123/../../id_rsa"])


@pytest.mark.parametrize("method", ("fine_tuning", "galaxy_plus"))
def test_plans_are_compared(method: str, job: Job, place: Place) -> None:
    job = replace(job, method=method, epochs=1, **JOBS.get(method, {}))
    cluster = place.real.cluster
    plans = {"one": HALVES if method == "fine_tuning" else experiment.plan(job, cluster)}
    shutil.rmtree(place.real.folder, ignore_errors=True)
    [point] = experiment.sweep(job, cluster, plans, num_steps=2, workdir=place.real.folder, engines=place.real)
    assert point.num_steps == 2 and point.measured_s and (point.overrun_share, point.dilation) == (0, 1)


@pytest.fixture(scope="module")
def unbroken(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """An emulated run whose mini-batches are the same on any devices, so long that faults fall into it.

    Each engine that comes back imports its libraries: without LoRA's it is there in half of the time.
    """
    options = {"technique": "adapters", "paradigm": "pipeline_parallel"}
    job = replace(job, method="fine_tuning", options=options, learning_rate=5e-4, epochs=5)
    return run(job, tmp_path_factory.mktemp("unbroken"))


def test_faults_do_what_they_do_in_emulation(unbroken: Report, place: Place) -> None:
    """One is slow and then freezes, after the other has left: both are called back, for nobody else can go on."""
    job = replace(unbroken.job, faults="slow:alpha:20@step1-9; leave:beta@step2-19; freeze:alpha@step4-19")
    report = run_there(job, unbroken, place, 1e-4, chosen_plan=HALVES)
    text = " ".join(report.notes)
    for words in (
        "Fault: slow alpha, 20 times",
        "beta leaves, in step",
        "alpha is lost, in step",
        "has come back after",
    ):
        assert words in text
    assert "beta is lost" not in text
    assert {"leave beta", "freeze alpha"} <= {recovery.what for recovery in report.recoveries}


def agent_of(device_home: Path) -> int:
    """Return the process number of a device's agent."""
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            is_agent = process.name.isdigit() and b"exec(r(int(r(8))))" in (process / "cmdline").read_bytes()
            if is_agent and f"HOME={device_home}\0".encode() in (process / "environ").read_bytes():
                return int(process.name)
    raise AssertionError("no agent")


def test_a_device_without_memory_says_so(unbroken: Report, place: Place) -> None:
    """Its system refuses memory to its engine, or kills the engine in mid-run; it is called back."""

    def engine() -> psutil.Process:
        [result] = psutil.Process(agent_of(home(place.folder, "alpha"))).children()
        return result

    place.real.run(measure_rank_host, [0.01] * 2)  # there are engines
    engine().rlimit(psutil.RLIMIT_DATA, (1 << 20, 1 << 20))
    with pytest.raises(
        MemoryBudgetError, match=r"Device 'alpha' asked for .*more.* Its system refused. End other programs there."
    ):
        place.real.run(measure_rank_host, [0.05] * 2)
    engine().kill()

    def has_new_engines() -> bool:
        """Whether a call is answered again; one that comes before the death is noticed is lost with it."""
        try:
            place.real.run(measure_rank_host, [0.01] * 2)
        except DeviceLostError:
            return False
        return True

    wait_for(has_new_engines, "engines without that limit")

    def progress(event: Event) -> None:
        if event.kind == "step" and event.step == 1 and not messages:
            messages.append("killed")
            engine().kill()

    messages: list[str] = []
    report = run_there(unbroken.job, unbroken, place, 1e-4, chosen_plan=HALVES, progress=progress)
    assert "as a system does that has no memory left" in " ".join(report.notes)


def test_a_device_comes_back_after_its_cable_and_its_sshd(unbroken: Report, place: Place) -> None:
    """Its cable is pulled, then its sshd killed; the other is killed for good, so the run ends only if the device comes
    back each time.

    Before that the cable is put back at once, which loses nothing.
    """
    if not isinstance(place.hosts, NetHosts):
        pytest.skip(WHY_NOT or "this system allows no network namespaces")
    hosts, steps = place.hosts, ["cable"]

    def progress(event: Event) -> None:
        if event.kind == "step" and steps == ["cable"] and event.step == 0:
            hosts.set_link(2, "down")
            hosts.set_link(2, "up")
        elif event.kind == "step" and event.step == 1 and steps == ["cable"]:
            steps.append("pulled")
            hosts.set_link(2, "down")
        elif event.kind == "device" and event.rank == 1 and event.message == "lost" and steps[-1] == "pulled":
            steps.append("put back")
            hosts.set_link(2, "up")
        elif event.kind == "device" and event.rank == 1 and event.message == "back" and steps[-1] == "put back":
            steps.append("killed")
            os.kill(psutil.Process(agent_of(hosts.home("beta"))).ppid(), signal.SIGKILL)

    job = replace(unbroken.job, faults="slow:alpha:20@step1; kill:alpha@step3")
    report = run_there(job, unbroken, place, 1e-4, chosen_plan=HALVES, progress=progress)
    assert steps[-1] == "killed"
    assert " ".join(report.notes).count("beta has come back") == 2


def test_a_stream_is_answered_without_a_killed_device(place: Place) -> None:
    cluster = real_cluster(NAMES)
    slow = with_devices(cluster, flops_per_s=SOAK_FLOPS_PER_S)
    host = analytic_profile(SOAK_MODEL, slow)
    faults, events, after = FaultSchedule(), list[ServingEvent](), list[float]()

    def is_over(now_s: float) -> bool:
        if now_s > 0 and not faults.faults:
            faults.add(Fault(kind="kill", rank=1, start=now_s))
        return len(after) >= 10

    report = serve(
        SOAK_MODEL,
        cluster,
        place.real,
        host,
        stream=StreamSettings(num_requests=20_000, length=SOAK_LENGTH),
        faults=faults,
        is_over=is_over,
        on_event=events.append,
        on_request=lambda request: (
            after.append(request.end_s) if any(event.kind == "lost" for event in events) else None
        ),
    )
    assert report.label == "real" and report.plans[0].ranks == (0, 1) and report.plans[-1].ranks == (0,)
    assert report.num_wrong == 0 and len(report.requests) >= 10
    assert all(0 <= request.start_s <= request.end_s for request in report.requests)
    assert max(max(sizes[:2]) for _, sizes in report.memory) > 50e6  # each device's engine has torch
    with pytest.raises(ConfigError, match="cannot be slowed down"):
        serve(
            SOAK_MODEL,
            cluster,
            place.real,
            host,
            stream=StreamSettings(),
            faults=[Fault(kind="slow", rank=0, start=1, factor=2)],
        )


@pytest.mark.parametrize("draft", ["", "on the first device", "on a device that the plan leaves out"])
def test_texts_go_on_without_a_killed_device(
    draft: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the tokens that one process writes, also those that were being written when the device was lost.

    A draft is another model, which is brought to the devices; it changes no token.
    """
    model, cluster, plan, guesser = "tiny-llama-2", real_cluster(NAMES), None, ""
    if draft:
        guesser = str(tmp_path / "guesser")
        load_model("tiny-gpt2-2").save_pretrained(guesser)
        save_tokenizer("tiny-gpt2-2", tmp_path / "guesser")
    if draft.endswith("leaves out"):
        plan = inference_plan("pipeline", method="local", layers=(2,))
        monkeypatch.setattr(DraftPrices, "best", lambda self, plan, others: self.round(plan, max((0, *others))))
    local, wanted = load_text_model(model).writer, [([5 + number] * (4 + number), 24) for number in range(6)]
    expected = [list(local.write(*one, Sampling(temperature=0.9, seed=3))) for one in wanted]
    lasting = ([7] * 9, 300)  # longer than a kill takes
    expected_last = list(local.write(*lasting, Sampling(temperature=0.9, seed=3)))
    messages = list[str]()
    monkeypatch.setattr(text_service, "over_ssh", lambda cluster: nullcontext(place.real))
    patient = partial(ReschedulingSettings, slow_factor=1000.0)  # a busy host makes no device a straggler
    monkeypatch.setattr(text_service, "ReschedulingSettings", patient)

    def written(one: tuple[list[int], int]) -> list[int]:
        return list(service.writer.write(*one, Sampling(temperature=0.9, seed=3)))

    with (
        text_service.text_service(
            model, cluster, "auto", ends=[], say=messages.append, system="megatron_lm", first_plan=plan, draft=guesser
        ) as service,
        ThreadPoolExecutor(len(wanted)) as threads,
    ):
        assert service.fidelity == "real" and list(threads.map(written, wanted)) == expected
        first = service.writer.write(*lasting, Sampling(temperature=0.9, seed=3))
        results = [next(first)]
        round_ = service.policy.draft_round
        assert (round_ and round_.rank) == (None if not draft else 0 if plan is None else 1)
        service.policy.actions.put((1, "kill"))
        others = [threads.submit(written, one) for one in wanted]
        assert results + list(first) == expected_last and [other.result() for other in others] == expected
        assert service.policy.num_again and service.policy.log.plans[-1].ranks == (0,)
        assert bool(service.policy.passes.right) == bool(draft)
    assert any("beta is lost" in line for line in messages)


def test_an_observer_sees_no_plain_tensor_unless_the_kit_says_plain(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links are measured with messages that are nothing but zeros; again if a busy host let the observer miss
    most of them."""
    if not isinstance(place.hosts, NetHosts):
        pytest.skip(WHY_NOT or "this system allows no network namespaces")
    hosts, measuring = place.hosts, partial(place.real.run, measure_rank_links, [((1, 1 << 17, 1 << 20), 1)] * 2)

    def plain_packets() -> int:
        """Return how many of 4 MB of packets have zeros."""
        total_bytes = num_plain = 0
        while total_bytes < 4 << 20:
            count, plain = observed(hosts, [bytes(1000)], measuring)
            assert count > 0
            total_bytes, num_plain = total_bytes + count, num_plain + plain
        return num_plain

    assert plain_packets() == 0
    monkeypatch.setattr(place.real, "_certificate", b"")  # as without TLS
    assert plain_packets() > 10


def test_an_observer_sees_no_token_of_a_run(job: Job, place: Place) -> None:
    """Nor a sentence; it would: at last they are sent over the bridge in packets of our own."""
    if not isinstance(place.hosts, NetHosts):
        pytest.skip(WHY_NOT or "this system allows no network namespaces")
    hosts, job = place.hosts, replace(job, method="fine_tuning", options={"technique": "adapters"}, epochs=1)
    text = load_task(job.task, data=job.data).train.texts[0]
    [ids] = load_tokenizer(job.model).encode([text], None, max_length=job.max_length)
    assert len(ids) >= 5
    needles = [array(kind, ids).tobytes() for kind in "qi"] + [str(list(ids))[1:-1].encode(), text.encode()]
    shutil.rmtree(place.real.folder, ignore_errors=True)
    run_it = partial(
        experiment.run, job, place.real.cluster, workdir=place.real.folder, engines=place.real, chosen_plan=HALVES
    )
    count, *found = observed(hosts, needles, run_it)
    assert count > 10_000 and not any(found)
    send = (
        "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(bytes.fromhex(sys.argv[1]), ('10.77.0.1', 9))"
    )
    _, *found = observed(
        hosts, needles, lambda: [hosts.inside(sys.executable, "-c", send, needle.hex()) for needle in needles]
    )
    assert all(found)


def test_devices_and_links_are_measured(place: Place) -> None:
    hosts = place.real.run(measure_rank_host, [0.05] * 2)
    assert all(host.gemm_flops_per_s > 1e8 and host.cores >= 1 for host in hosts)
    assert all(host.memory_bytes > 1e8 and host.swap_bytes >= 0 for host in hosts)
    for samples in place.real.run(measure_rank_sustained, [0.2] * 2):
        assert len(samples) == 120 and samples[0].busy_s == 0 and all(sample.flops_per_s > 1e6 for sample in samples)
        assert (
            sorted(sample.busy_s for sample in samples) == [sample.busy_s for sample in samples]
            and samples[-1].busy_s > 0.19
        )
    links = place.real.run(measure_rank_links, [((1, 1 << 16), 1)] * 2)
    assert [(samples[0].source, samples[0].destination) for link_samples in links for samples in link_samples] == [
        (0, 1),
        (1, 0),
    ]
    assert place.real.health(0) and place.real.notes
