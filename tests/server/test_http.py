"""Texts over HTTP: official clients read them, they equal one process's, and what is too much is refused in words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import torch
import uvicorn
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError as InferenceError

from tests.waiting import LIMIT_S, wait_for
from workbench.core import methods
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.methods import Declaration
from workbench.methods.common.services import TextDevices
from workbench.methods.common.text_model import TextModel, load_text_model
from workbench.models.generation import Sampling
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.text import TextSettings
from workbench.server.app import application
from workbench.server.desk import Desk, Limits, Metrics, _Ticket
from workbench.server.offers import Offer, OneProcess, offered
from workbench.server.run import listening

MODEL = "tiny-llama-2"
TALK: Any = [{"role": "user", "content": "hello"}]
get, post = partial(httpx.get, timeout=LIMIT_S), partial(httpx.post, timeout=LIMIT_S)
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "max_tokens": 6}


@contextmanager
def serving(offer: Offer) -> Iterator[str]:
    """Serve in a thread, and yield the address."""
    config = uvicorn.Config(application(offer), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with listening("127.0.0.1", 0) as opened:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{opened.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with offered(MODEL, None, "auto", token="", say=lambda text: None) as offer, serving(offer) as url:
        yield url


def expected(prompt: Any) -> str:
    settings = TextSettings(max_tokens=6, sampling=Sampling(temperature=0.9, top_p=0.9, seed=3))
    model = load_text_model(MODEL)
    pieces = model.complete(prompt, settings) if isinstance(prompt, str) else model.chat(prompt, settings)
    return "".join(piece.text for piece in pieces)


def test_the_official_client_reads_texts_whole_and_in_pieces(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        reference = client.chat.completions.create(model=MODEL, messages=TALK, **SEEDED)
        assert reference.choices[0].message.content == expected(TALK) and reference.choices[0].finish_reason == "length"
        assert reference.usage is not None and reference.usage.completion_tokens == 6
        stream = client.chat.completions.create(
            model=MODEL, messages=TALK, stream=True, stream_options={"include_usage": True}, **SEEDED
        )
        *chunks, last = stream
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected(TALK)
        assert chunks[-1].choices[0].finish_reason == "length" and last.usage == reference.usage
        assert client.completions.create(model=MODEL, prompt="hello", **SEEDED).choices[0].text == expected("hello")
        with pytest.raises(openai.NotFoundError, match="This server has 'tiny-llama-2'"):
            client.chat.completions.create(model="another", messages=TALK)


def test_the_client_of_the_hugging_face_hub_reads_them_too(address: str) -> None:
    client = InferenceClient(base_url=f"{address}/v1", timeout=LIMIT_S)
    assert client.chat_completion(TALK, **SEEDED).choices[0].message.content == expected(TALK)
    pieces = client.chat_completion(TALK, stream=True, **SEEDED)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected(TALK)
    with pytest.raises(InferenceError, match="This server writes up to 1024"):
        client.chat_completion(TALK, max_tokens=5000)


def test_the_plain_grammar_is_that_of_server_sent_events(address: str) -> None:
    with httpx.stream(
        "POST",
        f"{address}/v1/chat/completions",
        json={"messages": TALK, "stream": True, **SEEDED},
        timeout=LIMIT_S,
    ) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = reply.read().decode().removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-1]]
    assert parts[0]["role"] == "assistant" and "".join(part.get("content", "") for part in parts) == expected(TALK)
    metrics = get(f"{address}/metrics").text
    assert re.search(r'workbench_requests_total\{outcome="answered"\} [1-9]', metrics)
    assert get(f"{address}/health").json() == {"status": "ok"}
    page = get(f"{address}/")
    assert page.status_code == 200 and not re.search(r"(src|href)=.https?:", page.text)


def test_a_draft_is_told_to_the_page_and_in_the_metrics() -> None:
    """As it guesses in one process; before the first text nothing is known."""
    model = load_text_model(MODEL, "int4")
    settings = TextSettings(max_tokens=6, sampling=Sampling(temperature=0.9, top_p=0.9, seed=3))
    assert list(model.complete("hello", settings)) and model.passes is not None
    with (
        offered(MODEL, None, "auto", token="", say=lambda text: None, draft="int4") as offer,
        serving(offer) as url,
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
    ):
        before = client.get("/state").json()["draft"]
        assert before == {"name": "int4", "tokens_per_pass": None, "accepted_share": None}
        assert 'guesses_total{outcome="right"} 0' in client.get("/metrics").text
        text = client.post("/v1/completions", json={"prompt": "hello", **SEEDED})
        assert text.json()["choices"][0]["text"] == expected("hello")
        after, metrics = client.get("/state").json()["draft"], client.get("/metrics").text
    passes = model.passes
    assert after == before | {"tokens_per_pass": passes.mean, "accepted_share": passes.acceptance}
    for line in (
        f"draft_passes_total {passes.count}",
        f"draft_tokens_total {passes.tokens}",
        f'draft_guesses_total{{outcome="right"}} {passes.right}',
        f'draft_guesses_total{{outcome="wrong"}} {passes.wrong}',
        f"draft_tokens_per_pass {passes.mean:.6f}",
        f"draft_accepted_share {passes.acceptance:.6f}",
    ):
        assert f"workbench_{line}\n" in metrics


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "missing required field `messages`"),
        ({"messages": []}, 400, "length >= 1"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "the roles system, user, assistant"),
        ({"messages": TALK, "temperature": -1}, 400, "temperature"),
        ({"messages": TALK, "max_tokens": 5000}, 400, "This server writes up to 1024"),
        ({"messages": [{"role": "user", "content": "a " * 600}]}, 400, "The model reads 512 tokens"),
        ({"messages": TALK, "n": 2}, 400, "n"),
        ({"messages": [{"role": "user", "content": "a" * (1 << 20)}]}, 413, "larger than 1048576 bytes"),
    ],
)
def test_what_is_wrong_or_too_much_is_refused_in_a_sentence(body: Any, status: int, said: str, address: str) -> None:
    reply = post(f"{address}/v1/chat/completions", json=body)
    assert reply.status_code == status and said in reply.json()["error"]["message"]
    assert reply.json()["error"]["message"].endswith(".")


def test_brackets_that_are_nested_too_deep_are_refused(address: str) -> None:
    body = '{"unknown": ' + "[" * 5000 + "]" * 5000 + "}"
    reply = post(f"{address}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and "cannot be read" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/v1/completions", {"prompt": [1, 10**9]}, 400, "has the ids 0 to"),
        ("POST", "/v1/completions", {"prompt": [-1]}, 400, "the token id -1"),
        ("POST", "/v1/responses", {}, 404, "POST /v1/responses was asked for. There are POST /v1/chat"),
        ("GET", "/v1/chat/completions", None, 405, "GET /v1/chat/completions was asked for"),
    ],
)
def test_ids_and_paths_that_are_not_there_are_refused(
    method: str, path: str, body: Any, status: int, said: str, address: str
) -> None:
    reply = httpx.request(method, f"{address}{path}", json=body, timeout=LIMIT_S)
    assert reply.status_code == status and said in reply.json()["error"]["message"]


def test_a_page_of_another_site_is_refused_and_the_own_one_is_not(address: str) -> None:
    def sent_from(origin: str) -> httpx.Response:
        return post(f"{address}/v1/chat/completions", headers={"origin": origin}, json={"messages": TALK} | SEEDED)

    assert sent_from(address).status_code == 200
    for origin in ("https://another.example", "null", address.replace("127.0.0.1", "localhost")):
        assert sent_from(origin).status_code == 403 and "sent this" in sent_from(origin).json()["error"]["message"]


class Faulty:
    """A Writer that fails at its first text."""

    def __init__(self) -> None:
        self.has_failed = False

    def write(self, ids: Any, num_tokens: int, sampling: Any) -> Iterator[int]:
        if not self.has_failed:
            self.has_failed = True
            raise IndexError("index out of range")
        yield 7


def test_a_fault_of_the_server_is_answered_and_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place is free before its text, or its fault, is read: whoever has read it may ask again at once."""
    model: Any = TextModel(MODEL, Faulty(), frozenset({7}))  # type: ignore[arg-type]
    waiting, put = [], _Ticket.put

    def watched(ticket: _Ticket, content: Any) -> None:
        waiting.append(desk.waiting)
        put(ticket, content)

    monkeypatch.setattr(_Ticket, "put", watched)
    with Desk(model, Limits(together=1, waiting=0), Metrics()) as desk:
        offer = Offer(name=MODEL, desk=desk, tokenizer=model.tokenizer, panel=OneProcess(), hosts=["127.0.0.1"])
        with serving(offer) as url:
            failed, written = (post(f"{url}/v1/completions", json={"prompt": "a"}) for _ in range(2))
    assert failed.status_code == 500 and "IndexError: index out of range" in failed.text
    assert written.status_code == 200 and desk.metrics.outcomes == {"failed": 1, "answered": 1}
    assert waiting == [0, 0]


