"""The benchmark of a kit, on two servers of this machine over OpenSSH: each part runs once, with a tiny model and a
small file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ssh_hosts import WHY_NOT, bring_profiles, reachable

from workbench import experiment
from workbench.core.catalogue import load_cluster
from workbench_studies.bench import kit

NAMES = ("alpha", "beta")
SMALL = {"model": "tiny-bert", "train_samples": 160, "validation_samples": 8, "test_samples": 8}
JOB = replace(kit.JOB, **SMALL, options={"technique": "serial"})  # without peft, which each device would import


@pytest.fixture
def folder_of_a_kit(tmp_path: Path) -> Iterator[Path]:
    """Give a folder for a kit.toml.  Its devices answer, and have been measured: they are this machine."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with reachable(tmp_path, NAMES) as (homes, _):
        for epochs in (1, JOB.epochs):
            experiment.profile(replace(JOB, epochs=epochs), load_cluster("laptop-equal"), "execute")
        bring_profiles(homes, NAMES)
        yield tmp_path


def test_every_part(folder_of_a_kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_of_a_kit)
    monkeypatch.setattr(kit, "FILE_BYTES", 1_000_000)
    monkeypatch.setattr(kit, "JOB", JOB)
    report = {}
    # An engine imports torch for seconds: where one device is enough there is one.
    for names, parts in ((NAMES[:1], ("start", "epochs")), (NAMES, ("reach", "files", "faults"))):
        devices = "".join(f'[[device]]\nname = "{name}"\naddress = "{name}"\n' for name in names)
        Path("kit.toml").write_text(f'[defaults]\nmodel = "rpi-4b-m"\npython = "{sys.executable}"\n{devices}')
        report |= kit.bench(lambda line: None, only=parts, rounds=1)
    expected = {f"epoch_{name}_{data}" for name in ("s", "ratio") for data in ("plain", "tls")}
    expected |= {"check_s", "second_setup_s", "file_mb_per_s", "ssh_share_of_link", "first_step_s"}
    expected |= {"fault_to_next_step_s", "fault_to_next_step_s_emulated"}
    assert [name for name in sorted(expected) if not report[name] > 0] == []
