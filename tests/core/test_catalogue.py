import os
import re

import pytest

from workbench.core import catalogue
from workbench.core.catalogue import cluster_names, device_models, load_cluster, load_device
from workbench.core.errors import ConfigError
from workbench.core.heat import Level

ONE_DEVICE = '[[device]]\nname = "a"\nmodel = "rpi-5"\n'


LINK = '[[link]]\nfrom = "a"\nto = "b"\nbandwidth_mbit_per_s = 1\n'
LINKED = ONE_DEVICE + ONE_DEVICE.replace('"a"', '"b"') + LINK


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load_cluster(write(tmp_path, text))
    message = str(caught.value)
    assert "mine.toml" in message
    assert message.isprintable()
    return message


def test_every_cluster_and_model_loads():
    assert {"laptop", "laptop-equal", "pac-env-a", "pac-env-b", "galaxy-env-a", "galaxy-env-b"} <= set(cluster_names())
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.name == name
        assert cluster.description
        assert all(device.model in device_models() for device in cluster.devices)
    for model in device_models():
        assert load_device(model).model == model


def test_the_kit_of_this_folder_or_one_above_is_a_cluster_by_name(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert "kit" not in cluster_names()
    with pytest.raises(ConfigError, match=r"There is no kit\.toml .*workbench kit init"):
        load_cluster("kit")
    (tmp_path / "kit.toml").write_text(
        'name = "kit"\n[[device]]\nname = "pi0"\naddress = "pi@pi0"\nmodel = "rpi-4b-m"\n'
    )
    assert "kit" in cluster_names()
    assert load_cluster("kit").is_real and not load_cluster("laptop").is_real


def test_the_default_cluster_is_four_unequal_devices_that_two_cores_carry():
    cluster = load_cluster(catalogue.DEFAULT_CLUSTER)
    shares = [device.host_share for device in cluster.devices]
    assert shares == [0.5, 0.5, 0.27, 0.13]
    assert sum(shares) < 2
    assert cluster.link(0, 3).bytes_per_s == 125e6
    # Analytic speeds are in the ratio of the shares.
    assert [device.flops_per_s / device.host_share for device in cluster.devices] == pytest.approx([60e9] * 4)


def test_slower_links_are_slower_in_bandwidth_and_latency():
    cluster = load_cluster(catalogue.DEFAULT_CLUSTER)
    slower = cluster.with_slower_links(4.0)
    assert slower.link(0, 3).transfer_s(10**6) == pytest.approx(4 * cluster.link(0, 3).transfer_s(10**6))
    assert slower.link(1, 2).latency_s == pytest.approx(4 * cluster.link(1, 2).latency_s)
    assert [device.host_share for device in slower.devices] == [0.5, 0.5, 0.27, 0.13]


def test_the_papers_testbeds():
    env_b = load_cluster("pac-env-b")
    assert [device.model for device in env_b.devices] == [
        "jetson-nano-h",
        "jetson-nano-l",
        "jetson-tx2-h",
        "jetson-tx2-l",
    ]
    assert [device.watts_busy for device in env_b.devices] == [10, 5, 15, 7.5]
    assert env_b.link(0, 1).bytes_per_s == 125e6
    # PAC+ Table IV: cores x clock.
    speeds = [device.flops_per_s for device in env_b.devices]
    assert [speed / speeds[0] for speed in speeds] == pytest.approx(
        [1, 640 / 921, 2 * 1300 / 921, 2 * 850 / 921], rel=0.01
    )
    galaxy = load_cluster("galaxy-env-b")
    assert [device.memory_bytes for device in galaxy.devices] == [
        2_000_000_000,
        2_000_000_000,
        1_500_000_000,
        1_000_000_000,
    ]
    assert galaxy.link(0, 3).bytes_per_s == 62.5e6
    assert galaxy.devices[0].flops_per_s / galaxy.devices[3].flops_per_s == pytest.approx(1470 / 403, rel=0.01)


def test_any_field_may_be_overridden_and_units_are_converted(tmp_path):
    text = """
name = "mine"
[defaults]
model = "rpi-5"
latency_ms = 2
[[device]]
name = "a"
memory_mb = 350
gflops = 12.5
host_share = 0.25
microjoule_per_byte = 2
storage_mb_per_s = 10
battery = 0.4
battery_wh = 18.5
leave_below = 0.15
leave_if_throttled = true
sustained = [[0, 1], [180, 0.8]]
address = "pi@a"
[[device.processor]]
name = "cpu"
gflops = 10
[[device]]
name = "b"
bandwidth_mbit_per_s = 80
framework = "jax"
[[link]]
from = "a"
to = "b"
bandwidth_mbit_per_s = 8
latency_ms = 30
"""
    cluster = load_cluster(write(tmp_path, text))
    first, second = cluster.devices
    assert (first.memory_bytes, first.flops_per_s, first.host_share, first.address) == (
        350_000_000,
        12.5e9,
        0.25,
        "pi@a",
    )
    assert first.storage_bytes_per_s == 10e6
    assert (first.battery, second.battery) == (0.4, 1.0)
    assert (first.battery_wh, first.leave_below, first.leave_if_throttled) == (18.5, 0.15, True)
    assert (second.battery_wh, second.leave_below, second.leave_if_throttled) == (0.0, 0.0, False)
    assert first.sustained == (Level(heat_s=0.0, speed=1.0), Level(heat_s=180.0, speed=0.8))
    assert (first.joules_per_byte, second.joules_per_byte) == (2e-6, 0)
    assert first.processors[0].flops_per_s == 10e9
    assert first.watts_busy == load_device("rpi-5").watts_busy
    assert second.link.bytes_per_s == 10e6
    assert (first.framework, second.framework) == ("torch", "jax")
    assert cluster.link(0, 1).bytes_per_s == 1e6
    assert cluster.link(0, 1).latency_s == 0.03
    assert cluster.link(1, 0).bytes_per_s == 10e6
    assert cluster.link(1, 0).latency_s == pytest.approx(0.004)


def test_a_link_may_hold_both_ways(tmp_path):
    text = (
        ONE_DEVICE
        + ONE_DEVICE.replace('"a"', '"b"')
        + '[[link]]\nfrom = "a"\nto = "b"\nbandwidth_mbit_per_s = 8\nboth_ways = true\n'
    )
    cluster = load_cluster(str(write(tmp_path, text)))
    assert cluster.link(0, 1) == cluster.link(1, 0)


def test_an_unknown_cluster_names_the_known_ones_and_the_nearest():
    with pytest.raises(ConfigError, match=r"galaxy-env-a, .*laptop.*Did you mean 'laptop'"):
        load_cluster("lapptop")


def test_an_unknown_device_model_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'jetson-nano-h'"):
        load_device("jetson-nano-hh")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name = "a"\n[[device]\n', "line 2"),
        ('name = "a"\n', "no devices"),
        (ONE_DEVICE + "\nbandwidth_mbit_per_s = -3\n", "line 5: Device 'a' asks for bandwidth_mbit_per_s = -3"),
        (ONE_DEVICE + "memory_mb = 0\n", "memory_mb = 0"),
        (ONE_DEVICE + "memory_mb = nan\n", "memory_mb = nan"),
        (ONE_DEVICE + "latency_ms = inf\n", "latency_ms = inf"),
        (ONE_DEVICE + 'memory_mb = "3"\n', "asks for memory_mb = '3'.*must be a number"),
        (ONE_DEVICE + "memory_mb = true\n", "must be a number"),
        (ONE_DEVICE + "memory = 3\n", "line 4: The key 'memory' in Device 'a'.*Did you mean 'memory_mb'"),
        ('medium = "wlan"\n' + ONE_DEVICE, "A cluster asks for medium = wlan.*switch, wifi"),
        ('medium = "wifi"\njitter_ms = -1\n' + ONE_DEVICE, "line 2: The cluster asks for jitter_ms = -1"),
        ("jitter_ms = 2\n" + ONE_DEVICE, "asks for jitter_ms = 2.*medium is a switch"),
        ('medium = "wifi"\nframe_loss = 0.95\n' + ONE_DEVICE, "line 2: The cluster asks for frame_loss = 0.95"),
        ("frame_loss = 0.1\n" + ONE_DEVICE, "asks for frame_loss = 0.1.*medium is a switch"),
        (ONE_DEVICE + "memory_gb = 3\n", "Did you mean 'memory_mb' or 'memory_gb_per_s'"),
        (ONE_DEVICE + "[defautls]\n", "line 4: The key 'defautls'.*Did you mean 'defaults'"),
        (ONE_DEVICE + ONE_DEVICE, "names a device 'a'"),
        ('[[device]]\nname = "a"\n', "no gflops"),
        ('[[device]]\nmodel = "rpi-5"\n', "Device 1 was described.*name"),
        ('[[device]]\nname = "a"\nmodel = "rpi5"\n', "Did you mean 'rpi-5'"),
        ('[device]\nname = "a"\n', "not a list of tables"),
        (ONE_DEVICE + '[[link]]\nfrom = "a"\nto = "z"\nbandwidth_mbit_per_s = 1\n', "a>z"),
        (ONE_DEVICE + '[[link]]\nfrom = "a"\nto = "a"\n', "no bandwidth_mbit_per_s"),
        (ONE_DEVICE + '[[link]]\nfrom = "a"\nto = "a"\nbandwidth_mbit_per_s = 1\n', "'a>a'.*from a device to itself"),
        (LINKED.replace('"b"', '"b>c"'), "the link 'a>b>c'.*Rename devices with '>' in their names"),
        (LINKED + "both_ways = 'no'\n", "line 11: Link 1 asks for both_ways = 'no'.*true or false"),
        (LINKED + LINK, "Link 2 describes 'a>b'.*earlier link"),
        (
            LINKED + "both_ways = true\n" + LINK.replace('"a"', '"c"').replace('"b"', '"a"').replace('"c"', '"b"'),
            "Link 2 describes 'b>a'",
        ),
        (
            LINKED + "latency_ms = 1e300\n",
            "line 11: Link 1 asks for latency_ms = 1e.300.*at most 3.6e.06.*Lower latency_ms",
        ),
        (
            ONE_DEVICE + "memory_mb = 1e300\n",
            r"line 4: Device 'a' asks for memory_mb = 1e\+300.*at most 1e\+12.*Lower memory_mb",
        ),
        (
            ONE_DEVICE + "memory_mb = 1" + 400 * "0" + "\n",
            "line 4: Device 'a' asks for memory_mb = a number of 401 digits",
        ),
        (
            ONE_DEVICE + "gflops = 1" + 400 * "0" + "\n",
            "line 4: Device 'a' asks for gflops = a number of 401 digits.*at most 1e.09",
        ),
        (ONE_DEVICE + "memory_mb = 5\n" + ONE_DEVICE + "memory_mb = 0\n", "line 8: Device 'a' asks for memory_mb = 0"),
        (ONE_DEVICE + "gflops = 1e-300\n", "gflops = 1e-300.*at least 1e-12.*Raise gflops"),
        (ONE_DEVICE + "gflops = 1e400\n", "gflops = inf"),
        (ONE_DEVICE + "storage_mb_per_s = -inf\n", "storage_mb_per_s = -inf.*Raise"),
        (ONE_DEVICE + "host_share = 100\n", "host_share = 100.*above 0 and at most 1.*Lower host_share"),
        (ONE_DEVICE + 'framework = "mnn"\n', "framework = mnn.*Known are torch, jax"),
        (ONE_DEVICE + "watts_idle = -1\n", "watts_idle = -1.*at least 0"),
        (ONE_DEVICE + "watts_busy = nan\n", "watts_busy = nan.*Give watts_busy a number"),
        ("name = 3\n" + ONE_DEVICE, "The cluster was described. Its name is 3"),
        ('name = "\\u001b[31m"\n' + ONE_DEVICE, r"Its name is '\\x1b\[31m', not text without control"),
        (ONE_DEVICE.replace('"a"', '"a\\tb"'), "Its name is .*not text without control"),
        (ONE_DEVICE.replace('"a"', '"' + 200 * "a" + '"'), "name = a{80}... .200 characters.*at most 100 characters"),
        (ONE_DEVICE + 'address = "\\u001b]0;"\n', "Its address is"),
        (ONE_DEVICE + "sustained = 3\n", "line 4: Device 'a' asks for sustained = 3.*list of pairs"),
        (ONE_DEVICE + "sustained = [[0, 1], [60]]\n", "line 4: .*list of pairs"),
        (ONE_DEVICE + "sustained = [[0, 1], [60, 0]]\n", "line 4: Device 'a': .*speed = 0.*above 0 and at most 1"),
        (ONE_DEVICE + "sustained = [[0, 1], [-1, 0.5]]\n", "line 4: Device 'a': .*heat_s = -1"),
        (ONE_DEVICE + "sustained = [[0, 0.9]]\n", r"Device 'a' has sustained = \[\[0, 0.9\]\].*Begin with \[0, 1.0\]"),
        (ONE_DEVICE + "sustained = [[0, 1], [60, 0.5], [60, 0.4]]\n", "60 s do not follow 60 s.*Sort"),
        (ONE_DEVICE + "sustained = [[0, 1], [60, 0.5], [90, 0.6]]\n", "rises from 0.5 to 0.6"),
        (ONE_DEVICE + f"sustained = {[[n, 1] for n in range(21)]}\n", "There are 21 levels.*at most 20"),
        (ONE_DEVICE + "a = " + 100_000 * "[", "nested too deep"),
    ],
)
def test_a_file_that_cannot_be_meant_is_answered_in_one_line(tmp_path, text, expected):
    assert re.search(expected, refusal(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml.*no such file"):
        load_cluster(tmp_path / "absent.toml")


def test_data_is_found_beside_the_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "workbench"
    (package / "_data").mkdir(parents=True)
    (package / "_data" / "devices.toml").write_text("")
    monkeypatch.setattr(catalogue, "__file__", str(package / "core" / "catalogue.py"))
    assert catalogue.data_folder() == package / "_data"


@pytest.mark.parametrize("name", ["/dev/zero", "pipe.toml", "folder.toml", "n" * 300 + ".toml", "loop.toml", "n" * 300])
def test_what_is_no_cluster_file_is_answered_at_once(tmp_path, name):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    with pytest.raises(
        ConfigError, match=r"Asked to read the cluster|The cluster 'n+\.\.\. \(300 characters\)' was asked for"
    ):
        load_cluster(tmp_path / name if name.endswith(".toml") else name)


@pytest.mark.parametrize(
    ("processors", "found"),
    [
        (("name = 'gpu'\ngflops = 4\nwatts = 3",), "The key 'watts' in [[device.processor]] of device 'a' was read."),
        (
            ("name = 'gpu'\ngflops = 4", "name = 'gpu'\ngflops = 5"),
            "names a processor 'gpu'. There are 2 of that name.",
        ),
    ],
)
def test_processors_that_are_no_processors(processors, found, tmp_path):
    tables = "".join(f"[[device.processor]]\n{processor}\n" for processor in processors)
    (tmp_path / "mine.toml").write_text(f"[[device]]\nname = 'a'\ngflops = 5\nmemory_mb = 100\n{tables}")
    with pytest.raises(ConfigError) as caught:
        load_cluster(tmp_path / "mine.toml")
    assert found in str(caught.value)


@pytest.mark.parametrize("given", [None, 5, b"pair"])
def test_a_cluster_is_a_name_or_a_path(given):
    with pytest.raises(ConfigError, match="neither text nor a path"):
        load_cluster(given)