class Stuck:
    """A Writer that waits until it may write."""

    def __init__(self) -> None:
        self.has_begun, self.may = threading.Event(), threading.Event()

    def write(self, ids: Any, num_tokens: int, sampling: Any) -> Iterator[int]:
        self.has_begun.set()
        assert self.may.wait(LIMIT_S)
        yield 7


def test_a_full_queue_and_a_late_text_are_refused_and_a_token_is_needed() -> None:
    """The late one is written on until the server has ended, which harms nothing."""
    stuck, num_late = Stuck(), 0
    model: Any = TextModel(MODEL, stuck, frozenset({7}))  # type: ignore[arg-type]
    with Desk(model, Limits(together=1, waiting=0, request_s=0.2), Metrics()) as desk:
        offer = Offer(
            name=MODEL, desk=desk, tokenizer=model.tokenizer, panel=OneProcess(), token="s", hosts=["127.0.0.1"]
        )
        with (
            serving(offer) as url,
            httpx.Client(base_url=url, headers={"authorization": "Bearer s"}, timeout=LIMIT_S) as client,
        ):
            while not stuck.has_begun.is_set():  # a busy host may take a text up when it is too late
                late = client.post("/v1/chat/completions", json={"messages": TALK})
                assert late.status_code == 503 and "not written within 0.2 s" in late.text
                num_late += 1
                wait_for(lambda: stuck.has_begun.is_set() or not desk.waiting, "the writer")
            full = client.post("/v1/chat/completions", json={"messages": TALK})  # the writer still has the first
            assert full.status_code == 429 and full.headers["retry-after"] and "Ask again later" in full.text
            assert get(f"{url}/v1/models").status_code == get(f"{url}/metrics").status_code == 401
            assert client.get("/v1/models", headers={"host": "elsewhere.example"}).status_code == 400
            assert client.post("/devices/alpha/kill").status_code == 403
        stuck.may.set()
        wait_for(lambda: not desk.waiting, "the end of the late text")
        assert desk.metrics.outcomes == {"late": num_late, "refused": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherOptions:
    """Settings of a method of somebody else."""

    words: int = 1


@contextmanager
def other_devices(model: str, cluster: Cluster, fidelity: str, *, options: OtherOptions, **settings: Any) -> Any:
    """Yield "devices" that write as this process does."""
    local = load_text_model(model)
    assert cluster.name == "pair" and options.words == 2 and not settings["draft"]
    yield TextDevices(writer=local.writer, ends=local.ends, panel=OneProcess())


OTHER = Declaration(
    options=OtherOptions, implementation="", calls={}, serves_texts=f"{__name__}:other_devices", trains=False
)


def test_texts_are_served_by_a_method_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("other", f"{__name__}:OTHER", methods.GROUP)
    monkeypatch.setattr(methods, "registered", lambda: {"other": entry})
    settings: dict[str, Any] = {"token": "", "say": lambda text: None}
    with offered(MODEL, load_cluster("pair"), "auto", options={"words": 2}, **settings) as offer, serving(offer) as url:
        text = httpx.post(f"{url}/v1/completions", json={"prompt": "hello", **SEEDED}).json()
    assert text["choices"][0]["text"] == expected("hello")
    with pytest.raises(ConfigError, match="option 'word' of other"):
        _entered(offered(MODEL, load_cluster("pair"), "auto", options={"word": 2}, **settings))
    with pytest.raises(ConfigError, match=r"A method that serves requests .* 'other' does not declare it"):
        methods.method_with("serves_requests", "other")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"scheme": 1}, "`system` only"), ({"system": "sequence_parallel"}, "no token after the first")],
)
def test_options_of_galaxy_plus_with_which_its_devices_write_no_text_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _entered(offered(MODEL, load_cluster("pair"), "auto", token="", say=lambda text: None, options=options))


