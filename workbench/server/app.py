"""The HTTP application: texts, embeddings and models in the convention of OpenAI's API, health, metrics, the page."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from workbench.core.errors import WorkbenchError
from workbench.methods.common.services import Panel
from workbench.models.text import Piece, TextSettings
from workbench.models.tokenizer import TextTokenizer
from workbench.server.desk import Desk, Refusal
from workbench.server.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TextRequest,
    decoded,
    error_body,
    usage,
)

PAGE = Path(__file__).with_name("page.html")
UNNAMED = "dummy"
"""The model's name in requests of huggingface_hub's client, which knows this server's address alone."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a server offers.  desk: None for a model that writes no text.  embed: texts to (n, d) float32, None without.

    name: the model's name.  draft: what guesses tokens, '' for none.  token: what clients must present, '' for none.
    hosts: names by which the server may be called.
    """

    name: str
    desk: Desk | None
    tokenizer: TextTokenizer
    panel: Panel
    embed: Callable[[Sequence[str]], tuple[np.ndarray, int]] | None = None
    draft: str = ""
    token: str = ""
    hosts: Sequence[str] = ("*",)
    body_bytes: int = 1 << 20


def application(offer: Offer) -> Starlette:
    """Return the ASGI application."""
    server = _Server(offer)

    def route(path: str, answer: Callable[[Request], Any], method: str = "GET", *, is_open: bool = False) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                if not is_open:
                    server.require_client(request)
                result: Response = await answer(request)
                return result
            except Refusal as refusal:
                headers = {"retry-after": "1"} if refusal.status in (429, 503) else None
                return JSONResponse(error_body(refusal.status, str(refusal)), refusal.status, headers)
            except WorkbenchError as error:
                return JSONResponse(error_body(400, str(error)), 400)
            except ClientDisconnect:
                return Response(status_code=499)

        return Route(path, endpoint, methods=[method])

    routes = [
        route("/v1/chat/completions", server.chat, "POST"),
        route("/v1/completions", server.complete, "POST"),
        route("/v1/embeddings", server.embeddings, "POST"),
        route("/v1/models", server.models),
        route("/health", server.health, is_open=True),
        route("/metrics", server.metrics),
        route("/state", server.state),
        route("/devices/{name}/{action}", server.act, "POST"),
        route("/", server.page, is_open=True),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(offer.hosts))
    return Starlette(routes=routes, middleware=[hosts], exception_handlers={HTTPException: _no_such_path})


async def _no_such_path(request: Request, error: Exception) -> Response:
    """Answer a request for a path, or a method of one, that this server does not have."""
    assert isinstance(error, HTTPException), "no other kind is registered"
    refused = f"{request.method} {request.url.path[:200]} was asked for."
    sentence = f"{refused} There are POST /v1/chat/completions, /v1/completions and /v1/embeddings, and GET /v1/models."
    return JSONResponse(error_body(error.status_code, sentence), error.status_code, error.headers)


class _Server:
    def __init__(self, offer: Offer) -> None:
        self._offer, self._since_s = offer, int(time.time())

    def require_client(self, request: Request) -> None:
        """Refuse clients that do not know the token.  Without a token, refuse requests that pages of other sites send
        from a browser here.
        """
        token, origin = self._offer.token, request.headers.get("origin", "")
        sent_token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and not hmac.compare_digest(sent_token.encode(), token.encode()):
            raise Refusal(401, "A token is needed: the header 'Authorization: Bearer TOKEN'.")
        if not token and origin and urlsplit(origin).netloc != request.headers.get("host"):
            raise Refusal(403, f"A page of '{origin[:200]}' sent this. Programs and this server's own page may.")

    async def _body(self, request: Request) -> bytes:
        most, body = self._offer.body_bytes, b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise Refusal(413, f"The request is larger than {most} bytes. Send less.")
        return body

    def _desk(self) -> Desk:
        if self._offer.desk is None:
            raise Refusal(400, f"'{self._offer.name}' writes no text. Ask it for embeddings.")
        return self._offer.desk

    async def chat(self, request: Request) -> Response:
        text_request = decoded(await self._body(request), ChatRequest)
        desk = self._desk()
        ids = self._offer.tokenizer.chat([message.message() for message in text_request.messages])
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion"}

        def choice(text: str, *, is_first: bool = False) -> dict[str, Any]:
            role = {"role": "assistant"} if is_first else {}
            return {"delta": role | ({"content": text} if text or is_first else {})}

        def completion(text: str) -> dict[str, Any]:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}

        return await self._answer(request, text_request, desk, ids, head, choice, completion)

    async def complete(self, request: Request) -> Response:
        text_request = decoded(await self._body(request), CompletionRequest)
        desk, prompt = self._desk(), text_request.prompt
        ids = self._offer.tokenizer.prompt(prompt) if isinstance(prompt, str) else prompt
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}

        def choice(text: str, *, is_first: bool = False) -> dict[str, Any]:
            return {"text": text}

        return await self._answer(request, text_request, desk, ids, head, choice, choice)

    async def _answer(
        self,
        request: Request,
        text_request: TextRequest,
        desk: Desk,
        ids: Sequence[int],
        head: dict[str, Any],
        choice: Callable[..., dict[str, Any]],
        finished: Callable[[str], dict[str, Any]],
    ) -> Response:
        self._require_model(text_request.model)
        settings: TextSettings = text_request.settings(desk.limits.tokens)
        head |= {"created": int(time.time()), "model": self._offer.name}
        pieces = desk.ask(ids, settings)
        if text_request.stream:
            with_usage = text_request.stream_options is not None and text_request.stream_options.include_usage
            if head["object"] == "chat.completion":
                head["object"] = "chat.completion.chunk"
            stream = _stream(pieces, head, choice, len(ids), with_usage=with_usage)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})
        text, tokens, finish = "", 0, ""
        async with contextlib.aclosing(pieces) as arriving:  # type: ignore[type-var]
            async for piece in arriving:
                text, tokens, finish = text + piece.text, tokens + piece.tokens, piece.finish
                if await request.is_disconnected():
                    break
        choices = [{"index": 0, "finish_reason": finish, "logprobs": None} | finished(text)]
        return JSONResponse(head | {"choices": choices, "usage": usage(len(ids), tokens)})

    def _require_model(self, name: str) -> None:
        if name not in ("", UNNAMED, self._offer.name):
            raise Refusal(404, f"The model '{name[:200]}' was asked for. This server has '{self._offer.name}'.")

    async def embeddings(self, request: Request) -> Response:
        embedding_request = decoded(await self._body(request), EmbeddingRequest)
        self._require_model(embedding_request.model)
        if self._offer.embed is None:
            raise Refusal(400, f"'{self._offer.name}' gives no embeddings. Serve an encoder, such as all-MiniLM-L6-v2.")
        texts = [embedding_request.input] if isinstance(embedding_request.input, str) else embedding_request.input
        vectors, tokens = await run_in_threadpool(self._offer.embed, texts)

        def shown(vector: np.ndarray) -> Any:
            if embedding_request.encoding_format == "base64":
                return base64.b64encode(vector.astype("<f4").tobytes()).decode()
            return vector.tolist()

        data = [
            {"object": "embedding", "index": index, "embedding": shown(vector)} for index, vector in enumerate(vectors)
        ]
        numbers = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": self._offer.name, "usage": numbers})

    async def models(self, request: Request) -> Response:
        model = {"id": self._offer.name, "object": "model", "created": self._since_s, "owned_by": "workbench"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        desk = self._offer.desk
        text = "" if desk is None else desk.metrics.text(desk.waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def state(self, request: Request) -> Response:
        desk = self._offer.desk
        now: dict[str, Any] = (
            {} if desk is None else {"waiting": desk.waiting, "tokens_per_s": desk.metrics.tokens_per_s}
        )
        if desk is not None and (passes := desk.metrics.passes) is not None:
            now["draft"] = {
                "name": self._offer.draft,
                "tokens_per_pass": passes.mean if passes.count else None,
                "accepted_share": passes.acceptance,
            }
        return JSONResponse({"model": self._offer.name, "writes": desk is not None} | now | self._offer.panel.state())

    async def act(self, request: Request) -> Response:
        if request.headers.get("x-workbench") != "page":  # no other page can send this header
            raise Refusal(403, "Only the server's own page changes devices.")
        self._offer.panel.act(request.path_params["name"], request.path_params["action"])
        return JSONResponse({"status": "ok"})

    async def page(self, request: Request) -> Response:
        inline = "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
        policy = f"default-src 'none'; {inline}; connect-src 'self'; img-src data:; frame-ancestors 'none'"
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": policy})


async def _stream(
    pieces: AsyncIterator[Piece],
    head: dict[str, Any],
    choice: Callable[..., dict[str, Any]],
    prompt_tokens: int,
    *,
    with_usage: bool,
) -> AsyncIterator[str]:
    """Yield a text as server-sent events; a failure on the way is the last event."""
    tokens, is_first = 0, True

    def event(finish: str | None, text: str) -> str:
        body = head | {"choices": [{"index": 0, "finish_reason": finish} | choice(text, is_first=is_first)]}
        return f"data: {json.dumps(body | ({'usage': None} if with_usage else {}), ensure_ascii=False)}\n\n"

    try:
        async with contextlib.aclosing(pieces) as arriving:  # type: ignore[type-var]
            async for piece in arriving:
                tokens += piece.tokens
                if piece.text or is_first:
                    yield event(None, piece.text)
                    is_first = False
                if piece.finish:
                    yield event(piece.finish, "")
        if with_usage:
            yield f"data: {json.dumps(head | {'choices': [], 'usage': usage(prompt_tokens, tokens)})}\n\n"
    except Refusal as refusal:
        yield f"data: {json.dumps(error_body(refusal.status, str(refusal)))}\n\n"
    yield "data: [DONE]\n\n"
