"""A federated run by Flower in this process: its FedAvg, its messages and a client app for each device (Beutel et al.,
"Flower: A Friendly Federated Learning Framework", arXiv:2007.14390).

A grid carries messages between Flower's server and its clients.  This one calls the client app at once; Flower's own
start processes (docs/evidence/flower.md).  Importing this module needs Flower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from workbench.methods.ringada.rank_job import RingRankJob
from workbench_studies.papers.compare.clients import WEIGHT, Client

ARRAYS, METRICS, MOMENTS = "arrays", "metrics", "moments"


class LocalGrid(Grid):
    """A grid of one client app, whose nodes are numbered from 1; each has a context that stays.

    sent_bytes: the bytes of all arrays in messages and replies, by Flower's count.
    """

    def __init__(self, app: ClientApp, num_nodes: int) -> None:
        self._app, self._replies, self.sent_bytes = app, dict[str, Message](), 0
        self._contexts = {
            node: Context(
                run_id=0, node_id=node, node_config={"partition-id": node - 1}, state=RecordDict(), run_config={}
            )
            for node in range(1, num_nodes + 1)
        }

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run (see Grid)."""

    @property
    def run(self) -> Any:
        """Return nothing (see Grid)."""

    def create_message(self, *args: Any, **settings: Any) -> Message:
        """Refuse: Flower's strategies make their messages themselves (see Grid)."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of the nodes (see Grid)."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Call the client app for each message (see Grid)."""
        names = []
        for message in messages:
            names.append(f"{len(self._replies)}")
            reply = self._app(message, self._contexts[message.metadata.dst_node_id])
            self._replies[names[-1]] = reply
            for content in (message.content, reply.content):
                self.sent_bytes += sum(record.count_bytes() for record in content.array_records.values())
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return replies (see Grid)."""
        return [self._replies[name] for name in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the replies to messages (see Grid)."""
        return self.pull_messages(self.push_messages(messages))


def client_app(run: RingRankJob, sends_moments: bool, has_moments: bool) -> ClientApp:
    """Return an app that trains a device's mini-batches of a round.

    sends_moments: whether it sends the optimizer's moments with the weights.  has_moments: whether they last longer
    than a round.
    """
    clients = [Client(run.on_rank(rank)) for rank in range(run.cluster.world_size)]
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        rank, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
        client, state = clients[rank], dict[str, Tensor](message.content[ARRAYS].to_torch_state_dict())
        if has_moments and not sends_moments and MOMENTS in context.state:
            state |= context.state[MOMENTS].to_torch_state_dict()
        client.load(state, number * run.options.local_iterations)
        samples, loss = client.train(rank, number)
        weights = {name: tensor for name, tensor in client.state().items() if name.startswith(f"{WEIGHT}/")}
        moments = {name: tensor for name, tensor in client.state().items() if name not in weights}
        if has_moments and not sends_moments:
            context.state[MOMENTS] = ArrayRecord(moments)
        content = RecordDict(
            {
                ARRAYS: ArrayRecord(weights | moments if sends_moments else weights),
                METRICS: MetricRecord({"num-examples": samples, "loss": loss}),
            }
        )
        return Message(content=content, reply_to=message)

    return app


def federated(
    run: RingRankJob, sends_moments: bool, has_moments: bool, finished: Callable[[int, Mapping[str, Tensor]], None]
) -> tuple[list[float], list[int]]:
    """Run all rounds.  Returns the mean loss and the bytes of all messages of each round.

    sends_moments, has_moments: see client_app.  finished: called with the number of rounds and the average.
    """
    # A message names its run, and the task and node that made it; Flower's own processes set these.
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 0
    world_size, sent_bytes, state = run.cluster.world_size, [0], Client(run).state()
    grid = LocalGrid(client_app(run, sends_moments, has_moments), world_size)

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number:
            sent_bytes.append(grid.sent_bytes)
            finished(number, arrays.to_torch_state_dict())
        return MetricRecord()

    first = {name: tensor for name, tensor in state.items() if sends_moments or name.startswith(f"{WEIGHT}/")}
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=world_size, min_available_nodes=world_size)
    result = strategy.start(grid, ArrayRecord(first), run.num_rounds, train_config=ConfigRecord(), evaluate_fn=evaluate)
    metrics: Mapping[int, Any] = result.train_metrics_clientapp
    losses = [float(metrics[number + 1]["loss"]) for number in range(run.num_rounds)]
    return losses, [after - before for before, after in pairwise(sent_bytes)]
