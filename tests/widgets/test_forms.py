from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.clusters import cluster_of
from workbench.cli import app
from workbench.core.catalogue import cluster_names, load_cluster
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.core.heat import Level
from workbench.core.job import Job
from workbench.core.methods import declaration_of, registered
from workbench.methods.option_values import read_options
from workbench.plots.cluster_map import share_of
from workbench.runs.as_text import as_command, as_python
from workbench.runtime import discovery
from workbench.widgets import ClusterForm, JobForm
from workbench.widgets.cluster_form import RATES
from workbench.widgets.copying import CopyButtons
from workbench.widgets.job_form import form_of

JOB = Job(
    model="tiny-gpt2",
    task="mrpc",
    learning_rate=1e-3,
    train_samples=None,
    test_samples=7,
    options={"reduction": 4, "dropout": 0.0},
)


def test_job_form_gives_back_the_very_job_it_was_made_of() -> None:
    assert JobForm(JOB).job == JOB
    assert JobForm().job == Job()


def test_job_form_changes_only_what_was_changed() -> None:
    form = JobForm(JOB)
    seen: list[Job] = []
    form.on_change(seen.append)
    form.controls["epochs"].value = 5
    form.controls["train_samples"].value = 100
    form.controls["reduction"].value = 16
    assert form.job.epochs == 5
    assert form.job.train_samples == 100
    assert form.job.options == {"reduction": 16, "dropout": 0.0}
    assert (form.job.learning_rate, form.job.test_samples) == (1e-3, 7)
    assert seen[-1] == form.job


def test_a_method_gets_only_the_options_that_it_knows() -> None:
    form = JobForm(JOB)
    form.controls["backbone_dtype"].value = "nf4"
    assert form.job.options == {"reduction": 4, "dropout": 0.0, "backbone_dtype": "nf4"}
    form.controls["method"].value = "fine_tuning"
    form.controls["technique"].value = "adapters"
    assert form.job.options == {"technique": "adapters", "backbone_dtype": "nf4"}
    assert "cache_dtype" not in form.controls and form.controls["lora_rank"].disabled
    form.controls["method"].value = "galaxy_plus"
    form.controls["max_length"].value = 48
    assert form.job == replace(JOB, method="galaxy_plus", max_length=48, micro_batches=4, options={})
    form.controls["method"].value = "pac_plus"
    assert form.job == replace(JOB, options={"reduction": 4, "dropout": 0.0, "backbone_dtype": "nf4"})


def test_the_papers_settings_are_one_choice_and_are_named() -> None:
    form = JobForm(Job(options={"cache_dtype": "int8"}))
    assert form.message.value == ""
    form.controls["as_published"].value = True
    assert form.job == Job(options={"cache_dtype": "int8"}, as_published=True)
    assert "batch_size = 16" in form.message.value and "order = given" in form.message.value
    assert "cache_dtype" not in form.message.value, "it was chosen, so it stays"
    form.controls["as_published"].value = False
    assert form.message.value == "" and not form.job.as_published
    assert "as_published" not in form_of("fine_tuning"), "no paper is about it"


@pytest.mark.parametrize("method", registered())
def test_every_option_of_a_form_is_one_of_its_method(method: str) -> None:
    declared = declaration_of(method)
    for name, entry in form_of(method).items():
        if name in declared.defaults:
            values = list(entry.values.values())
            assert not values or declared.defaults[name] in (values[0], None)
            for value in set(values or [1]) - {"planned"}:
                assert getattr(read_options(method, declared.options, {name: value}), name) == value
    assert JobForm(Job(method=method, micro_batches=1)).job == Job(method=method, micro_batches=1)


QUERIES = Job(
    method="p_rge", model="tiny-llama", batch_size=2, micro_batches=1, options={"queries": 4, "steps": 3, "rank": 2}
)
REQUESTS = Job(method="galaxy_plus", model="tiny-bert", test_samples=5, max_length=32, options={"compare": 2})


