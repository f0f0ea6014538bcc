"""`workbench serve`: texts over HTTP, or a stream of requests on devices that slow down, die and come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.chat import DraftName
from workbench.cli.http import LOOPBACK, OF_BOTH, OF_HTTP, serve_http
from workbench.cli.job import CLUSTER, ClusterName, Command, is_given, parse_options, print_help_line
from workbench.cli.output import INTERRUPTED, Json, print_json, print_table, print_text, say
from workbench.core.catalogue import load_cluster
from workbench.core.device_faults import parse_faults
from workbench.core.errors import ConfigError
from workbench.core.files import require_writable
from workbench.core.job import Fidelity, Mode
from workbench.core.methods import attribute, declaration_of, method_with, methods_with
from workbench.core.serial import to_builtins
from workbench.methods.common.services import ServeRequests, ServiceInterrupted, StreamReport
from workbench.methods.option_values import read_options


class ServeCommand(Command):
    """`workbench serve`, whose help ends with the settings of a stream of each method that serves one."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        super().format_help(ctx, formatter)
        for method in methods_with("serves_requests"):
            service = declaration_of(method).serves_requests
            assert service is not None
            settings = ", ".join(f"{key}={value}" for key, value in to_builtins(service.settings()).items())
            print_help_line(f"Settings of a stream of {method} (--option KEY=VALUE): {settings}")


def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="Model: an embedded name, a folder, or a hub name. To simulate: also a shape such as GPT2-Large. With "
            "--http: also a run's folder."
        ),
    ] = "all-MiniLM-L6-v2",
    http: Annotated[
        bool,
        typer.Option(
            "--http",
            help="Serve OpenAI's API and a chat page until Ctrl-C, in one process or on --cluster's devices.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="With --http: the address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --http: the port; 0: any free one.")] = 8000,
    token: Annotated[
        str,
        typer.Option(
            envvar="WORKBENCH_TOKEN",
            help="With --http: the secret that clients must send. Random if others can connect.",
        ),
    ] = "",
    method: Annotated[str, typer.Option(help="Method of the devices.", show_default="the first that can")] = "",
    system: Annotated[
        str,
        typer.Option(
            help="With --http on a --cluster: the system whose planner divides the model, such as edgeshard (an option "
            "of the method). The default planner may choose a single device."
        ),
    ] = "",
    draft: DraftName = "",
    cluster: ClusterName = CLUSTER,
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 200,
    rate: Annotated[float, typer.Option(help="Requests that arrive per second (Poisson); 0: back to back.")] = 0.0,
    length: Annotated[
        int | None, typer.Option(help="Tokens per request.", show_default="64, or those of a picture")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of arrivals and tokens.")] = 0,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:DEVICE[:FACTOR]@FROM[-TO]", help="Slow, kill or freeze a device, such as slow:beta:4@10-30s."
        ),
    ] = None,
    reaction: Annotated[str, typer.Option(help="What to do about a straggler: exclude, or none.")] = "exclude",
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Settings for detecting stragglers, see below. With --http: an option of the method. May be repeated.",
        ),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Simulate in virtual time, or run with real tensors.")] = "execute",
    fidelity: Annotated[Fidelity, typer.Option(help="How links are emulated.")] = "auto",
    report: Annotated[Path | None, typer.Option(help="Write the serving report (JSON) to this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the figure.")] = None,
    as_json: Json = False,
) -> None:
    """Serve a stream of requests, and re-plan around stragglers and lost devices; with --http: serve texts to other
    programs, and a chat page.
    """
    if http:
        idle = (name for name in context.params if name not in OF_HTTP and is_given(context, name))
        if wrong := next(idle, None):
            raise ConfigError(
                f"--{wrong.replace('_', '-')} was given with --http.",
                "It is a setting of a stream of requests made here.",
                "Leave it out.",
            )
        serve_http(
            model if is_given(context, "model") else "SmolLM2-135M",
            cluster if is_given(context, "cluster") else None,
            fidelity,
            method=method,
            options=parse_options(option) | ({"system": system} if system else {}),
            draft=draft,
            host=host,
            port=port,
            token=token,
        )
        return
    if wrong := next((name for name in OF_HTTP - OF_BOTH if is_given(context, name)), None):
        raise ConfigError(f"--{wrong} was given.", "It is a setting of --http.", "Give that, too, or leave it out.")
    require_writable(report, out and out / "serving.html")
    described = load_cluster(cluster)
    service = declaration_of(method_with("serves_requests", method)).serves_requests
    assert service is not None, "it declares it"
    draw = attribute(service.figure)
    serve_requests: ServeRequests = attribute(service.serve)
    try:
        served = serve_requests(
            model,
            described,
            mode,
            fidelity,
            num_requests=requests,
            rate_per_s=rate,
            length=length or 0,
            seed=seed,
            settings=read_options("serve", service.settings, {"reaction": reaction, **parse_options(option)}),
            faults=parse_faults(";".join(fault or ()), described, "s"),
            say=say,
        )
        _finish(served, draw, report, out, as_json=as_json)
    except ServiceInterrupted as interrupted:
        say("Interrupted.")
        _finish(interrupted.report, draw, report, out, as_json=as_json)
        raise typer.Exit(INTERRUPTED) from None


def _finish(
    served: StreamReport, draw: Callable[..., Any], path: Path | None, out: Path | None, *, as_json: bool
) -> None:
    """Write the files and print the summary."""
    from workbench.experiment import environment

    report: StreamReport = replace(served, environment=environment())  # type: ignore[type-var]
    summary = report.summary()
    files = []
    if path is not None:
        files.append(report.write(path))
    if out is not None:
        from workbench.plots.export import write_html

        files.append(write_html(draw(report), out / "serving.html"))
    if as_json:
        print_json({**summary, "files": [str(file) for file in files]})
        return
    marks = {name: report.mark for name in summary if name.startswith(("answers per", "latency", "queueing"))}
    rows = (
        (name, f"{value:.4g}{marks.get(name, '')}" if isinstance(value, float) else value)
        for name, value in summary.items()
    )
    print_table(report.heading, ("", ""), rows)
    for note in report.notes:
        print_text(note)
    for file in files:
        print_text(f"Written     {file}")
