"""`workbench bench text`: tokens a second and time to the first token by Galaxy+, a pipeline and one device; and in one
process, against transformers' generate and, where it is installed, llama.cpp (`pip install xllamacpp`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.request import Request, urlopen

import torch

from workbench.core.catalogue import load_cluster
from workbench.core.run_folder import scratch_folder
from workbench.methods.common.merged import export_merged
from workbench.methods.galaxy_plus.options import System
from workbench.methods.galaxy_plus.serving.text_service import text_service
from workbench.models.generation import Sampling
from workbench.models.loading import load_model, load_tokenizer
from workbench.models.sharding.whole import WholeModel
from workbench.models.text import LocalWriter, Writer
from workbench.models.tokenizer import TextTokenizer
from workbench_studies.bench.frame import Figures, Progress, interleaved, line_of, ratios, require_words, turns

MODEL = "SmolLM2-135M"
CLUSTER = "galaxy-env-b"
SYSTEMS: tuple[System, ...] = ("galaxy_plus", "galaxy", "edgeshard", "local")
"""Galaxy+ may leave devices out; Galaxy takes all; EdgeShard is a pipeline; local is the fastest device alone."""
PROMPT = "Once upon a time there was a small board that wanted to read a long book about the sea."
NEW_TOKENS = 24
TOGETHER = 8
ROUNDS = 3
WORDS = ("devices", "process")


class _Timed(NamedTuple):
    first_s: float
    per_s: float


def bench(progress: Progress = print, only: Sequence[str] = (), *, rounds: int = ROUNDS) -> Figures:
    """Return the figures.  only: some of WORDS, none is all.

    Raises AssertionError if two sides write different texts.
    """
    require_words(only, WORDS)
    tokenizer = load_tokenizer(MODEL)
    assert isinstance(tokenizer, TextTokenizer)
    ids, results = tokenizer.prompt(PROMPT), Figures()
    if "process" in (only or WORDS):
        results |= _in_one_process(ids, rounds)
        progress(line_of(results))
    if "devices" in (only or WORDS):
        results["on devices"] = _on_devices(ids, rounds, progress)
    return {"label": "emulated; of one process: measured", "model": MODEL, "new tokens": NEW_TOKENS} | results


def _in_one_process(ids: list[int], rounds: int) -> Figures:
    """Return transformers' seconds over ours, and how many times as many tokens a second TOGETHER texts make."""
    model, writer = load_model(MODEL), LocalWriter(MODEL, WholeModel(MODEL))
    texts = dict[str, list[int]]()

    def ours(step: int) -> None:
        texts["ours"] = list(writer.write(ids, NEW_TOKENS))

    def theirs(step: int) -> None:
        with torch.inference_mode():
            tokens = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
        texts["theirs"] = tokens[0, len(ids) :].tolist()

    def together(step: int) -> None:
        texts["together"] = _together(writer, ids)[0]

    sides = {"ours": ours, "theirs": theirs, "together": together}
    with scratch_folder() as folder:
        if find_spec("xllamacpp") is not None:
            ask = _llama_cpp(folder / "whole.gguf")

            def llama_cpp(step: int) -> None:
                texts["llama.cpp"] = ask(ids)

            sides["llama.cpp"] = llama_cpp
        seconds = interleaved(sides, rounds)
    _require_same(texts)
    gains = [TOGETHER * alone / joined for alone, joined in zip(seconds["ours"], seconds["together"], strict=True)]
    return {
        "tokens per s": NEW_TOKENS / median(seconds["ours"]),
        **ratios(seconds["theirs"], seconds["ours"], "generate_over_ours"),
        f"times as many with {TOGETHER} texts": median(gains),
        **(
            {"llama.cpp": ratios(seconds["ours"], others, "ours over it")}
            if (others := seconds.get("llama.cpp"))
            else {}
        ),
    }


def _llama_cpp(path: Path) -> Callable[[list[int]], list[int]]:
    """Return llama.cpp's greedy continuation, over the same weights as a float32 file at `path`, by as many threads."""
    import xllamacpp

    export_merged(MODEL, path, "float32")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.verbosity = 512, 1, 0, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(settings)
    body = {"n_predict": NEW_TOKENS, "temperature": 0, "return_tokens": True, "cache_prompt": False}

    def ask(ids: list[int]) -> list[int]:
        data = json.dumps(body | {"prompt": ids}).encode()
        with urlopen(Request(f"{server.listening_address}/completion", data)) as reply:
            tokens: list[int] = json.load(reply)["tokens"]
        return tokens

    return ask


def _on_devices(ids: list[int], rounds: int, progress: Progress) -> list[Figures]:
    alone: dict[str, list[_Timed]] = {system: [] for system in SYSTEMS}
    joined: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    texts, devices = dict[str, list[int]](), dict[str, int]()
    for _, name in turns(SYSTEMS, range(rounds)):
        [system] = (system_name for system_name in SYSTEMS if system_name == name)
        with text_service(
            MODEL, load_cluster(CLUSTER), "auto", ends=[], say=lambda text: None, system=system
        ) as service:
            _timed(service.writer.write(ids, 2, Sampling()))  # until the devices serve
            text, timed = _timed(service.writer.write(ids, NEW_TOKENS, Sampling()))
            begin_s = time.perf_counter()
            texts[name], texts[f"{name}, together"] = text, _together(service.writer, ids)[0]
            joined[name].append(TOGETHER * NEW_TOKENS / (time.perf_counter() - begin_s))
            alone[name].append(timed)
            plan = service.policy.rescheduler.plan
            devices[name] = 0 if plan is None else len(plan.ranks)
        _require_same(texts)
        progress(f"{name}: {timed.per_s:.2f} tokens a second, the first after {timed.first_s:.2f} s")
    ours_timed = alone["galaxy_plus"]
    return [
        {
            "system": name,
            "devices": devices[name],
            "first token s": median(timed.first_s for timed in alone[name]),
            "tokens per s": median(timed.per_s for timed in alone[name]),
            f"tokens per s of {TOGETHER}": median(joined[name]),
            **ratios([timed.per_s for timed in ours_timed], [timed.per_s for timed in alone[name]], "Galaxy+ over it"),
            "first token over Galaxy+'s": median(
                timed.first_s / ours.first_s for timed, ours in zip(alone[name], ours_timed, strict=True)
            ),
        }
        for name in SYSTEMS
    ]


def _timed(tokens: Generator[int]) -> tuple[list[int], _Timed]:
    begin_s = time.perf_counter()
    text = [next(tokens)]
    first_s = time.perf_counter()
    text += tokens
    return text, _Timed(first_s - begin_s, (len(text) - 1) / (time.perf_counter() - first_s))


def _together(writer: Writer, ids: list[int]) -> list[list[int]]:
    with ThreadPoolExecutor(TOGETHER) as threads:
        return list(threads.map(lambda _: list(writer.write(ids, NEW_TOKENS, Sampling())), range(TOGETHER)))


def _require_same(texts: dict[str, list[int]]) -> None:
    """Raise AssertionError if two sides wrote different texts."""
    first = next(iter(texts))
    for name, text in texts.items():
        if text != texts[first]:
            raise AssertionError(f"{name} wrote {text}, {first} {texts[first]}")
