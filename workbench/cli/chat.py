"""`workbench chat` and `workbench generate`: talk to a model or a run's result, or let it continue a text."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.output import Json, print_json, print_piece, print_text, say
from workbench.core.errors import ConfigError
from workbench.core.serial import text_lines

if TYPE_CHECKING:
    from workbench.methods.common.text_model import TextModel
    from workbench.models.text import Piece, TextSettings

TextModelName = Annotated[
    str, typer.Argument(help="A run's folder, or a model: an embedded name, a folder, or a hub name.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")]
Temperature = Annotated[float, typer.Option(min=0, help="Sampling temperature. 0: always the most likely token.")]
TopP = Annotated[
    float, typer.Option(help="Sample only from the most likely tokens that together have this probability.")
]
TextSeed = Annotated[int, typer.Option(help="Random seed. The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this word; may be repeated.")]
DraftName = Annotated[
    str,
    typer.Option(
        metavar="layers:N|int4|MODEL",
        help="Speculative decoding: a draft guesses tokens, and the model checks them together. The draft is the "
        "model's first layers, the model in 4 bits, or a smaller model with the same tokenizer. The text stays the "
        "same.",
    ),
]


def chat(
    model: TextModelName,
    message: Annotated[
        str | None, typer.Argument(help="One message to answer. Without it you type a conversation.")
    ] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: TextSeed = 0,
    stop: Stop = None,
    draft: DraftName = "",
    as_json: Json = False,
) -> None:
    """Talk to a model, or to a run's trained model, in the model's own chat template."""
    settings = _settings(max_tokens, temperature, top_p, seed, stop)
    if as_json and message is None:
        raise ConfigError(
            "A conversation as JSON was asked for.", "It has no message.", "Give one, or leave out --json."
        )
    from workbench.methods.common.text_model import load_text_model

    loaded = load_text_model(model, draft)
    conversation: Any = [{"role": "system", "content": system}] if system else []
    if message is not None:
        conversation.append({"role": "user", "content": message})
        _show(loaded, loaded.chat(conversation, settings), as_json=as_json)
        return
    say("Write a message and press Enter. An empty line ends the conversation.")
    for line in _lines():
        conversation.append({"role": "user", "content": line})
        answer = _show(loaded, loaded.chat(conversation, settings), as_json=False)
        conversation.append({"role": "assistant", "content": answer})


def generate(
    model: TextModelName,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: TextSeed = 0,
    stop: Stop = None,
    draft: DraftName = "",
    as_json: Json = False,
) -> None:
    """Let a model, or a run's trained model, continue a text as it is, without a chat template."""
    settings = _settings(max_tokens, temperature, top_p, seed, stop)
    from workbench.methods.common.text_model import load_text_model

    loaded = load_text_model(model, draft)
    _show(loaded, loaded.complete(prompt, settings), as_json=as_json)


def _settings(max_tokens: int, temperature: float, top_p: float, seed: int, stop: list[str] | None) -> TextSettings:
    from workbench.models.generation import Sampling
    from workbench.models.text import TextSettings

    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    return TextSettings(max_tokens=max_tokens, sampling=sampling, stop=tuple(stop or ()))


def _lines() -> Iterator[str]:
    """Yield the lines that a user types, up to an empty one."""
    while True:
        if sys.stdin.isatty():
            print_piece("> ")
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield text_lines(line)[0].strip()


def _show(model: TextModel, pieces: Iterator[Piece], *, as_json: bool) -> str:
    """Print a text piece by piece, and return it."""
    begin, text, tokens, finish = time.monotonic(), "", 0, ""
    for piece in pieces:
        text, tokens, finish = text + piece.text, tokens + piece.tokens, piece.finish
        if not as_json:
            print_piece(piece.text)
    seconds = time.monotonic() - begin
    if as_json:
        drafted = (
            {}
            if model.passes is None
            else {
                "tokens_per_pass": model.passes.mean,
                "accepted_share": model.passes.acceptance,
            }
        )
        print_json({"text": text, "tokens": tokens, "finish": finish, "seconds": seconds, **drafted})
    else:
        print_text()
        passes = "" if model.passes is None else f", {model.passes.told}"
        say(f"({tokens} tokens, {tokens / max(seconds, 1e-9):.1f} a second{passes})")
    return text
