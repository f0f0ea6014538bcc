"""What a notebook defines itself runs on emulated devices alone; declared functions are called in the same way
everywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.methods.calls import CALLS
from workbench.runtime.context import RankContext
from workbench.runtime.engines import EngineCluster
from workbench.runtime.jobs import Outcome
from workbench.runtime.measuring import measure_rank_host
from workbench.runtime.own_calls import Own, Printed, outcome_of, run_cell, run_own


def context_of(cluster: Cluster) -> RankContext:
    return RankContext(rank=0, world_size=1, device=cluster.devices[0], cluster=cluster, fidelity="paced")


def test_a_declared_function_is_called_as_on_a_real_device(make_cluster: Callable[..., Cluster]) -> None:
    engines = EngineCluster(make_cluster(1), "paced", "")
    assert engines.call(measure_rank_host, 0.5) == (CALLS.call(measure_rank_host), 0.5)
    call, content = engines.call(len, "abc")
    assert call.function is run_own and content.value() == (len, "abc")


@pytest.mark.parametrize("function", [run_own, run_cell, len])
def test_a_real_device_runs_no_function_of_a_notebook(function: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeSetupError, match="not in the table"):
        CALLS.call(function)


def test_what_cannot_be_pickled_or_read_is_an_error_in_words() -> None:
    with pytest.raises(ConfigError, match=r"cannot be pickled: .*lock"):
        Own.of(threading.Lock())
    answer = outcome_of(Outcome(rank=2, result=Own(b"garbage")))
    assert answer.rank == 2 and "cannot be read here" in str(answer.error)


def test_a_cell_keeps_its_variables_and_says_what_fails(make_cluster: Callable[..., Cluster]) -> None:
    context = context_of(make_cluster(1))
    for source, printed in (
        ("count = 3\nprint('begun')", Printed("begun\n")),
        ("count += 1\ncount", Printed("4\n")),
        ("def name():\n    return context.device.name\nname()", Printed("'device-0'\n")),
        ("print('so far')\ncount / 0", Printed("so far\n", "ZeroDivisionError in line 2: division by zero")),
        ("raise SystemExit(1)", Printed("", "SystemExit in line 1: 1")),
        ("1 +", Printed("", "SyntaxError: invalid syntax (<cell>, line 1)")),
        ("None", Printed("")),
        ("", Printed("")),
    ):
        assert run_cell(context, source) == printed