@pytest.mark.parametrize(
    ("job", "changes", "options", "wrong"),
    [
        (QUERIES, {"execution": "inner", "queries": 8, "after_loss": "repeat"}, {"steps": 3, "rank": 2}, "queries"),
        (REQUESTS, {"system": "edgeshard"}, {"compare": 2}, "max_length"),
        (REQUESTS, {"scheme": 2, "overlap": False}, {"compare": 2}, "max_length"),
    ],
)
def test_a_method_may_have_a_form_of_its_own(
    job: Job, changes: dict[str, object], options: dict[str, object], wrong: str
) -> None:
    form = JobForm(job)
    assert form.job == job
    for name, value in changes.items():
        form.controls[name].value = value
    assert form.job == replace(job, options=options | changes)
    assert all(form.controls[name].disabled for name in ("scheme", "overlap") if changes.get("system") == "edgeshard")
    form.controls[wrong].value = 16
    assert 16 in (form.job.max_length, form.job.options.get("queries"))
    form.controls[wrong].value = 0
    assert f"{wrong} = 0" in form.controls[wrong].alert.value
    with pytest.raises(ConfigError):
        _ = form.job


@pytest.mark.parametrize(
    ("control", "typed", "said"),
    [
        ("epochs", "0", "at least 1"),
        ("epochs", "abc", "a whole number"),
        ("batch_size", "1e9", "at most 65,536"),
        ("train_samples", "-3", "at least 1"),
        ("train_samples", "1e99", "at most 1,000,000,000"),
        ("seed", "-1", "at least 0"),
        ("reduction", "0", "at least 1"),
        ("reduction", "999", "is 384 wide"),
        ("model", "tiny-bertt", "Did you mean &#39;tiny-bert&#39;?"),
        ("model", " ", "without a model"),
    ],
)
def test_a_field_says_what_is_wrong_and_keeps_what_was_typed(control: str, typed: str, said: str) -> None:
    form = JobForm()
    field, seen = form.controls[control], list[Job]()
    good = field.control.value
    form.on_change(seen.append)
    field.control.value = typed
    assert said in field.alert.value and "role='alert'" in field.alert.value
    assert field.control.value == typed and not form.is_valid and not seen and form.message.value == ""
    with pytest.raises(ConfigError):
        _ = form.job
    field.control.value = good
    assert field.alert.value == "" and form.is_valid and form.job == Job() == seen[-1]


def test_fields_that_contradict_each_other_are_named_below_them() -> None:
    form = JobForm()
    form.controls["batch_size"].value = 30
    assert "not a multiple of 4" in form.message.value and not form.is_valid
    form.controls["micro_batches"].value = 3
    assert form.message.value == "" and form.is_valid


