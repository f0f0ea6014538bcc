"""Find a job's model and data: each sample of the test split is one request with one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.timeline import MemorySample, Span
from workbench.methods.galaxy_plus.options import METHOD, InferenceOptions
from workbench.methods.option_values import read_options
from workbench.methods.training.prepare import require_task_and_model
from workbench.models.configuration import ModelFacts, model_facts
from workbench.models.families import family_of, generating_families
from workbench.models.generation import GenerationRules
from workbench.models.loading import load_model, load_stack, load_tokenizer
from workbench.models.sharding import LayoutFacts, ModelLayout, What, layout_facts
from workbench.models.text import CachedModel, LocalWriter
from workbench.models.tokenizer import LEAST_TOKENS
from workbench.tasks import load_task
from workbench.tasks.task import Task
from workbench.tasks.tokenize import TokenizedSplit, collate, tokenize

TOLERANCE = 1e-4
"""Relative tolerance: an answer is correct if its largest deviation from the local model's is below this fraction of
the largest value."""


def local_hidden(name: str, requests: Sequence[Request]) -> list[Tensor]:
    """Return the final hidden states (1, t, d) of each request; for an encoder-decoder the decoder's (1, s, d)."""
    stack = load_stack(name)
    with torch.inference_mode():
        hidden_states = []
        for request in requests:
            assert request.ids is not None
            mask = torch.ones(request.ids.shape[:2], dtype=torch.int64)
            hidden_states.append(stack(request.ids, mask, request.decoder_ids)[0])
    return hidden_states


def is_right(output: Any, expected: Tensor) -> bool:
    """Return whether an answer (an array) equals the local model's within float tolerance."""
    reference = expected.numpy()
    return output.shape == reference.shape and bool(
        np.abs(output - reference).max() <= TOLERANCE * np.abs(reference).max()
    )


def local_texts(name: str, requests: list[Request], num_tokens: int) -> list[Tensor]:
    """Return the most likely next tokens of each request, up to an end of the text."""
    writer = LocalWriter(name, CachedModel(load_model(name)))
    texts = []
    for request in requests:
        assert request.ids is not None
        start_ids = [] if request.decoder_ids is None else request.decoder_ids[0].tolist()
        texts.append(torch.tensor(list(writer.write(request.ids[0].tolist(), num_tokens, start_ids=start_ids))))
    return texts


class Request(NamedTuple):
    """One sequence.

    length, decoder_length: tokens of each stack, known to every device.

    ids: (1, t) token ids or (1, t, values) patches of a picture; decoder_ids: (1, s): only the plan's first device
    reads them.
    what: whether to return final hidden states or logits.
    """

    length: int
    ids: Tensor | None = None
    decoder_length: int = 0
    decoder_ids: Tensor | None = None
    what: What = "hidden"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of each stack."""
        return (self.length, self.decoder_length) if self.decoder_length else (self.length,)


class Answer(NamedTuple):
    """A device's work on a request, in seconds of the device's monotonic clock.

    output: only on the plan's first device.  memory: bytes of the values alive, and of the cached keys and values.

    start_s, end_s: begin and end of the device's computation (equal on a device that computed nothing).
    """

    output: Tensor | None
    start_s: float
    end_s: float
    spans: tuple[Span, ...] = ()
    memory: tuple[MemorySample, ...] = ()

    @property
    def busy_s(self) -> float:
        """Return the seconds during which this device computed."""
        return sum(span.end_s - span.start_s for span in self.spans if not span.op.is_communication)


def check_request(request: Request, layout: ModelLayout) -> None:
    """Raise ConfigError for a request that the model cannot read, on every device alike, so that no device waits for
    another.
    """
    request_text, text, targets = (
        f"A request of {request.length} tokens was given to '{layout.name}'.",
        request.length,
        request.decoder_length,
    )
    if text < 1 or targets < 0:
        raise ConfigError(request_text, "There is nothing to compute.", "Give at least one token.")
    if layout.has_decoder != bool(targets):
        problem = (
            "Its decoder is given none."
            if layout.has_decoder
            else f"It has no decoder, but is given {targets} tokens for one."
        )
        raise ConfigError(
            request_text, problem, "Give decoder_length and decoder_ids to an encoder-decoder, and to no other model."
        )
    if layout.family.reads_images:
        tokens, values = shape_of_picture(layout)
        if text != tokens or (request.ids is not None and tuple(request.ids.shape) != (1, tokens, values)):
            side = layout.config.image_size
            given_shape = "" if request.ids is None else f", given as {tuple(request.ids.shape)}"
            problem = f"Its pictures are {side} x {side} pixels: {tokens} tokens of {values} values{given_shape}."
            raise ConfigError(request_text, problem, "Scale the picture, as the model's tokenizer does.")
        return
    if layout.max_length and max(text, targets) > layout.max_length:
        raise ConfigError(request_text, f"The model knows {layout.max_length} positions.", "Shorten the text.")
    for ids, length in ((request.ids, text), (request.decoder_ids, targets)):
        if ids is not None and tuple(ids.shape) != (1, length):
            raise ConfigError(
                request_text, f"Its numbers have the shape {tuple(ids.shape)}.", f"Give one sequence: (1, {length})."
            )


def shape_of_picture(layout: ModelLayout) -> tuple[int, int]:
    """Return a picture's tokens, including the class token, and the values of each."""
    config = layout.config
    grid = config.image_size // config.patch_size
    return grid * grid + 1, config.num_channels * config.patch_size**2


