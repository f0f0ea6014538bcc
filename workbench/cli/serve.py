"""`workbench serve`: texts over HTTP, or a stream of requests on devices that slow down, die and come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from workbench.cli.chat import DraftName
from workbench.cli.http import LOOPBACK, OF_BOTH, OF_HTTP, serve_http
from workbench.cli.job import CLUSTER, ClusterName, is_given, parse_options
from workbench.cli.output import INTERRUPTED, Json, print_json, print_table, print_text, say
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.device_faults import parse_faults
from workbench.core.errors import ConfigError
from workbench.core.files import require_writable
from workbench.core.job import Fidelity, Mode
from workbench.core.serial import to_builtins
from workbench.methods.galaxy_plus.serving.records import (
    Reaction,
    ReschedulingSettings,
    ServiceInterrupted,
    ServingEvent,
    ServingReport,
    StreamSettings,
)
from workbench.methods.option_values import read_options

_SETTINGS = ", ".join(
    f"{key}={value:g}" for key, value in to_builtins(ReschedulingSettings()).items() if key != "reaction"
)


def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="Model: an embedded name, a folder, a hub name; to simulate also such as GPT2-Large; with --http also "
            "a run's folder."
        ),
    ] = "all-MiniLM-L6-v2",
    http: Annotated[
        bool,
        typer.Option(
            "--http",
            help="Answer OpenAI's API and show a chat page, until Ctrl-C, by one process or on --cluster's devices.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="With --http: the address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --http: the port; 0: any free one.")] = 8000,
    token: Annotated[
        str,
        typer.Option(
            envvar="WORKBENCH_TOKEN", help="With --http: what clients must know; drawn if others can connect."
        ),
    ] = "",
    system: Annotated[
        Literal["galaxy_plus", "galaxy", "megatron_lm", "edgeshard", "local"],
        typer.Option(
            help="With --http on a --cluster: whose planner divides the model. Galaxy+ may choose one device."
        ),
    ] = "galaxy_plus",
    draft: DraftName = "",
    cluster: ClusterName = CLUSTER,
    requests: Annotated[int, typer.Option(help="How many.")] = 200,
    rate: Annotated[float, typer.Option(help="Requests that arrive per second (Poisson); 0: back to back.")] = 0.0,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a request.", show_default="64, or those of a picture")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of arrivals and tokens.")] = 0,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:DEVICE[:FACTOR]@FROM[-TO]", help="slow, kill or freeze a device, such as slow:beta:4@10-30s."
        ),
    ] = None,
    reaction: Annotated[Reaction, typer.Option(help="To a straggler.")] = "exclude",
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help=f"How stragglers are found and taken back; may be repeated: {_SETTINGS}."
        ),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="In virtual time, or with real tensors.")] = "execute",
    fidelity: Annotated[Fidelity, typer.Option(help="How links are emulated.")] = "auto",
    report: Annotated[Path | None, typer.Option(help="Write the serving report (JSON) here.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the figure.")] = None,
    as_json: Json = False,
) -> None:
    """Serve a stream of requests with Galaxy+, re-scheduling around stragglers and dead devices; or, with --http, texts
    for other programs and a chat page.
    """
    if http:
        idle = (name for name in context.params if name not in OF_HTTP and is_given(context, name))
        if wrong := next(idle, None):
            request = f"--{wrong.replace('_', '-')} was given with --http."
            raise ConfigError(request, "It is a setting of a stream of requests made here.", "Leave it out.")
        serve_http(
            model if is_given(context, "model") else "SmolLM2-135M",
            cluster if is_given(context, "cluster") else None,
            fidelity,
            system=system,
            draft=draft,
            host=host,
            port=port,
            token=token,
        )
        return
    if wrong := next((name for name in OF_HTTP - OF_BOTH if is_given(context, name)), None):
        raise ConfigError(f"--{wrong} was given.", "It is a setting of --http.", "Give that, too, or leave it out.")
    require_writable(report, out and out / "serving.html")
    try:
        described = load_cluster(cluster)
        served = _serve(
            model,
            described,
            mode,
            fidelity,
            stream=StreamSettings(num_requests=requests, rate_per_s=rate, seed=seed, length=length or 0),
            rescheduling=read_options("serve", ReschedulingSettings, {"reaction": reaction, **parse_options(option)}),
            faults=parse_faults(";".join(fault or ()), described, "s"),
        )
        _finish(served, report, out, as_json=as_json)
    except ServiceInterrupted as interrupted:
        from workbench.experiment import environment

        say("Interrupted.")
        _finish(replace(interrupted.report, environment=environment()), report, out, as_json=as_json)
        raise typer.Exit(INTERRUPTED) from None


def _serve(
    model: str, cluster: Cluster, mode: Mode, fidelity: Any, *, stream: StreamSettings, **settings: Any
) -> ServingReport:
    from workbench.experiment import environment
    from workbench.methods.galaxy_plus.serving.simulation import simulate_serving

    stream = replace(stream, length=_length(model, stream.length))
    if mode == "simulate":
        from workbench.methods.galaxy_plus.serving.serve import planner_of, simulated_times

        profile, lengths = _profile(model, cluster, stream.length)
        planner, times = planner_of(profile, cluster, lengths), simulated_times(profile, cluster, lengths)
        return replace(
            simulate_serving(profile, cluster, planner, times, stream=stream, **settings), environment=environment()
        )
    from workbench.methods.devices import over_ssh, require_emulated
    from workbench.methods.galaxy_plus.profiles import HostQuestion, of_devices
    from workbench.methods.galaxy_plus.serving.serve import serve as serve_stream
    from workbench.methods.galaxy_plus.serving.serve import serve_emulated

    question = HostQuestion(model=model, longest=stream.length)
    settings |= {"stream": stream, "on_event": lambda event: say(event_line(event, cluster))}
    if cluster.is_real:
        from workbench.methods.galaxy_plus.method import measure_rank

        with over_ssh(cluster) as real:
            real.bring_model(model)
            say(f"Profiling {cluster.size_words}")
            host = of_devices(real.run(measure_rank, [(question, False)] * cluster.world_size))
            report = serve_stream(model, cluster, real, host, **settings)
    else:
        require_emulated(cluster)
        report = serve_emulated(
            question, cluster, fidelity=fidelity, notify=lambda event: say(event.message), **settings
        )
    return replace(report, environment=environment())


def _length(model: str, length: int) -> int:
    """Return the tokens of a request, 0 for the usual ones.  Raises ConfigError if the model reads fewer."""
    from workbench.methods.galaxy_plus.serving.serve import DEFAULT_LENGTH, usual_length
    from workbench.models.sharding import model_layout
    from workbench.profiler.descriptions import MODELS

    if not length:
        return DEFAULT_LENGTH if model in MODELS else usual_length(model_layout(model))
    most = MODELS[model].positions if model in MODELS else model_layout(model).max_length
    if most and length > most:
        raise ConfigError(
            f"Requests of {length} tokens were asked for.", f"'{model}' knows {most} positions.", "Lower --length."
        )
    return length


def _profile(model: str, cluster: Cluster, length: int) -> tuple[Any, tuple[int, ...]]:
    """Return the profile of the catalogue's devices for a described model or a real one, and the tokens in each
    stack.
    """
    from workbench.methods.galaxy_plus.costs import analytic_inference
    from workbench.profiler.descriptions import MODELS

    if model in MODELS:
        profile = analytic_inference(model, cluster)
    else:
        from workbench.methods.galaxy_plus.profiles import analytic_profile
        from workbench.models.sharding import model_layout

        profile = analytic_profile(model, model_layout(model), cluster)
    return profile, (length, max(1, length // 2))[: len(profile.stacks)]


def event_line(event: ServingEvent, cluster: Cluster) -> str:
    """Return an event as a line of text."""
    device = f" {cluster.devices[event.rank].name}" if event.rank >= 0 else ""
    value = {
        "slowed": f" {event.value:g} times slower",
        "straggler": f" {event.value:.2f} times slower than the others",
        "probed": f" {event.value:.2f} times slower than it can be",
        "planned": f" plan {event.plan_after}, {1e3 * event.value:.0f} ms a request",
        "loaded": f" plan {event.plan_after} in {event.value:.2f} s, {event.detail}",
        "switched": f" to plan {event.plan_after}",
        "repeated": f" request {event.value:.0f}",
    }.get(event.kind, "")
    return f"{event.time_s:9.2f} s  {event.kind}{device}{value}"


def _finish(report: ServingReport, path: Path | None, out: Path | None, *, as_json: bool) -> None:
    """Write the files and print the summary."""
    summary = _summary(report)
    files = []
    if path is not None:
        files.append(report.write(path))
    if out is not None:
        from workbench.methods.galaxy_plus.serving.figures import serving
        from workbench.plots.export import write_html

        files.append(write_html(serving(report), out / "serving.html"))
    if as_json:
        print_json(summary | {"files": [str(file) for file in files]})
        return
    marks = {name: report.mark for name in summary if name.startswith(("answers per", "latency", "queueing"))}
    rows = (
        (name, f"{value:.4g}{marks.get(name, '')}" if isinstance(value, float) else value)
        for name, value in summary.items()
    )
    print_table(f"Serving {report.model} on {report.cluster.name} ({report.label})", ("", ""), rows)
    for note in report.notes:
        print_text(note)
    for file in files:
        print_text(f"Written     {file}")


def _summary(report: ServingReport) -> dict[str, Any]:
    kinds = ("straggler", "excluded", "lost", "revived", "readmitted")
    throughput = report.throughput_per_s(0.0, report.end_s)
    return {
        "numbers are": report.label,
        "requests answered": len(report.requests),
        "requests lost": report.num_lost,
        "answers wrong": report.num_wrong,
        "requests repeated": report.num_repeated,
        "answers per second": throughput,
        **{f"latency p{share:.0%} (s)".replace("%", ""): report.percentile_s(share) for share in (0.5, 0.95, 0.99)},
        **{
            f"queueing p{share:.0%} (s)".replace("%", ""): report.percentile_s(share, "queueing")
            for share in (0.5, 0.95)
        },
        "plans": len(report.plans),
        **{f"devices {kind}": len(report.events_of(kind)) for kind in kinds},  # type: ignore[arg-type]
        "plans switched to": len(report.events_of("switched")),
        "late share": report.overrun_share,
        "valid": report.valid,
    }