def _entered(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


def test_an_encoder_gives_embeddings_and_no_texts() -> None:
    texts = ["a film", "another good film"]
    with (
        offered("tiny-bert-2", None, "auto", token="", say=lambda text: None) as offer,
        serving(offer) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        result = client.embeddings.create(model="tiny-bert-2", input=texts)
        with pytest.raises(openai.BadRequestError, match="writes no text"):
            client.chat.completions.create(model="tiny-bert-2", messages=TALK)
    stack, tokenizer = load_stack("tiny-bert-2"), load_tokenizer("tiny-bert-2")
    for text, trace in zip(texts, result.data, strict=True):
        ids = torch.tensor(tokenizer.encode([text], max_length=64))
        mean = stack(ids, torch.ones_like(ids))[0].mean(1)[0]
        assert np.allclose(trace.embedding, mean / mean.norm(), atol=1e-6)


@pytest.mark.parametrize(
    ("end", "more"), [(signal.SIGTERM, ()), (signal.SIGINT, ("--cluster", "pair", "--system", "galaxy"))]
)
def test_a_signal_ends_the_server_with_nothing_left(end: signal.Signals, more: tuple[str, ...], tmp_path: Any) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-m", "workbench", "serve", "--http", "--model", MODEL, "--port", "0", *more]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "/v1 and a chat page" in line)
            address = line.split()[3].removesuffix("/v1")
            assert get(f"{address}/health").status_code == 200
            children = psutil.Process(process.pid).children(recursive=True)
            assert bool(children) == bool(more)
            if more:
                text = post(f"{address}/v1/chat/completions", json={"messages": TALK, **SEEDED})
                assert text.json()["choices"][0]["message"]["content"] == expected(TALK)
            process.send_signal(end)
            process.wait(LIMIT_S)
        finally:
            process.kill()
    wait_for(lambda: not [child for child in children if child.is_running()], "the end of its processes")
    assert not list(tmp_path.iterdir())
    with pytest.raises(httpx.ConnectError):
        get(f"{address}/health")
