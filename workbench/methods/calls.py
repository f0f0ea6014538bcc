"""The functions that may be called on a real device.  Run as a program, this is a device's engine (started by runtime.ssh_agent)."""

from __future__ import annotations

from workbench.runtime.messages import CallTable, Parts

_RANK_RESULT = "workbench.methods.common.session:RankResult"
_SERVING = "workbench.methods.galaxy_plus.serving.worker"

CALLS = CallTable(
    {
        "workbench.runtime.measuring:measure_rank_host": "",
        "workbench.runtime.measuring:measure_rank_links": "",
        "workbench.runtime.torchrun:measure_clock_offset": "",
        "workbench.runtime.torchrun:sees_file": "",
        "workbench.runtime.torchrun:remove_own_files": "",
        "workbench.methods.pac_plus.method:measure_rank": "",
        "workbench.methods.pac_plus.method:run_rank": "",
        "workbench.methods.pac_plus.method:serve_rank": Parts(
            "workbench.methods.pac_plus.rank_job:PacPlusRankJob", _RANK_RESULT, done="builtins:float"
        ),
        "workbench.methods.fine_tuning.method:measure_rank": "",
        "workbench.methods.fine_tuning.method:run_rank": "",
        "workbench.methods.fine_tuning.method:serve_rank": Parts(
            "workbench.methods.fine_tuning.phases:FineTuningRankJob", _RANK_RESULT, done="builtins:float"
        ),
        "workbench.methods.confidant.method:measure_rank": "",
        "workbench.methods.p_rge.method:measure_rank": "",
        "workbench.methods.p_rge.worker:run_rank": "workbench.methods.p_rge.worker:Logged",
        "workbench.methods.p_rge.worker:serve_rank": Parts(
            "workbench.methods.p_rge.worker:RankJob",
            "workbench.methods.p_rge.worker:RankPart",
            done="workbench.models.zeroth_order:StepLog",
        ),
        "workbench.methods.ringada.method:measure_rank": "",
        "workbench.methods.ringada.method:run_rank": "",
        "workbench.methods.ringada.method:serve_rank": Parts(
            "workbench.methods.ringada.rank_job:RingRankJob", _RANK_RESULT, done="builtins:float"
        ),
        "workbench.methods.galaxy_plus.method:measure_rank": "",
        "workbench.methods.galaxy_plus.worker:serve_rank": "",
        f"{_SERVING}:serve_worker": Parts(
            job=f"{_SERVING}:ServiceJob",
            done=f"{_SERVING}:Served",
            probe="builtins:int",
            events=tuple(f"{_SERVING}:{name}" for name in ("Loaded", "Begun", "UnderWay", "BlockReport", "Failed")),
        ),
    }
)
"""The functions by name, each with the types that it publishes in addition to dicts."""


if __name__ == "__main__":
    from workbench.runtime.pipe_engine import serve

    serve(CALLS)
