"""Measure the time dilation at which this machine can keep pace with the devices that it emulates.

All devices and links are emulated slower by the same factor, and measured times are divided by it.  Ratios between
times stay the same.
"""

from __future__ import annotations

import math
from typing import Any

from workbench.core.job import Job
from workbench.core.methods import declaration_of
from workbench.core.run_folder import scratch_folder
from workbench.core.serial import to_json
from workbench.methods.base import Event, Method, Notify, Planned, counting_steps
from workbench.methods.common.records import WARM_UP_STEPS
from workbench.profiler.cache import cached, forget
from workbench.runtime.engines import EngineCluster
from workbench.runtime.pacing import asked_dilation, find_dilation

_STEPS_S, _MOST_STEPS = 2.0, 8
"""Steps are counted for about so many of the devices' seconds, and not more than so many steps."""
_MOST_S = 180.0
"""A calibration takes about this many seconds at most, or one measurement without dilation, if that takes longer."""
_MENTIONED_S = 10.0


class Calibration:
    """The time dilation of one job's plan on one cluster.  It is measured once, in a few uncounted steps, and stored
    for later runs.
    """

    def __init__(self, method: Method, planned: Planned[Any], engines: EngineCluster) -> None:
        job: Job = planned.prepared.job
        self._key = {
            "dilation of": [
                job.method,
                job.model,
                job.task,
                job.batch_size,
                job.micro_batches,
                job.max_length,
                to_json(job.options),
            ],
            "cluster": to_json(planned.cluster),
            "plan": to_json(planned.plan),
            "links": engines.fidelity,
        }
        self._trains = declaration_of(job.method).trains
        self._method, self._planned, self._engines = method, planned._replace(cluster=engines.cluster), engines

    def dilate(self, step_s: float, notify: Notify) -> float:
        """Set the engines' dilation to the stored value, or measure it now; return it.  step_s: the expected seconds of
        a step.
        """

        def measure() -> float:
            fewest = 1 if self._trains else 2  # requests are answered without a warm-up
            num_steps = min(_MOST_STEPS, max(fewest, math.ceil(_STEPS_S / step_s))) if step_s else _MOST_STEPS
            all_steps = num_steps + (min(num_steps, WARM_UP_STEPS) if self._trains else 0)
            shares = list[float]()

            def late_share(dilation: float) -> float:
                begun = (
                    f"Calibrating again, at a time dilation of {dilation:g}: {shares[-1]:.1%} of the time was late"
                    if shares
                    else "Calibrating (once): can this machine keep pace with the devices?"
                )
                expected_s = dilation * step_s * all_steps
                takes = f" (about {expected_s:.0f} s)" if expected_s >= _MENTIONED_S else ""
                notify(Event("phase", message=begun + takes, stage="calibrate"))
                notify(Event("count", message="steps", step=0, num_steps=all_steps))
                shares.append(self._late_share(dilation, num_steps, counting_steps(notify, "steps", all_steps)))
                return shares[-1]

            return find_dilation(late_share, most_s=_MOST_S)

        fixed_dilation = asked_dilation()
        dilation = cached(self._key, measure, float)[0] if fixed_dilation is None else fixed_dilation
        self._engines.dilate(dilation)
        return dilation

    def forget(self) -> None:
        """Discard the stored value, because this run could not keep pace; the next run measures again."""
        forget(self._key)

    def _late_share(self, dilation: float, num_steps: int, notify: Notify) -> float:
        self._engines.dilate(dilation)
        with scratch_folder() as folder:
            point = self._method.sweep_point(
                self._planned, "", self._engines, num_steps=num_steps, folder=folder / "run", notify=notify
            )
        return point.overrun_share
