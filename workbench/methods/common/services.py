"""The interface between a method that serves and the server or the command line (see core.methods.Declaration)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault
from workbench.core.job import Fidelity, Mode

if TYPE_CHECKING:
    from workbench.models.text import Writer
    from workbench.models.text_batch import Passes


class Panel(Protocol):
    """The devices behind a server's page: their state, and the page's actions on them."""

    def state(self) -> dict[str, Any]:
        """Return where texts are written ('where'), the map ('svg'), the devices (name and whether it is up), and which
        one guesses tokens, with the acceptance from which that pays ('guesser').
        """

    def act(self, device: str, action: str) -> None:
        """Kill a device, slow it down or bring it back.  Raises ConfigError if there is no such device, or if that
        cannot be done.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDevices:
    """Running devices that write texts.

    ends: tokens that end a text.  passes: counts of a draft's passes, if there is a draft.
    """

    writer: Writer
    ends: frozenset[int]
    panel: Panel
    passes: Passes | None = None


class ServeTexts(Protocol):
    """Starts a cluster's devices with a model, and ends them afterwards."""

    def __call__(
        self,
        model: str,
        cluster: Cluster,
        fidelity: Fidelity,
        *,
        options: Any,
        ends: Sequence[int],
        say: Callable[[str], None],
        draft: str,
    ) -> AbstractContextManager[TextDevices]:
        """Start the devices.

        options: the method's options.  ends: tokens that end a text, besides the model's own.  say: receives what
        happens.  draft: which model guesses tokens (see models.speculation.DraftChoice.read); '' for none.
        Raises ConfigError for options with which no text is written and a model that cannot be divided, PlanError if it
        fits on no devices, RuntimeSetupError.
        """


class StreamReport(Protocol):
    """The report of a served stream: a dataclass with the field `environment`.

    model, cluster, label, notes, mark: see core.timeline.SourcedReport.
    """

    @property
    def heading(self) -> str:
        """Return the heading of its summary."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a reader has to know."""

    @property
    def mark(self) -> str:
        """Return the mark of its seconds, '' for a valid measurement."""

    def summary(self) -> Mapping[str, Any]:
        """Return its numbers by name."""

    def write(self, path: Path) -> Path:
        """Write it as JSON."""


class ServeRequests(Protocol):
    """Serves a stream of requests."""

    def __call__(
        self,
        model: str,
        cluster: Cluster,
        mode: Mode,
        fidelity: Fidelity,
        *,
        num_requests: int,
        rate_per_s: float,
        length: int,
        seed: int,
        settings: Any,
        faults: Sequence[Fault],
        say: Callable[[str], None],
    ) -> StreamReport:
        """Serve the stream and return its report.

        rate_per_s: rate of a Poisson process; 0: back to back.  length: tokens of a request; 0: the usual ones.
        settings: see core.methods.RequestService.  faults: what devices suffer, and at which second.
        say: receives what happens.
        Raises ConfigError, PlanError, RuntimeSetupError, and ServiceInterrupted if the user ends it.
        """


class ServiceInterrupted(KeyboardInterrupt):
    """The user ended a service.  report: report of the requests answered until then."""

    def __init__(self, report: StreamReport) -> None:
        super().__init__()
        self.report = report
