"""`workbench export` and `workbench train`: a model for other programs, or as an ExecuTorch program that trains itself,
here or on a small device.
"""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from workbench.cli.job import DEFAULTS, Columns, Data, MaxLength, Model, Samples, Seed, TaskName, is_given
from workbench.cli.output import Json, print_json, print_text, say
from workbench.core.errors import ConfigError
from workbench.core.files import require_writable, whole_file
from workbench.core.job import ADAPTER_RATE
from workbench.core.serial import to_json
from workbench.core.units import size_words

if TYPE_CHECKING:
    from workbench.tasks.prompts import EncodedPrompts

REPORTED_STEPS = 20


def export(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="The program to write, such as smollm2.pte; with --merge a folder.")],
    model: Model = "SmolLM2-135M",
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Write a whole model instead: --model is a run's folder, whose LoRA is added to the weights, or a "
            "model. OUT is a folder for transformers, or a .gguf file for llama.cpp.",
        ),
    ] = False,
    dtype: Annotated[
        Literal["float32", "float16"],
        typer.Option(help="Number format of a .gguf file's matrices.", show_default="float16"),
    ] = "float16",
    queries: Annotated[int, typer.Option(help="q, random directions per step.")] = 4,
    batch_size: Annotated[int, typer.Option(help="E, prompts per step.")] = 4,
    max_length: MaxLength = 64,
    targets: Annotated[int, typer.Option(help="Label tokens per prompt.")] = 1,
    epsilon: Annotated[float, typer.Option(help="Scale of the perturbation.")] = 1e-2,
    loss: Annotated[
        Literal["vocabulary", "label_words"],
        typer.Option(help="Cross-entropy over the whole vocabulary, or over the label words only."),
    ] = "vocabulary",
    rank: Annotated[int, typer.Option(help="Rank of LoRA-FA.")] = 16,
    alpha: Annotated[float, typer.Option(help="Alpha of LoRA-FA.")] = 32.0,
    backend: Annotated[str, typer.Option(help="Kernels: xnnpack or portable.")] = "xnnpack",
    estimator: Annotated[
        str, typer.Option(help="How the gradient is estimated: two_point, one_sided (FZOO) or low_rank (LOZO).")
    ] = "two_point",
    noise: Annotated[
        str, typer.Option(help="Source of the noise. input: the host, from seeds; drawn: the program.")
    ] = "input",
    prompts: Annotated[
        Path | None, typer.Option(help="Also write a task's tokenized training prompts to this file.")
    ] = None,
    task: TaskName = DEFAULTS.task,
    train_samples: Samples = 1000,
    data: Data = None,
    columns: Columns = "",
    seed: Seed = DEFAULTS.seed,
    as_json: Json = False,
) -> None:
    """Export a model with LoRA-FA as an ExecuTorch program that trains; with --merge: export a whole model for other
    programs.
    """
    if merge:
        _export_merged(context, model, out, dtype, as_json=as_json)
        return
    from workbench.methods.p_rge.inference_engine import EngineConfig, export_program, require_executorch

    require_executorch()
    require_writable(out, prompts)
    config: Any = EngineConfig(
        queries=queries,
        batch_size=batch_size,
        sequence_length=max_length,
        num_targets=targets,
        epsilon=epsilon,
        backend=backend,  # type: ignore[arg-type]
        noise=noise,  # type: ignore[arg-type]
        estimator=estimator,  # type: ignore[arg-type]
    )
    from workbench.methods.p_rge.zeroth_order import TrainableConfig, load_causal_model
    from workbench.models.configuration import model_facts, require_known

    require_known(model)
    if max_length > (longest := model_facts(model).max_length):
        raise ConfigError(
            f"A program for prompts of {max_length} tokens was asked for.",
            f"'{model}' reads {longest}.",
            "Lower --max-length.",
        )
    if prompts is not None or loss == "label_words":
        say(f"Tokenizing the prompts of {task}")
        encoded = _tokenized(model, task, data, columns, train_samples, config.sequence_length, config.num_targets)
        if loss == "label_words":
            config = replace(config, choices=encoded.among_label_words().choices)
        if prompts is not None:
            _write_prompts(prompts, encoded, config.sequence_length)
    loaded = load_causal_model(model, TrainableConfig(rank=rank, alpha=alpha, seed=seed))
    say(f"Exporting {model}")
    result = export_program(loaded, out, config, name=model)
    if as_json:
        print_json(result)
        return
    print_text(f"Program     {result.path}, {size_words(result.file_bytes)}, exported in {result.export_s:.0f} s")
    print_text(
        f"Trains      {result.description.num_values:,} values in {len(result.description.slots)} matrices, q = "
        f"{queries}, E = {batch_size}"
    )
    print_text(
        f"Step        {result.delegated} pieces for XNNPACK, {sum(result.operators.values())} calls of "
        "ExecuTorch's own kernels"
    )
    if prompts is not None:
        words = shlex.join([str(out), str(prompts)])
        print_text(f"Prompts     {prompts}  (train: workbench train {words} --steps 100)")


_OF_MERGED = {"out", "model", "merge", "dtype", "as_json"}


