"""Engines are forked from a template that has imported the libraries once, and started one by one where forking is not
safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.clusters import cluster_of
from tests.waiting import LIMIT_S
from workbench.core.errors import RuntimeSetupError
from workbench.core.processes import ProcessId
from workbench.core.run_folder import child_environment
from workbench.models.configuration import import_family
from workbench.models.lora import import_peft
from workbench.runtime import engine_starter
from workbench.runtime.engine_starter import EnginesLate, settle, warm_up
from workbench.runtime.engines import EngineCluster
from workbench.runtime.messages import CallTable

CLUSTER = cluster_of(("one", "two"), name="pair", bytes_per_s=125e6, host_share=0.5)

FOR_MODELS = engine_starter._SHARED
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are forked on Linux only")


@pytest.fixture(scope="module")
def own_template() -> Iterator[engine_starter._Template]:
    """Another template than the one of the other tests, which must not have to import everything again."""
    result = engine_starter._Template()
    yield result
    result.end()


@pytest.fixture(autouse=True)
def _without_models(own_template: engine_starter._Template, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are made again and again here, so they import no more than the engines themselves need."""
    monkeypatch.setattr(engine_starter, "_template", lambda: own_template)
    monkeypatch.setattr(engine_starter, "_SHARED", ())
    monkeypatch.setattr(engine_starter, "_shared", {})
    monkeypatch.setattr(engine_starter, "calls_of_emulated", lambda: CallTable({}))


def template() -> ProcessId:
    process = engine_starter._template()._process
    assert process is not None
    return ProcessId.of(process.pid)


@pytest.fixture
def misleading_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A current folder with files that are named as modules, of which nothing may be imported."""
    for name in ("random", "torch", "wave", "msgspec", "json", "psutil"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write(__name__)")
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "mark").exists()


def who(context, payload) -> tuple[int, int, str | None, str]:
    import wave  # a module of Python that nothing has imported

    assert hasattr(wave, "Wave_read")
    return os.getpid(), os.getppid(), os.environ.get("WORKBENCH_TEST_MARK"), " ".join(psutil.Process().cmdline())


def test_engines_are_children_of_one_template_that_outlives_them() -> None:
    with EngineCluster.start(CLUSTER, fidelity="paced") as engines:
        first, result = template(), engines.run(who, [None] * 2)
        assert {parent for _, parent, _, _ in result} == {first.pid}
        assert [name.rpartition(" ")[2] for *_, name in result] == ["0", "1"]
        assert all("workbench.runtime.engine --folder" in name for *_, name in result)
    assert first.alive
    with EngineCluster.start(CLUSTER, fidelity="paced") as engines:
        assert {parent for _, parent, _, _ in engines.run(who, [None] * 2)} == {first.pid}


@pytest.mark.usefixtures("misleading_folder")
def test_a_template_that_died_is_started_anew() -> None:
    warm_up()
    first = template()
    first.kill()
    with EngineCluster.start(CLUSTER, fidelity="paced") as engines:
        assert {parent for _, parent, _, _ in engines.run(who, [None] * 2)} == {template().pid} != {first.pid}


def test_what_this_process_imports_meanwhile_leaves_the_template() -> None:
    """transformers imports torch's compiler, which sets a variable: one import would then serve nobody."""
    program = (
        "from workbench.runtime import engine_starter as s\nbefore = s.engine_environment()\n"
        "import transformers.modeling_utils, torch._inductor.compiler_bisector\n"
        "print({name for name, _ in before.items() ^ s.engine_environment().items()} - {*s._OF_A_RUN})\n"
    )
    environment = {name: value for name, value in child_environment().items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_warming_up_imports_what_models_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """And peft and a model's family if this process has them: each engine would spend processor time on them, and so
    would a device that comes back.  One thread: it is safe to fork.
    """
    import_peft()
    import_family("tiny-bert")
    monkeypatch.setattr(engine_starter, "_SHARED", FOR_MODELS)
    warm_up()
    settle()
    assert "Threads:\t1\n" in Path(f"/proc/{template().pid}/status").read_text(encoding="utf-8")
    with EngineCluster.start(CLUSTER, fidelity="paced") as engines:
        assert engines.run(has_libraries, [None] * 2) == [True, True]


def has_libraries(context, payload) -> bool:
    return {"transformers.models.bert.modeling_bert", "transformers.modeling_utils", "peft"} <= sys.modules.keys()


def test_another_environment_makes_another_template(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up()
    first = template()
    monkeypatch.setenv("WORKBENCH_TEST_MARK", "set")
    with EngineCluster.start(CLUSTER, fidelity="paced") as engines:
        assert {mark for _, _, mark, _ in engines.run(who, [None] * 2)} == {"set"}
    assert not first.alive


def test_a_template_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSTARTUP_FAILS", "1")  # another environment: the template that runs is not taken
    monkeypatch.setattr(engine_starter, "_ENGINE_MODULE", "workbench.runtime.not_there")
    with pytest.raises(RuntimeSetupError, match=r"ended: .*not_there") as caught:
        EngineCluster.start(CLUSTER, fidelity="paced")
    assert not isinstance(caught.value, EnginesLate)


@pytest.mark.usefixtures("misleading_folder")
def test_one_by_one_where_forking_is_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_starter, "_CAN_FORK", False)
    with EngineCluster.start(CLUSTER.part([0]), fidelity="paced") as engines:
        [(pid, parent, *_)] = engines.run(who, [None])
        assert parent == os.getpid()
        os.kill(pid, signal.SIGKILL)
        ProcessId.of(pid).wait(LIMIT_S)
        assert engines.run(who, [None])[0][0] != pid


def test_the_template_ends_with_its_owner_while_it_imports() -> None:
    """Later, too: test_engine_cleanup."""
    program = "from workbench.runtime import engine_starter as s\ns._SHARED = ()\ns.warm_up()\n"
    program += "print(s._template()._process.pid, flush=True)\ninput()\n"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    ) as owner:
        assert owner.stdout is not None
        started = ProcessId.of(int(owner.stdout.readline()))
        assert started.alive
        owner.kill()
        owner.wait()
        assert started.wait(LIMIT_S), "the template outlived its owner"
