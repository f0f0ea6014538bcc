"""The bodies of requests, and of answers and errors, as clients of OpenAI's API send and read them."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from workbench.core.ranges import Share
from workbench.core.serial import NOT_JSON
from workbench.models.chat_template import Message
from workbench.models.generation import Sampling, Temperature, TextSeed
from workbench.models.text import MAX_STOP_WORDS, MAX_TOKENS, TextSettings
from workbench.server.desk import Refusal

Body = TypeVar("Body")
Stop = str | Annotated[list[str], Meta(max_length=MAX_STOP_WORDS)] | None
Tokens = Annotated[int, Meta(ge=1)]
MOST_INPUTS = 64
"""Texts in one request for embeddings."""


class TextPart(msgspec.Struct, tag="text", tag_field="type"):
    """A part of a message."""

    text: str


class GivenMessage(msgspec.Struct):
    """A message; its content may come in parts."""

    role: str
    content: str | list[TextPart]

    def message(self) -> Message:
        """Return it with its parts joined."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}  # type: ignore[typeddict-item]  # the template checks the role


class StreamOptions(msgspec.Struct):
    """include_usage: whether a stream ends with the numbers of tokens."""

    include_usage: bool = False


class TextRequest(msgspec.Struct, kw_only=True):
    """The fields that requests for a chat and for a continued text share.  Unknown settings are ignored."""

    model: str = ""
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: TextSeed | None = None
    stop: Stop = None
    n: Literal[1] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def settings(self, most_tokens: int) -> TextSettings:
        """Return the settings.  Without a seed every request has another.  Raises Refusal for too many tokens."""
        max_tokens = self.max_completion_tokens or self.max_tokens or min(MAX_TOKENS, most_tokens)
        if max_tokens > most_tokens:
            raise Refusal(
                400, f"{max_tokens} tokens were asked for. This server writes up to {most_tokens} for a request."
            )
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=time.time_ns() if self.seed is None else self.seed,
        )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return TextSettings(max_tokens=max_tokens, sampling=sampling, stop=stop)


class ChatRequest(TextRequest, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[GivenMessage], Meta(min_length=1)]


class CompletionRequest(TextRequest, kw_only=True):
    """The body of /v1/completions.  prompt: a text, or its token ids."""

    prompt: str | list[int]


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/embeddings."""

    model: str = ""
    input: str | Annotated[list[str], Meta(min_length=1, max_length=MOST_INPUTS)]
    encoding_format: Literal["float", "base64"] = "float"


def decoded(body: bytes, kind: type[Body]) -> Body:
    """Return a request's body.  Raises Refusal that names its mistake."""
    try:
        return msgspec.json.decode(body, type=kind)
    except NOT_JSON as error:
        raise Refusal(400, f"The request cannot be read: {error}.") from error


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
