"""Devices that write texts for a server, and what its page shows of them: the map, bytes on links, lost devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Fidelity
from workbench.methods.common.services import TextDevices
from workbench.methods.galaxy_plus.options import InferenceOptions
from workbench.methods.galaxy_plus.planning import as_plan
from workbench.methods.galaxy_plus.serving.draft_advice import SYSTEMS
from workbench.methods.galaxy_plus.serving.text_policy import Action
from workbench.methods.galaxy_plus.serving.text_service import TextService, text_service
from workbench.plots.topology import Node, Traffic, holds_of, speed_of, topology, traffic_of


class DevicePanel:
    """A services.Panel of the devices of a service."""

    def __init__(self, service: TextService) -> None:
        self._service = service
        self._traffic: dict[int, list[Traffic]] = {}

    def state(self) -> dict[str, Any]:
        """Return the devices of the plan that serves, and those that are lost."""
        service, policy = self._service, self._service.policy
        cluster, state, index = service.cluster, policy.state, policy.rescheduler.current
        plan = policy.log.plans[index] if index >= 0 else None
        stages = None if plan is None else as_plan(plan, policy.stacks)
        drafting = policy.draft_round
        guesser = None if drafting is None else drafting.rank
        nodes = [
            Node(
                name=device.name,
                speed=speed_of(device),
                holds=", ".join(filter(None, ("draft" * (rank == guesser), holds_of(stages, rank) if stages else ""))),
                away="lost" if device.name in state.lost else "left out" if device.name in state.left_out else "",
            )
            for rank, device in enumerate(cluster.devices)
        ]
        traffic = [] if plan is None else self._traffic_of(index)
        texts = "1 text" if policy.num_again == 1 else f"{policy.num_again} texts"
        again = f", {texts} continued after a loss" if policy.num_again else ""
        caption = f"{len(state.serving)} of {len(nodes)} devices compute each token{again}"
        waits = "" if plan is not None else ": a new plan is being loaded" if state.wanted else ": none fits"
        kind = "real devices" if cluster.is_real else f"emulated devices ({service.fidelity} links)"
        devices = [
            {
                "name": node.name,
                "up": node.away != "lost",
                "away": node.away,
                "can": not cluster.is_real or node.away != "lost",
                "slow": None if cluster.is_real else policy.fleet.faults.factor(rank) > 1,
            }
            for rank, node in enumerate(nodes)
        ]
        return {
            "where": f"{len(nodes)} {kind} of {cluster.name}{waits}",
            "svg": topology(nodes, traffic, caption=caption, unit="token"),
            "devices": devices,
            "guesser": drafting and {"name": nodes[drafting.rank].name, "break_even": drafting.break_even},
        }

    def _traffic_of(self, index: int) -> list[Traffic]:
        if index not in self._traffic:
            timeline = self._service.token_timeline(self._service.policy.log.plans[index])
            self._traffic[index] = traffic_of(timeline, range(self._service.cluster.world_size))
        return self._traffic[index]

    def act(self, device: str, action: str) -> None:
        """Kill a device, slow it down, or bring it back (see services.Panel)."""
        policy, is_real = self._service.policy, self._service.cluster.is_real
        actions: tuple[Action, ...] = get_args(Action)
        chosen = next((name for name in actions if name == action), None)
        if chosen is None or (is_real and chosen == "slow"):
            problem = "A real device cannot be slowed down from here." if chosen else f"There are {', '.join(actions)}."
            raise ConfigError(f"'{action[:40]}' of a device was asked for.", problem, "Choose another.")
        policy.actions.put((policy.rank_of(device), chosen))


@contextmanager
def serve_texts(
    model: str,
    cluster: Cluster,
    fidelity: Fidelity,
    *,
    options: InferenceOptions,
    ends: Sequence[int],
    say: Callable[[str], None],
    draft: str,
) -> Iterator[TextDevices]:
    """Start devices that write texts (see services.ServeTexts).  Of the options only `system` may be set."""
    request = f"Texts on the devices of {cluster.name} were asked for."
    if options != InferenceOptions(system=options.system):
        problem = "Of the options, texts have `system` only; the planner chooses the others."
        raise ConfigError(request, problem, "Leave the others out.")
    if options.system not in SYSTEMS:
        problem = f"The plans of the system '{options.system}' write no token after the first."
        raise ConfigError(request, problem, f"Choose {', '.join(SYSTEMS)}.")
    with text_service(model, cluster, fidelity, ends=ends, say=say, system=options.system, draft=draft) as service:
        writer, passes = service.writer, service.policy.passes if draft else None
        yield TextDevices(writer=writer, ends=writer.ends, panel=DevicePanel(service), passes=passes)