def _export_merged(context: typer.Context, model: str, out: Path, dtype: Any, *, as_json: bool) -> None:
    option_names = (name for name in context.params if name not in _OF_MERGED)
    if idle := next((name for name in option_names if is_given(context, name)), None):
        raise ConfigError(
            f"--{idle.replace('_', '-')} was given with --merge.",
            "It is a setting of a program that trains itself.",
            "Leave it out.",
        )
    from workbench.methods.common.merged import GGUF, export_merged

    if out.suffix != GGUF and is_given(context, "dtype"):
        raise ConfigError("--dtype was given.", "A folder has its base model's dtype.", "Leave it out.")
    say(f"Merging {model}")
    written = export_merged(model, out, dtype)
    if as_json:
        print_json(written._asdict())
        return
    print_text(f"Model       {written.path}, {written.parameters:,} parameters, {size_words(written.file_bytes)}")
    if written.note:
        print_text(written.note)


def train(
    program: Annotated[Path, typer.Argument(help="A .pte that `workbench export` wrote.")],
    prompts: Annotated[Path, typer.Argument(help="Its prompts, from `workbench export --prompts`.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps, including those of a resumed log.")] = 100,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = ADAPTER_RATE,
    seed: Seed = DEFAULTS.seed,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of XNNPACK.", show_default="its own choice")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Write every step's seeds and scalars to this file. If it has some, continue from them."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the trained B here (safetensors).")] = None,
    as_json: Json = False,
) -> None:
    """Train in ExecuTorch's runtime, without PyTorch's arithmetic; the same command with its --log continues an
    interrupted training.
    """
    from workbench.methods.p_rge.inference_engine import EngineTrainer
    from workbench.methods.p_rge.inference_engine.config import EnginePrompts

    require_writable(log, out)
    rows = EnginePrompts.read(prompts)
    trainer = EngineTrainer(program, seed=seed, threads=threads)
    losses = _train(trainer, rows, steps, learning_rate, seed, log)
    if out is not None:
        from safetensors.numpy import save_file

        from workbench.methods.p_rge.zeroth_order import metadata_of
        from workbench.models.saving import TrainedDescription

        description = TrainedDescription(config=trainer.description.trainable, model=trainer.description.model)
        with whole_file(out) as part:
            save_file(trainer.named(), part, metadata=metadata_of(description))
    if as_json:
        print_json({"steps": trainer.step_number, "losses": losses})
    elif losses:
        first, last = losses[:REPORTED_STEPS], losses[-REPORTED_STEPS:]
        print_text(f"Steps       {trainer.step_number}, {len(losses)} of them now")
        print_text(
            f"Loss        {sum(first) / len(first):.4f} at first, {sum(last) / len(last):.4f} at last (means of "
            f"{len(last)} steps)"
        )
    else:
        print_text(f"Steps       {trainer.step_number}, all of them made before")


def _train(trainer: Any, rows: Any, steps: int, learning_rate: float, seed: int, path: Path | None) -> list[float]:
    from workbench.methods.p_rge.zeroth_order import LogFile
    from workbench.tasks.prompts import step_indices

    header = {
        "noise": "philox",
        "seed": seed,
        "learning_rate": learning_rate,
        "program": to_json(trainer.description, indent=-1),
    }
    log = None if path is None else LogFile(path, header)
    losses = []
    if log is not None and log.steps:
        trainer.resume(log.steps[:steps])
        say(f"Going on behind step {trainer.step_number}")
    while trainer.step_number < steps:
        number = trainer.step_number
        outcome = trainer.step(
            rows.rows(step_indices(len(rows), trainer.config.batch_size, seed, number)), learning_rate
        )
        losses.append(outcome.loss)
        if log is not None:
            if outcome.log is None:
                raise ConfigError(
                    f"A log '{path}' was asked for.",
                    "The program draws noise that no log holds.",
                    "Export with --noise input.",
                )
            log.append(outcome.log)
        if (number + 1) % REPORTED_STEPS == 0:
            say(
                f"step {number + 1} of {steps}: loss "
                f"{sum(losses[-REPORTED_STEPS:]) / len(losses[-REPORTED_STEPS:]):.4f}"
            )
    return losses


def _tokenized(
    model: str, task: str, data: str | None, columns: str, samples: int | None, length: int, targets: int
) -> EncodedPrompts:
    from workbench.methods.common.result import model_encoder
    from workbench.tasks import load_task

    prompt_task = load_task(task, data=data, columns=columns, prompted=True, train_samples=samples)
    encoded = model_encoder(prompt_task.template, model, length).split(prompt_task.train.prompts)
    if encoded.max_targets > targets:
        raise ConfigError(
            f"A program with {targets} label tokens was asked for.",
            f"Prompts of {task} have up to {encoded.max_targets}.",
            f"Give --targets {encoded.max_targets}.",
        )
    return encoded


def _write_prompts(path: Path, encoded: EncodedPrompts, length: int) -> None:
    from workbench.methods.p_rge.inference_engine.config import EnginePrompts
    from workbench.tasks.prompts import collate_prompts

    batch = collate_prompts(encoded, range(len(encoded)), length=length)
    EnginePrompts(**{field.name: getattr(batch, field.name).numpy() for field in fields(EnginePrompts)}).write(path)