@pytest.mark.parametrize(
    ("name", "typed", "said"),
    [
        ("bandwidth", "0", "at least 0.01"),
        ("bandwidth", "-5", "at least 0.01"),
        ("bandwidth", "abc", "a number"),
        ("bandwidth", "1e9", "at most 1e+06"),
        ("speed", "1.5", "at most 1"),
        ("memory", "0.5", "a whole number"),
        ("latency", "nan", "a number"),
        ("sustained", "[[0, 1], 5]", "a list of pairs"),
    ],
)
def test_a_device_cannot_have_every_value(name: str, typed: str, said: str) -> None:
    form = ClusterForm("laptop")
    field, seen = getattr(form.rows["beta"], name), list[Cluster]()
    good, drawn = field.control.value, form.map.cards
    form.on_change(seen.append)
    field.control.value = typed
    assert said in field.alert.value and "beta asks for" in field.alert.value
    assert field.control.value == typed and not form.is_valid and not seen and form.map.cards == drawn
    with pytest.raises(ConfigError):
        _ = form.cluster
    field.control.value = good
    assert field.alert.value == "" and form.is_valid and form.cluster == load_cluster("laptop") == seen[-1]


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        JOB,
        QUERIES,
        REQUESTS,
        Job(method="ringada", options={"unfreezing": "rounds", "cache": True, "threshold": 0.5}, micro_batches=1),
        Job(method="p_rge", micro_batches=1, options={"words": "true", "compute_dtype": "bfloat16"}),
        Job(
            data="my data/it's.csv",
            columns="text=a review,label=stars",
            faults="kill:1@step4; return:1@step12",
            as_published=True,
        ),
    ],
)
def test_a_job_is_copied_as_a_command_and_as_python(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[tuple[object, ...]] = []
    monkeypatch.setattr(app, "run_and_show", lambda *arguments, **_: messages.append(arguments[:3]))
    cluster = load_cluster("pac-env-b")
    words = shlex.split(as_command(job, cluster))
    assert words[:2] == ["workbench", "run"]
    result = CliRunner().invoke(app.app, words[1:], catch_exceptions=False)
    assert result.exit_code == 0 and messages == [(job, cluster, "execute")]
    ran: list[tuple[object, ...]] = []
    monkeypatch.setattr("workbench.experiment.run", lambda *given: ran.append(given))
    curve = (Level(heat_s=0.0, speed=1.0), Level(heat_s=180.0, speed=0.8))
    hot = cluster.with_each(lambda device: replace(device, sustained=curve))
    for one in (cluster, replace(cluster, name="mine"), replace(hot, name="hot")):
        exec(as_python(job, one), {})
        assert ran.pop() == (job, one, "execute")


def test_what_the_command_line_has_no_option_for_is_a_comment() -> None:
    command = as_command(Job(weight_decay=0.02), load_cluster("laptop"))
    assert command.splitlines()[0] == "workbench run --cluster laptop"
    assert "no option for weight_decay = 0.02" in command.splitlines()[1]
    assert "weight_decay=0.02" in as_python(Job(weight_decay=0.02), load_cluster("laptop"))


def test_only_what_differs_is_copied_and_only_what_is_valid() -> None:
    job_form, cluster_form = JobForm(), ClusterForm("laptop")
    copies = CopyButtons.of(job_form, cluster_form)
    assert copies.command.text == "workbench run --cluster laptop"
    job_form.controls["epochs"].value = 2
    assert copies.command.text == "workbench run --epochs 2 --cluster laptop" and "Job(epochs=2)" in copies.python.text
    cluster_form.rows["beta"].memory.value = 500
    assert copies.command.text.startswith("# ") and "memory_bytes=500000000" in copies.python.text
    job_form.controls["epochs"].value = 0
    assert copies.command.text == copies.python.text == ""


def test_every_control_is_described() -> None:
    assert all(control.description and control.tooltip for control in JobForm().controls.values())


@pytest.mark.parametrize("name", cluster_names())
def test_an_untouched_cluster_form_is_the_cluster(name: str) -> None:
    assert ClusterForm(name).cluster == load_cluster(name)


def test_the_medium_is_chosen() -> None:
    form = ClusterForm("laptop")
    grey = form.still
    form.medium.control.value = "wifi"
    assert form.cluster == replace(
        load_cluster("laptop"), name="laptop-edited", medium="wifi", description="laptop, changed in the form"
    )
    assert "share the air" in form.caption.value and form.still != grey
    form.reset.click()
    assert form.cluster == load_cluster("laptop") and "same switch" in form.caption.value
    shared = replace(load_cluster("laptop"), medium="wifi", jitter_s=0.001, frame_loss=0.1)
    form = ClusterForm(shared)
    form.medium.control.value = "switch"
    assert (form.cluster.medium, form.cluster.jitter_s, form.cluster.frame_loss) == ("switch", 0.0, 0.0)


def test_fields_change_one_device_and_reset_puts_it_back() -> None:
    form = ClusterForm("laptop")
    seen: list[Cluster] = []
    form.on_change(seen.append)
    fields = form.rows["gamma"]
    fields.speed.value = 0.135
    fields.memory.value = 123
    fields.bandwidth.value = 20
    fields.latency.value = 1.5
    before, after = load_cluster("laptop"), form.cluster
    gamma = after.devices[2]
    assert gamma.host_share == 0.135
    assert gamma.flops_per_s == pytest.approx(before.devices[2].flops_per_s / 2)
    assert gamma.memory_bytes == 123_000_000
    assert gamma.link == Link(bytes_per_s=2.5e6, latency_s=1.5e-3)
    assert [*after.devices[:2], after.devices[3]] == [*before.devices[:2], before.devices[3]]
    assert after.name == "laptop-edited" == seen[-1].name
    assert "laptop-edited" in form.caption.value
    text = "gamma: share of one core of this machine 0.135 of a core, memory for the job, in MB 123 MB"
    assert text in form.map.cards[2]["drawing"] and "20 Mbit/s" in form.still
    assert "<script" not in form.still and "Drag" in form.caption.value and "Drag" not in form.still
    form.reset.click()
    assert form.cluster == before


@pytest.mark.parametrize("name", ["laptop", "pac-env-b", "galaxy-env-b", "phones"])
@pytest.mark.parametrize("what", ["speed", "memory", "bandwidth", "latency"])
def test_a_knob_is_moved_to_each_of_its_stops(name: str, what: str) -> None:
    form = ClusterForm(name)
    at = [dial["what"] for dial in form.map.dials[1]].index(what)
    stops = form.map.dials[1][at]["stops"]
    assert form.map.cards[1]["values"][at] in stops and [stops[0][0], stops[-1][0]] == [0, 1]
    assert [share for share, _ in stops] == sorted({share for share, _ in stops})
    field = getattr(form.rows[form.cluster.devices[1].name], what)
    for stop, (share, text) in list(enumerate(stops))[:: len(stops) // 5]:
        form.map._handle_custom_msg({"device": 1, "what": what, "stop": stop}, [])  # as the page sends it
        assert field.error is None and text.startswith(f"{field.value:.6g} ")
        assert form.map.cards[1]["values"][at] == [share, text] and text.split()[0] in form.map.cards[1]["drawing"]


def test_a_rate_may_be_typed_that_the_scale_does_not_have() -> None:
    form = ClusterForm("laptop")
    form.rows["beta"].bandwidth.control.value = "30"
    assert form.cluster.devices[1].link.bytes_per_s == 3.75e6
    [(share, _)] = [value for value in form.map.cards[1]["values"] if value[1] == "30 Mbit/s"]
    assert share_of(20, RATES) < share < share_of(50, RATES)


def test_a_device_gets_hot_as_it_is_typed() -> None:
    form = ClusterForm("laptop")
    field = form.rows["beta"].sustained
    assert field.control.value == "" and "hot" not in form.map.cards[1]["drawing"]
    field.control.value = "[[0, 1], [60, 0.5]]"
    assert form.cluster.devices[1].sustained == (Level(heat_s=0.0, speed=1.0), Level(heat_s=60.0, speed=0.5))
    assert "hot: 50%" in form.map.cards[1]["drawing"]
    for typed in ("[[0, 1], [60, 2]]", "hot"):
        field.control.value = typed
        assert "beta" in field.alert.value and not form.is_valid
    field.control.value = ""
    assert form.cluster == load_cluster("laptop")


def test_choosing_another_cluster_shows_its_devices() -> None:
    form = ClusterForm("laptop")
    form.choice.value = "pac-env-b"
    assert form.cluster == load_cluster("pac-env-b")
    shown = [card["values"][0][1] for card in form.map.cards]
    assert shown == [f"{device.host_share:g} of a core" for device in form.cluster.devices]
    assert "alpha" not in form.rows


def test_a_cluster_of_ones_own_can_be_left_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[[device]]\nname = "a"\ngflops = 3\nmemory_mb = 50\n')
    form = ClusterForm(path)
    mine = form.cluster
    assert mine == load_cluster(path) and form.rows["a"].speed.value == 3.0
    form.choice.value = "laptop"
    form.choice.value = "mine"
    assert form.cluster == mine and not form.message.value
    path.write_text(path.read_text() + 'address = "pi@10.0.0.4"\n')
    assert "moving a value changes what is predicted" in ClusterForm(path).message.value  # not the real devices


def test_a_file_may_have_the_name_of_a_known_cluster(tmp_path: Path) -> None:
    path = tmp_path / "laptop.toml"
    path.write_text('name = "laptop"\n[[device]]\nname = "only"\ngflops = 3\nmemory_mb = 50\nhost_share = 0.5\n')
    assert [device.name for device in ClusterForm(path).cluster.devices] == ["only"]


def test_many_devices_get_no_map() -> None:
    many = cluster_of(40, memory_bytes=10**8, bytes_per_s=1e6)
    form = ClusterForm(many)
    assert form.cluster == many and not form.devices.children and not form.map.cards
    assert "40 devices" in form.message.value


def test_unknown_cluster_is_told() -> None:
    with pytest.raises(ConfigError, match="labtop"):
        ClusterForm("labtop")


def test_the_cluster_form_lists_devices_of_the_network_as_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [discovery.Candidate("<b>pi\x1b[31m0", "10.0.0.4", 22, {"cores": "4"})]
    monkeypatch.setattr(discovery, "discover", lambda: tuple(results))
    form = ClusterForm("laptop")
    form.discover.click()
    assert "10.0.0.4 (4 cores)" in form.message.value and "kit init USER@10.0.0.4" in form.message.value
    assert "<b>pi" not in form.message.value and "\x1b" not in form.message.value
    results.clear()
    form.discover.click()
    assert "--announce" in form.message.value

    def offline() -> None:
        raise RuntimeSetupError("Devices were looked for.", "This machine has no network.", "Connect it.")

    monkeypatch.setattr(discovery, "discover", offline)
    form.discover.click()
    assert "no network" in form.message.value
