"""Nothing outlives a run: whoever is killed, its processes, folders, namespaces and sockets are gone within seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from tests.waiting import LIMIT_S, wait_for
from workbench.core.catalogue import load_cluster
from workbench.core.errors import WriteError
from workbench.core.processes import ProcessId, note_process, processes_of, remove_run_folder
from workbench.core.run_folder import Owner, child_environment, make_run_folder, sweep_stale_folders
from workbench.core.serial import to_json
from workbench.methods.devices import require_emulated

_PARENT = """
import json, sys
sys.path.insert(0, {folder!r})
from workbench.core.cluster import Cluster, Device, Link
from workbench.runtime import engine_starter
from workbench.runtime.engines import EngineCluster
link = Link(bytes_per_s=125e6)
devices = tuple(Device(name=f"device-{{rank}}", flops_per_s=1e9, memory_bytes=10**8, link=link) for rank in range(2))
engines = EngineCluster.start(Cluster(name="two", devices=devices), fidelity={fidelity!r})
session = engines._session
template = engine_starter._template()._process
pids = {{"engines": [*engines.engine_pids, *([template.pid] if template else [])], "janitor": session._janitor.pid}}
print(json.dumps({{"folder": str(session.folder), **pids}}), flush=True)
"""
_RUN = (
    "import engine_jobs\nengines.run(engine_jobs.train_for_ever, [60.0, 60.0], on_event=lambda rank, event: "
    "print(event, flush=True))\n"
)


def start_parent(fidelity: str, then: str, folder: Path) -> tuple[subprocess.Popen[str], dict]:
    program = _PARENT.format(folder=str(folder), fidelity=fidelity) + then
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    assert process.stdout is not None
    about = json.loads(process.stdout.readline())
    return process, about | {"processes": processes_of(Path(about["folder"]))}


def traces(about: dict) -> list[str]:
    folder = Path(about["folder"])
    left = [f"process {process}" for process in about.get("processes", ()) if process.alive]
    left += [f"engine {pid}" for pid in about["engines"] if psutil.pid_exists(pid)]
    return left + ([str(folder)] if folder.exists() else [])


def leaves_no_traces(about: dict) -> bool:
    return wait_for(lambda: not traces(about), f"an end of {about}")


@pytest.fixture(params=["paced", "kernel"])
def fidelity(request: pytest.FixtureRequest) -> str:
    if request.param == "kernel":
        request.getfixturevalue("kernel_links")
    return request.param


def test_parent_killed_in_the_middle_of_a_job(fidelity: str, engine_jobs_folder: Path) -> None:
    parent, about = start_parent(fidelity, _RUN, engine_jobs_folder)
    with parent:
        assert parent.stdout is not None
        assert "step" in parent.stdout.readline()
        assert traces(about)
        parent.kill()
        parent.wait()
        assert leaves_no_traces(about)


@pytest.mark.parametrize("ending", ["", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n"])
def test_parent_that_never_stops_its_engines(ending: str, engine_jobs_folder: Path) -> None:
    parent, about = start_parent("paced", ending, engine_jobs_folder)
    with parent:
        parent.wait(LIMIT_S)
        assert leaves_no_traces(about)


@pytest.fixture
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temporary folder (its name short, for sockets) that no other process sweeps."""
    with tempfile.TemporaryDirectory(prefix="wb-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.mark.usefixtures("own_temporary_folder")
def test_parent_and_janitor_killed_together(engine_jobs_folder: Path) -> None:
    parent, about = start_parent("paced", _RUN, engine_jobs_folder)
    with parent:
        os.kill(about["janitor"], signal.SIGKILL)
        parent.kill()
        parent.wait()
        wait_for(
            lambda: not any(psutil.pid_exists(pid) for pid in about["engines"]),
            "an end of the engines, which watch their owner",
        )
        assert traces(about)  # nobody has removed the folder
        sweep_stale_folders()
        assert traces(about) == []


def test_sweep_spares_the_living_and_the_unreadable() -> None:
    mine = make_run_folder()
    try:
        (other := make_run_folder()).joinpath("owner.json").write_text("{")
        sweep_stale_folders()
        assert mine.exists()
        assert other.exists()
        dead = Owner.current()
        other.joinpath("owner.json").write_text(
            to_json(replace(dead, started=dead.started + 1, boot="another", host="another"))
        )
        sweep_stale_folders()
        assert other.exists()  # a machine that shares this disk may be using it
        other.joinpath("owner.json").write_text(to_json(replace(dead, started=dead.started + 1)))
        sweep_stale_folders()
        assert not other.exists()
    finally:
        remove_run_folder(mine)
        remove_run_folder(other)


def test_a_process_that_only_names_a_run_folder_is_spared() -> None:
    folder = make_run_folder()
    command = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen([*command, str(folder)], stdin=subprocess.PIPE) as reader,
        subprocess.Popen(command, stdin=subprocess.PIPE) as own,
    ):
        note_process(folder, ProcessId.of(own.pid))
        note_process(folder, ProcessId.of(reader.pid)._replace(started=1.0))  # whose number was another's before
        remove_run_folder(folder)
        assert own.wait(LIMIT_S) != 0
        assert reader.poll() is None
        reader.kill()
    assert not folder.exists()


