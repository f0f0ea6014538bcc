"""Choose the next token of a text as transformers' `generate` does, with the generation settings in a model's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta
from torch import Tensor

from workbench.core.errors import ConfigError, require_numbers
from workbench.core.ranges import Share, require_ranges
from workbench.models.configuration import is_tiny, local_folder, model_config
from workbench.models.hub import has_weights, loaded, locate
from workbench.models.initialization import seeded_generator

LEAST_TEMPERATURE = 1e-5
"""Below it the most likely token is taken: logits divided by less would be infinite."""

_OTHER = {
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1, 1.0),
    "sequence_bias": (None,),
    "stop_strings": (None,),
    "watermarking_config": (None,),
}
"""Settings that also change a greedy text and are refused, each with its values that change nothing."""


Temperature = Annotated[float, Meta(ge=0, le=100)]
TextSeed = Annotated[int, Meta(ge=-(2**62), le=2**62)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen among the likely ones.

    temperature: divides the logits; 0 takes the most likely token.  top_p: only the likeliest tokens whose
    probabilities add up to this share.  seed: the same seed writes the same text; each token has its own random number,
    so a text that is continued elsewhere stays the same.
    """

    temperature: Temperature = 0.0
    top_p: Share = 1.0
    seed: TextSeed = 0

    def __post_init__(self) -> None:
        require_ranges(self, "Sampling")

    def choose(self, logits: Tensor, number: int) -> int:
        """Return a token for logits (1, vocabulary).  number: how many tokens of the text were chosen before."""
        if self.temperature < LEAST_TEMPERATURE:
            return int(require_numbers(logits, "Tokens").argmax(-1))
        from transformers.generation.logits_process import TopPLogitsWarper

        scores = require_numbers(logits, "Tokens").float() / self.temperature
        if self.top_p < 1:
            scores = TopPLogitsWarper(self.top_p)(None, scores)
        generator = seeded_generator(self.seed, f"token {number}")
        return int(scores.softmax(-1).multinomial(1, generator=generator))


def generation_config(name: str) -> Any:
    """Return a model's transformers.GenerationConfig: its generation_config.json, or else the generation settings in
    its config.json.
    """
    from transformers import GenerationConfig

    folder = local_folder(name)
    has_own = has_weights(name) and not is_tiny(name)
    if not has_own or (folder is not None and not (folder / "generation_config.json").is_file()):
        return GenerationConfig.from_model_config(model_config(name))
    place = locate(name) if folder is None else folder
    return loaded(name, lambda local_only: GenerationConfig.from_pretrained(place, local_files_only=local_only))


class GenerationRules:
    """What a model's generation settings say about a text that is not sampled: forbidden and forced tokens, its ends.

    Raises ConfigError for a setting that changes a greedy text and is not supported, or that names a token that the
    model does not have.
    """

    def __init__(self, name: str) -> None:
        self._config = config = generation_config(name)
        request = f"A text of '{name}' was asked for."
        for setting, harmless in _OTHER.items():
            if getattr(config, setting, None) not in harmless:
                raise ConfigError(
                    request,
                    f"Its generation settings have {setting} = {getattr(config, setting)!r}, which is not supported.",
                    "Remove it from the model's generation_config.json.",
                )
        ends = config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends or ())
        forced = (
            config.forced_bos_token_id,
            config.forced_eos_token_id,
            config.suppress_tokens,
            config.begin_suppress_tokens,
        )
        vocabulary = int(model_config(name).get_text_config().vocab_size)
        for token in (
            token for entry in forced if entry is not None for token in (entry if isinstance(entry, list) else [entry])
        ):
            if not 0 <= token < vocabulary:
                raise ConfigError(
                    request,
                    f"Its generation settings name the token {token}; it has {vocabulary}.",
                    "Correct its generation_config.json.",
                )

    @property
    def start_id(self) -> int | None:
        """Return the token that a decoder reads first, None if the settings do not say."""
        token_id: int | None = self._config.decoder_start_token_id
        return token_id

    def rules(self, prompt_length: int, num_tokens: int) -> Any:
        """Return a function (ids (1, t), logits (1, vocabulary)) -> logits that applies the settings to one text.

        prompt_length: tokens of the text, or those that a decoder reads first.  num_tokens: number of new tokens.
        """
        from transformers.generation import logits_process as rules

        config, ends = self._config, self.ends
        processors = rules.LogitsProcessorList()  # those of `generate`, in its order (transformers' GenerationMixin)
        if config.repetition_penalty not in (None, 1.0):
            processors.append(rules.RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if config.no_repeat_ngram_size:
            processors.append(rules.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if config.bad_words_ids is not None:
            processors.append(rules.NoBadWordsLogitsProcessor(config.bad_words_ids, ends or None))
        least = config.min_length if config.min_new_tokens is None else prompt_length + config.min_new_tokens
        if least and ends:
            processors.append(rules.MinLengthLogitsProcessor(least, ends))
        if config.forced_bos_token_id is not None:
            processors.append(rules.ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
        if config.forced_eos_token_id is not None:
            last = prompt_length + num_tokens
            processors.append(rules.ForcedEOSTokenLogitsProcessor(last, config.forced_eos_token_id))
        if config.suppress_tokens is not None:
            processors.append(rules.SuppressTokensLogitsProcessor(config.suppress_tokens))
        if config.begin_suppress_tokens is not None:
            is_after_forced = prompt_length == 1 and config.forced_bos_token_id is not None
            begin = prompt_length + is_after_forced
            processors.append(rules.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin))
        return processors

    def until_end(self, tokens: list[int]) -> list[int]:
        """Return new tokens up to the first that ends a text; `generate` does not go beyond it."""
        ends = (number for number, token in enumerate(tokens, start=1) if token in self.ends)
        return tokens[: next(ends, len(tokens))]
