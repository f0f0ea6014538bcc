"""The embedded tasks: fixed splits of the rated sentences."""

import pytest

from workbench.assets.fetch import asset_path
from workbench.core.errors import ConfigError, MissingDataError
from workbench.tasks import TASKS, load_task
from workbench.tasks.embedded import SOURCES, load_sentiment, load_sentiment_rating


def write_ratings(folder, count=12000):
    """Write files of the original's form, with zeros and a repeated sentence."""
    for source in SOURCES:
        lines = [
            f"{number}\t{(number % 9 - 4) / 2}\tsentence {number} of {source} &amp; a\ttab"
            for number in range(1, count)
        ]
        lines.append(f"{count}\t-2.5\tsentence 1 of {source} &amp; a\ttab")
        (folder / f"{source}_GroundTruth.txt").write_bytes("\r\n".join(lines).encode())
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_ratings(tmp_path_factory.mktemp("ratings"))


def test_sentiment_splits(folder):
    task = load_sentiment(folder)
    assert (len(task.train), len(task.test)) == (8000, 2000) and task.num_outputs == 2
    parts = [set(part.sample_ids) for part in (task.train, task.validation, task.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(task.train) + len(task.validation) + len(task.test)
    zeros = {number - 1 for number in range(1, 12000) if number % 9 == 4}
    assert set.union(*parts) == set(range(11999)) - zeros  # the repeated last sentence is left out, too
    for text, label, index in zip(task.test.texts, task.test.labels, task.test.sample_ids, strict=True):
        assert text == f"sentence {index + 1} of movieReviewSnippets & a\ttab"
        assert label == int((index + 1) % 9 > 4)
    assert load_sentiment(folder) == task


def test_rating_never_trains_on_a_sentence_that_sentiment_tests_on(folder):
    binary, rating = load_sentiment(folder), load_sentiment_rating(folder)
    assert set(binary.test.sample_ids) <= set(rating.test.sample_ids)
    assert not set(rating.train.sample_ids) & set(rating.test.sample_ids)
    everything = [*rating.train.sample_ids, *rating.validation.sample_ids, *rating.test.sample_ids]
    assert sorted(everything) == list(range(48000))
    assert rating.kind == "regression" and all(isinstance(label, float) for label in rating.train.labels)


def test_limits_are_nested_and_keep_ids(folder):
    task = load_sentiment(folder)
    small, large = task.limited(100, None, 10), task.limited(200, 50, None)
    assert (len(small.train), len(small.validation), len(small.test)) == (100, len(task.validation), 10)
    assert set(small.train.sample_ids) < set(large.train.sample_ids) < set(task.train.sample_ids)
    with pytest.raises(ConfigError, match="empty split"):
        task.limited(0, None, None)


def test_the_real_data():
    try:
        asset_path("vader-ratings")
    except MissingDataError:
        pytest.skip("the embedded data was not fetched")
    task = load_task("sentiment")
    assert (len(task.train), len(task.validation), len(task.test)) == (8000, 566, 2000)
    labels = [*task.train.labels, *task.validation.labels, *task.test.labels]
    assert sum(labels) / len(labels) == pytest.approx(0.496, abs=0.0005)
    rating = load_task("sentiment-rating", train_samples=50)
    assert len(rating.train) == 50 and -4 <= min(rating.test.labels) < 0 < max(rating.test.labels) <= 4


def test_unknown_tasks_list_the_known_ones():
    with pytest.raises(
        ConfigError, match="sentiment, sentiment-rating, digits, questions, instructions, mrpc, stsb, sst2, qnli"
    ):
        load_task("sqaud")
    with pytest.raises(
        ConfigError,
        match=r"question answering by the words that follow a prompt.*p_rge, or the task question_answering",
    ):
        load_task("squad")
    assert len(TASKS) == len(set(TASKS)) == 21


def test_data_that_was_not_fetched_or_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "nothing"))
    with pytest.raises(MissingDataError, match="python -m workbench fetch"):
        load_task("sentiment")
    (tmp_path / "movieReviewSnippets_GroundTruth.txt").write_text("1\tgood\ta sentence\n")
    with pytest.raises(MissingDataError, match="does not read"):
        load_task("sentiment", data=tmp_path)
