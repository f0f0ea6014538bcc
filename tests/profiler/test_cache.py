import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.clock import Clock
from tests.waiting import LIMIT_S
from workbench.core.catalogue import load_cluster
from workbench.core.profile import Profile
from workbench.methods.common import scaling
from workbench.profiler import cache
from workbench.profiler.analytic import analytic_profile
from workbench.profiler.timing import CoreShare, time_calls


@pytest.fixture
def profile():
    return analytic_profile("all-MiniLM-L6-v2", load_cluster("laptop"), batch_sizes=(1, 4))


class Measure:
    def __init__(self, profile):
        self.profile, self.calls = profile, 0

    def __call__(self):
        self.calls += 1
        return self.profile


def test_a_profile_is_measured_once(tmp_path, profile):
    measure = Measure(profile)
    first, note = cache.cached({"model": "m"}, measure, Profile, folder=tmp_path, now=lambda: 1e9)
    assert "measured now (none was stored)" in note
    second, note = cache.cached({"model": "m"}, measure, Profile, folder=tmp_path, now=lambda: 1e9 + 3 * 86400)
    assert "3 days ago" in note
    assert first == second == profile
    assert measure.calls == 1


def test_of_two_runs_at_once_the_second_waits_for_the_measurement_of_the_first(tmp_path, profile):
    """Whatever the second one asks for: two measurements at once would disturb each other."""
    has_begun, waits = threading.Event(), threading.Event()
    first, second = Measure(profile), Measure(profile)

    def slow():
        has_begun.set()
        assert waits.wait(LIMIT_S)
        return first()

    with ThreadPoolExecutor() as pool:
        running = pool.submit(cache.cached, {"model": "m"}, slow, Profile, folder=tmp_path, wait=int)
        assert has_begun.wait(LIMIT_S)
        stored = cache.cached({"model": "m"}, second, Profile, folder=tmp_path, wait=waits.set)
    assert running.result()[0] == stored[0] == profile
    assert (first.calls, second.calls) == (1, 0) and "ago on this machine" in stored[1]
    assert len([*tmp_path.iterdir()]) == 1  # and no lock


@pytest.mark.parametrize(
    ("shares", "num_measured", "is_stored"), [([0.9], 1, True), ([0.5, 0.9], 2, True), ([0.5, 0.4], 2, False)]
)
def test_a_measurement_without_a_core_is_repeated_and_at_last_not_stored(
    tmp_path, profile, monkeypatch, shares, num_measured, is_stored
):
    """The clocks are made up: the process has a core for a share of each measurement."""
    monkeypatch.delenv("WORKBENCH_TINY", raising=False)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    measure, events, of_each, clock = Measure(profile), [], iter(shares), Clock()

    def core_share_of_a_measurement():
        share = next(of_each, 1.0)
        return CoreShare(wall=clock, core=lambda: share * clock.now_s)

    def timed():
        time_calls({"a": clock.call("a", 1.0)}, repeats=1, clock=clock)
        return measure()

    monkeypatch.setattr(scaling, "CoreShare", core_share_of_a_measurement)

    def measured():
        return scaling.cached_measurement({"model": "m"}, Profile, timed, "m", events.append, refresh=False)

    assert measured() == profile and measure.calls == num_measured
    note = events[-1].message
    assert ("not stored: it had a core for 40% of its time only" in note) is not is_stored
    assert any("again: it had a core for 50% of the time only" in event.message for event in events) is (
        num_measured == 2
    )
    assert measured() == profile and measure.calls == num_measured + (not is_stored)


def test_another_key_or_machine_is_measured_anew(tmp_path, profile, monkeypatch):
    measure = Measure(profile)
    cache.cached({"model": "m"}, measure, Profile, folder=tmp_path)
    cache.cached({"model": "n"}, measure, Profile, folder=tmp_path)
    assert measure.calls == 2
    monkeypatch.setattr(cache, "host_fingerprint", lambda: {"processor": "another"})
    cache.cached({"model": "m"}, measure, Profile, folder=tmp_path)
    assert measure.calls == 3


def test_what_is_forgotten_is_measured_again(tmp_path, profile):
    measure = Measure(profile)
    cache.cached({"model": "m"}, measure, Profile, folder=tmp_path)
    cache.forget({"model": "m"}, folder=tmp_path)
    cache.forget({"model": "never kept"}, folder=tmp_path)
    cache.cached({"model": "m"}, measure, Profile, folder=tmp_path)
    assert measure.calls == 2


def test_refresh_measures_again(tmp_path, profile):
    measure = Measure(profile)
    cache.cached({}, measure, Profile, folder=tmp_path)
    _, note = cache.cached({}, measure, Profile, folder=tmp_path, refresh=True)
    assert measure.calls == 2
    assert "asked for" in note


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', '{"format": 99}', None])
def test_an_unreadable_file_is_measured_anew(tmp_path, profile, damage):
    measure = Measure(profile)
    cache.cached({}, measure, Profile, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    if damage is None:
        kept = json.loads(path.read_text())
        kept["profile"]["layers"] = []
        damage = json.dumps(kept)
    path.write_text(damage)
    again, note = cache.cached({}, measure, Profile, folder=tmp_path)
    assert again == profile
    assert "unreadable" in note
    assert "\n" not in note
    assert cache.cached({}, measure, Profile, folder=tmp_path)[1].startswith("Profile measured 0 s ago")


def test_a_folder_that_cannot_be_written_to_costs_only_the_note(tmp_path, profile):
    blocked = tmp_path / "file"
    blocked.write_text("")
    result, note = cache.cached({}, Measure(profile), Profile, folder=blocked)
    assert result == profile
    assert "could not be stored" in note


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    assert cache.cache_folder() == tmp_path
    monkeypatch.delenv("WORKBENCH_CACHE")
    assert cache.cache_folder().name == "edge-llm-workbench"


def test_the_fingerprint_names_processor_and_versions():
    result = cache.host_fingerprint()
    assert result["processor"]
    assert result["torch"] != "none"
    assert int(result["cores"]) >= 1
