"""`workbench doctor`: each probe's finding, and what is said of all."""

from __future__ import annotations

import pytest
from in_process import answer, call

from workbench.cli import doctor
from workbench.runtime import ssh_agent


def test_the_doctor_ends_with_a_verdict_and_the_next_step() -> None:
    fine, less, absent = (doctor.Check("a", state, "found") for state in ("ok", "degraded", "missing"))
    assert doctor.verdict([fine]).startswith("Everything works.\nNext")
    assert doctor.verdict([fine, less, less]).startswith("The workbench runs here, but 2 things are limited.")
    assert doctor.verdict([less, absent]).startswith("1 thing is missing.") and "workbench doctor" in doctor.verdict(
        [absent]
    )


def test_doctor_reports_every_probe(monkeypatch) -> None:
    def fails():
        raise OSError("no such thing")

    ok = doctor.Check("python", "ok", "fine")
    monkeypatch.setattr(doctor, "PROBES", (lambda: [ok], fails))
    checks = answer("doctor")
    assert checks[0] == {"name": "python", "state": "ok", "found": "fine", "todo": ""}
    assert checks[1]["state"] == "degraded"
    assert "no such thing" in checks[1]["found"]


@pytest.mark.parametrize(
    ("features", "torch", "state", "said"),
    [
        ("fp asimd evtstrm crc32 cpuid", "2.9.1", "ok", "ARMv8.0, no atomics"),
        ("fp asimd evtstrm crc32 cpuid", "2.10.0+cpu", "missing", "torch 2.10.0+cpu crashes on this processor"),
        ("fp asimd evtstrm crc32 cpuid", "2.6.0", "missing", "torch 2.6.0 crashes on this processor"),
        ("fp asimd evtstrm aes crc32 atomics", "2.10.0", "ok", "ARMv8.1 or later"),
        ("", "2.10.0", "ok", "aarch64"),
    ],
)
def test_doctor_on_a_board_knows_which_torch_crashes(
    features: str, torch: str, state: str, said: str, monkeypatch
) -> None:
    text = f"processor\t: 0\nFeatures\t: {features}\n" if features else "processor\t: 0\nflags\t: fpu\n"
    monkeypatch.setattr(ssh_agent, "read_text", lambda path: text)
    monkeypatch.setattr(doctor, "version", {"torch": torch}.__getitem__)
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    [check] = doctor._processor()
    assert check.state == state and said in check.found
    assert (f"-m pip install torch=={doctor.TORCH_FOR_ARMV8_0}" in check.todo) == (state == "missing")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert doctor._processor() == []


def test_doctor_fails_where_something_needed_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "PROBES", (lambda: [doctor.Check("packages", "missing", "torch", "Run: make setup")],))
    result = call("doctor")
    assert result.exit_code == 1
    assert "-> Run: make setup" in result.stdout


@pytest.mark.parametrize("probe", doctor.PROBES, ids=lambda probe: probe.__name__)
def test_each_probe_gives_a_finding_with_what_to_do(probe) -> None:
    checks = probe()
    assert checks or probe is doctor._processor, "only a processor that needs no check has no finding"
    for check in checks:
        assert check.found
        assert check.state == "ok" or check.todo
