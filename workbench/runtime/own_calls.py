"""Run a notebook's own functions and cells on emulated devices.  These are the only messages that are pickled.

An emulated device is a process of the same user on the same machine, so it may run whatever the notebook could run
itself.  Real devices and torchrun's ranks run only the functions of the table (see messages.CallTable), and no message
from them is unpickled.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.runtime.context import Channel, RankContext
from workbench.runtime.jobs import Outcome


class Own(NamedTuple):
    """A pickled value."""

    data: bytes

    @classmethod
    def of(cls, value: Any) -> Own:
        """Pickle a value.  Functions and classes that cannot be imported are pickled with their code.  Raises
        ConfigError if it has none.
        """
        import cloudpickle  # emulated devices need it, real ones do not have it

        try:
            return cls(cloudpickle.dumps(value))
        except Exception as error:  # whatever the value's own __reduce__ raises
            request = "A function or data were to be sent to an emulated device."
            raise ConfigError(request, f"They cannot be pickled: {error}.", "Send data, not live objects.") from error

    def value(self) -> Any:
        """Return the value."""
        import cloudpickle

        return cloudpickle.loads(self.data)


class _OwnChannel(Channel):
    """The channel of a user's own function: its events and commands may be any objects."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.store, self.should_stop = channel.store, channel.should_stop  # type: ignore[method-assign]

    def send(self, event: Any) -> None:
        """Send one event."""
        self._channel.send(Own.of(event))

    def listen(self, take: Callable[[Any], None]) -> None:
        """Pass every command to `take`, in another thread, until the job ends."""
        self._channel.listen(lambda command: take(command.value()))


def run_own(context: RankContext, request: Own) -> Own:
    """Call a function with its payload and return its Outcome.  request: function and payload, pickled."""
    try:
        function, payload = request.value()
        assert context.channel is not None
        result = function(replace(context, channel=_OwnChannel(context.channel)), payload)
        return Own.of(Outcome(rank=context.rank, result=result))
    except BaseException as error:  # the engine must survive whatever the function does, including sys.exit
        text = "".join(traceback.format_exception(error))
        try:
            failed = Own.of(Outcome(rank=context.rank, error=error, text=text))
            failed.value()  # some errors can be pickled, but not unpickled
        except Exception:
            stand_in = RuntimeError(f"{type(error).__name__}: {error}")
            failed = Own.of(Outcome(rank=context.rank, error=stand_in, text=text))
        return failed


def outcome_of(outcome: Outcome) -> Outcome:
    """Return the Outcome of a job; for a user's own function, the Outcome that it returned."""
    if not isinstance(outcome.result, Own):
        return outcome
    try:
        return outcome.result.value()
    except Exception as error:  # of a class that this process does not have
        failed = RuntimeSetupError("A job's answer was awaited.", f"It cannot be read here: {error}.", "Return data.")
        return Outcome(rank=outcome.rank, error=failed, text=str(error))


class Printed(NamedTuple):
    """The output of a cell on a device, with the value of its last expression.  error: the error in one line, or ''."""

    text: str
    error: str = ""


_VARIABLES: dict[str, Any] = {"__name__": "__main__"}


def run_cell(context: RankContext, source: str) -> Printed:
    """Run a notebook's cell in the variables that earlier cells left, and in `context`."""
    _VARIABLES["context"] = context
    printed, error = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            cell = ast.parse(source, "<cell>")
            expression = cell.body.pop() if cell.body and isinstance(cell.body[-1], ast.Expr) else None
            exec(compile(cell, "<cell>", "exec"), _VARIABLES)
            if isinstance(expression, ast.Expr):
                sys.displayhook(eval(compile(ast.Expression(expression.value), "<cell>", "eval"), _VARIABLES))
        except BaseException as failure:  # also SystemExit, so that the engine continues
            lines = [
                frame.lineno for frame in traceback.extract_tb(failure.__traceback__) if frame.filename == "<cell>"
            ]
            place = f" in line {lines[-1]}" if lines else ""
            error = f"{type(failure).__name__}{place}: {failure}".splitlines()[0]
    return Printed(printed.getvalue(), error)


ONLY_EMULATED = {f"{__name__}:run_own": f"{__name__}:Own", f"{__name__}:run_cell": ""}
"""Further functions in the table of an emulated device's engine, besides the declared ones."""
