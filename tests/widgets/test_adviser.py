"""The adviser in a notebook: what it is asked, what it shows, and what it copies."""

from __future__ import annotations

import shlex
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from tests.waiting import LIMIT_S
from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.serial import write_text
from workbench.runs.advice import Advice, advise
from workbench.widgets import Adviser, ClusterForm

JOB = Job(model="tiny-bert", epochs=1, train_samples=32)


@pytest.fixture(scope="module")
def answered() -> Adviser:
    adviser = Adviser("pair", JOB, computed=True)
    adviser.controls["purpose"].value = "stay"
    adviser.ask_button.click()
    adviser.wait()
    return adviser


def test_it_shows_the_ranked_table_the_picture_and_the_reason(answered: Adviser) -> None:
    assert answered.message.value == "" and answered.advice is not None
    best = answered.advice.choices[0]
    assert f"Best for time: {best.name}" in answered.headline.value
    assert all(choice.name in answered.table.value for choice in answered.advice.choices)
    assert answered.table.value.count("opacity") == sum(choice.is_dominated for choice in answered.advice.choices)
    assert len(answered.figure.shown.data) == len(answered.advice.choices)
    assert escape(best.decides) in answered.reason.value and not answered.ask_button.disabled


def test_for_texts_it_shows_from_when_each_draft_pays() -> None:
    adviser = Adviser("pair", Job(model="tiny-llama-4", train_samples=32), computed=True)
    adviser.controls["purpose"].value = "serve"
    adviser.ask()
    adviser.wait()
    assert adviser.advice is not None and adviser.advice.drafts is not None
    assert "pays from" in adviser.table.value
    assert all(f">{offer.name}<" in adviser.table.value for offer in adviser.advice.drafts.offers)


def test_each_combination_is_explained_and_copied(answered: Adviser) -> None:
    assert answered.advice is not None and len(answered.advice.choices) > 1
    for number, choice in enumerate(answered.advice.choices):
        answered.choice.value = number
        words = shlex.split(answered.copies.command.text)
        assert words[words.index("--method") + 1] == choice.job.method and words[-2:] == ["--cluster", "pair"]
        assert choice.job.method in answered.copies.python.text
    answered.choice.value = 0


def test_it_asks_what_the_controls_say_and_shows_an_error_as_one_line() -> None:
    requests: list[Any] = []

    def refuse(job: Job, cluster: Any, **settings: Any) -> Advice:
        requests.append((job, cluster, settings))
        raise ConfigError("Advice was asked for.", "Nothing can run.", "Add a device.")

    form = ClusterForm("pair")
    adviser = Adviser(form, JOB, adviser=refuse)
    assert form not in adviser.children
    changes = {"model": "tiny-gpt2", "task": "mrpc", "goal": "energy", "score": 0.7, "purpose": "serve", "costs": True}
    for name, value in changes.items():
        adviser.controls[name].value = value
    adviser.ask()
    adviser.wait()
    [(job, cluster, settings)] = requests
    del settings["progress"]
    assert (job.model, job.task, job.epochs) == ("tiny-gpt2", "mrpc", 1) and cluster == load_cluster("pair")
    assert settings == {"goal": "energy", "score": 0.7, "keeps_data": False, "serves": True, "computed": True}
    assert "Nothing can run." in adviser.message.value and adviser.advice is None
    assert adviser.table.layout.display == "none" and adviser.copies.command.text == ""
    adviser.controls["score"].value = 7
    assert adviser.ask_button.disabled and "score" in adviser.controls["score"].alert.value.lower()


def test_the_kernel_stays_free_and_a_file_names_the_devices(tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*args: Any, **settings: Any) -> Advice:
        begun.set()
        assert goes_on.wait(LIMIT_S)
        return advise(*args, **settings)

    device = '[[device]]\nname = "one"\ngflops = 10\nmemory_mb = 1000\nbandwidth_mbit_per_s = 100\n'
    write_text(tmp_path / "own.toml", f'name = "own"\n{device}')
    adviser = Adviser(tmp_path / "own.toml", JOB, adviser=slow, computed=True)
    adviser.controls["purpose"].value = "stay"
    adviser.ask()
    assert begun.wait(LIMIT_S) and adviser.ask_button.disabled
    goes_on.set()
    adviser.wait()
    assert adviser.advice is not None and {choice.devices for choice in adviser.advice.choices} == {("one",)}


def test_a_combination_that_is_chosen_while_an_answer_is_half_shown_is_explained_when_it_is_whole(
    answered: Adviser, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answered.advice is not None
    longer, shorter = answered.advice, replace(answered.advice, choices=answered.advice.choices[:1])
    answers = iter([longer, shorter])
    adviser = Adviser("pair", JOB, adviser=lambda *args, **settings: next(answers))
    adviser.ask()
    adviser.wait()
    adviser.choice.value = len(longer.choices) - 1
    waits, errors = threading.Event(), list[BaseException]()

    class Showing:
        """A lock that says when somebody asks for it."""

        def __init__(self) -> None:
            self.lock = threading.RLock()

        def __enter__(self) -> None:
            if threading.current_thread().name == "explains":
                waits.set()
            self.lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.lock.release()

    def explain() -> None:
        try:
            adviser._explain()
        except BaseException as error:
            errors.append(error)

    explains = threading.Thread(target=explain, name="explains")

    def title(advice: Advice) -> str:
        """Explain when the new answer is there, and the choices are still the former answer's."""
        if not explains.ident:
            explains.start()
            assert waits.wait(LIMIT_S)
        return "a title"

    monkeypatch.setattr(adviser, "_showing", Showing())
    monkeypatch.setattr("workbench.runs.advice_text.title", title)
    adviser.ask()
    adviser.wait()
    explains.join(LIMIT_S)
    assert not errors and not explains.is_alive() and adviser.message.value == ""
    assert escape(shorter.choices[0].decides) in adviser.reason.value