RANDOM_REQUESTS = 16


def random_requests(layout: ModelLayout, length: int, *, seed: int = 0) -> tuple[Request, ...]:
    """Return sequences of random tokens, all of one length (for an encoder-decoder, half as many go to the decoder), or
    random pictures.

    Raises ConfigError for a length that the model cannot read; a picture's is fixed.
    """
    request = f"Requests of {length} tokens to '{layout.config.model_type}' were asked for."
    draws = torch.Generator().manual_seed(seed)
    if layout.family.reads_images:
        tokens_of_picture, values = shape_of_picture(layout)
        if length != tokens_of_picture:
            raise ConfigError(request, f"Its pictures have {tokens_of_picture}.", "Choose this length.")
        shape = (1, length, values)
        return tuple(
            Request(length, torch.randint(256, shape, generator=draws, dtype=torch.uint8))
            for _ in range(RANDOM_REQUESTS)
        )
    if length < 1 or (layout.max_length and length > layout.max_length):
        most = f"1 to {layout.max_length}" if layout.max_length else "one at least"
        raise ConfigError(request, f"It reads {most}.", "Choose such a length.")
    decoder_length = max(1, length // 2) if layout.has_decoder else 0

    def tokens(number: int) -> Tensor:
        return torch.randint(0, int(layout.config.vocab_size), (1, number), generator=draws)

    return tuple(
        Request(length, tokens(length), decoder_length, tokens(decoder_length) if decoder_length else None)
        for _ in range(RANDOM_REQUESTS)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job with all data that is known before planning: task, tokens, the model's shape."""

    job: Job
    options: InferenceOptions
    task: Task
    test: TokenizedSplit
    facts: ModelFacts
    layout: LayoutFacts

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Return no notes."""
        return ()

    @property
    def num_requests(self) -> int:
        """Return the requests that are measured."""
        return len(self.test)

    @property
    def decoder_length(self) -> int | None:
        """Return the tokens that the decoder reads in addition to the encoder's, None without a decoder."""
        return 1 if self.layout.has_decoder else None

    @property
    def typical_length(self) -> int:
        """Return the mean number of tokens, for planning."""
        return max(1, round(sum(self.test.lengths) / len(self.test)))

    @property
    def longest(self) -> int:
        """Return the tokens for which a device needs memory: the longest request's, and the new ones."""
        grows = 0 if self.layout.has_decoder else self.options.generate
        return max(self.test.lengths) + grows

    def lengths(self, number: int) -> tuple[int, ...]:
        """Return a request's tokens in each stack."""
        length = self.test.lengths[number]
        return (length,) if self.decoder_length is None else (length, self.decoder_length)

    def request(self, number: int) -> Request:
        """Return a request in the form that the first device receives."""
        return request_of(self.test, number)


def request_of(split: TokenizedSplit, number: int) -> Request:
    """Return a sample as a request, without padding, because it is processed alone."""
    batch = collate(split, (number,), length=split.lengths[number])
    if split.start_id is None:
        return Request(length=split.lengths[number], ids=batch.input_ids)
    return Request(
        length=split.lengths[number],
        ids=batch.input_ids,
        decoder_length=1,
        decoder_ids=torch.full((1, 1), split.start_id),
    )


def require_known(job: Job) -> InferenceOptions:
    """Return the options.  Raises ConfigError at once for an unknown option, task or model."""
    options = read_options(METHOD, InferenceOptions, job.options)
    require_task_and_model(job)
    return options


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task's test split and read the model's shape.

    Raises ConfigError or MissingDataError; ConfigError for a family that cannot be split, and for text from a model
    that cannot generate any.
    """
    options = read_options(METHOD, InferenceOptions, job.options)
    facts = model_facts(job.model)
    layout = layout_facts(job.model)
    _check_options(job, options, facts)
    task = load_task(job.task, data=job.data, columns=job.columns).limited(None, None, job.test_samples)
    room = facts.max_length - (0 if layout.has_decoder else options.generate)
    if options.generate and room < LEAST_TOKENS:
        raise ConfigError(
            f"{options.generate} new tokens of '{job.model}' were asked for.",
            f"It knows {facts.max_length} positions, and a prompt takes at least {LEAST_TOKENS} of them.",
            f"Ask for {facts.max_length - LEAST_TOKENS} at most.",
        )
    test = tokenize(task.test, load_tokenizer(job.model), max_length=min(job.max_length, room))
    if options.generate and (start_id := GenerationRules(job.model).start_id) is not None and layout.has_decoder:
        test = replace(test, start_id=start_id)
    return PreparedJob(job=job, options=options, task=task, test=test, facts=facts, layout=layout)


def _check_options(job: Job, options: InferenceOptions, facts: ModelFacts) -> None:
    def refuse(option: Any, problem: str, todo: str) -> ConfigError:
        return ConfigError(f"The option {option} of {METHOD} was asked for.", problem, todo)

    if options.generate:
        if not family_of(facts.family).generates:
            raise refuse(
                f"generate = {options.generate}",
                f"'{job.model}' has no language model head.",
                f"Choose one of {generating_families()}.",
            )
        if options.system == "sequence_parallel":
            raise refuse(
                f"generate = {options.generate}",
                "Sequence parallelism cannot divide a single token.",
                "Choose another system.",
            )