def test_process_identity() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = ProcessId.of(child.pid)
        assert process.alive
        assert not process._replace(started=process.started + 1).alive
        assert not process.wait(0.05)
        process.kill()
        assert process.wait(LIMIT_S)
        assert not process.alive  # although it is still a zombie


def test_in_a_notebook(engine_jobs_folder: Path, make_cluster: Callable, tmp_path: Path) -> None:
    """A real ipykernel, with its running event loop: start, run, a function of the notebook, interrupt, run again."""
    cells = [
        _PARENT.format(folder=str(engine_jobs_folder), fidelity="paced"),
        "import engine_jobs\nprint(engines.run(engine_jobs.all_reduce, [1, 1]))",
        "def double(context, payload):\n    return 2 * payload\n",
        "print(engines.run(double, [1, 2]))",
        "import signal\ntry:\n"
        "    engines.run(engine_jobs.train_for_ever, [60.0] * 2, on_event=lambda *_: "
        "signal.raise_signal(signal.SIGINT))\n"
        "except KeyboardInterrupt:\n    print('interrupted')",
        "import os\nfrom workbench.core.processes import ProcessId\nlost = ProcessId.of(engines.engine_pids[1])\n"
        "os.kill(lost.pid, 9)\nassert lost.wait(200)\nprint(engines.run(engine_jobs.all_reduce, [1, 1]))",
        "%load_ext workbench.widgets.devices_magic",
        "%%devices\nimport os\nmine = os.getpid()",
        "%%devices\nprint(context.device.name)\nmine == os.getpid()",
        "%%devices\n1 / context.rank",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=int(LIMIT_S), resources={"metadata": {"path": str(tmp_path)}})
    saved = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = child_environment()["PYTHONPATH"]
    try:
        client.execute()
    finally:
        if saved is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = saved
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert printed[1] == "[[3.0], [3.0]]\n"
    assert printed[3] == "[2, 4]\n"
    assert printed[4] == "interrupted\n"
    assert printed[5] == "[[3.0], [3.0]]\n"
    assert printed[8].split() == ["device-0:", "device-0", "True", "device-1:", "device-1", "True"]
    assert printed[9].splitlines() == ["device-0: ZeroDivisionError in line 1: division by zero.", "device-1: 1.0"]
    assert leaves_no_traces(json.loads(printed[0]))


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_scratch_folder_goes_with_its_process(ending: str) -> None:
    program = (
        "import os, signal, time\nfrom workbench.core.run_folder import scratch_folder\n"
        "with scratch_folder() as folder:\n"
        "    (folder / 'cache').mkdir()\n    (folder / 'cache' / 'taps.bin').write_bytes(b'1' * 100)\n"
        f"    print(folder, flush=True)\n    {ending}\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=child_environment()
    ) as process:
        assert process.stdout is not None
        folder = process.stdout.readline().strip()
        process.wait()
        assert Path(folder).name.startswith("workbench-run-")
        assert leaves_no_traces({"folder": folder, "engines": []})


@pytest.mark.parametrize(
    "work",
    [
        "import papermill\nfrom workbench.runs.notebooks import run_notebook\n"
        "papermill.execute_notebook = lambda *args, **settings: end()\nrun_notebook(Path('a.ipynb'), Path('b.ipynb'))",
        "from workbench.methods.pac_plus import measure\n"
        "from workbench.models.loading import load_stack\nfrom workbench.models.adapter_config import "
        "ParallelAdapterConfig\n"
        "stack = load_stack('tiny-bert-1')\n"
        "sizes = {'hidden_size': stack.hidden_size, 'num_layers': stack.num_layers}\nconfig = "
        "ParallelAdapterConfig(**sizes, num_heads=1)\n"
        "measure.ActivationCache.create = lambda folder, manifest: (folder.mkdir(), end())\n"
        "measure.measure_layers(stack, config, dtype='float32', max_length=8, budget_s=0.1)",
    ],
    ids=["a notebook's kernel", "a profile's cache"],
)
def test_temporary_files_go_when_their_process_is_killed(work: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    temporary = tmp_path_factory.mktemp("t")  # a short name: see run_folder
    program = (
        "import os, signal\nfrom pathlib import Path\n"
        "def end(): print(os.listdir(os.environ['TMPDIR']), flush=True); os.kill(os.getpid(), signal.SIGKILL)\n" + work
    )
    environment = child_environment() | {"TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "workbench-run-" in done.stdout
    wait_for(
        lambda: not list(temporary.glob("workbench-*")), "an empty temporary folder"
    )  # torch leaves an empty folder of its own


def test_a_full_disk_of_temporary_files_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=40_000))
    for made in (make_run_folder, lambda: require_emulated(load_cluster("laptop"))):
        with pytest.raises(
            WriteError,
            match=r"The disk is full: 40\.0 kB are free, 1\.0 MB are needed\. Free some space, or set TMPDIR",
        ):
            made()
