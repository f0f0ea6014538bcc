"""The executed comparisons: equal footing, honest selection, and each table's quick version from beginning to end."""

import random
from dataclasses import replace

import pytest
import torch

from workbench.assets.fetch import ASSETS
from workbench.core.errors import ConfigError
from workbench.core.serial import from_json, to_json
from workbench.models.loading import load_stack
from workbench.tasks import load_task
from workbench.tasks.embedded import SOURCES
from workbench.tasks.task import Split, Task
from workbench.tasks.tokenize import TokenizedSplit, collate
from workbench.trainings import inputs
from workbench.trainings.inputs import run_all
from workbench.trainings.techniques import Training, answers, score, taped, taps_of
from workbench_studies.papers import find_item
from workbench_studies.papers.pac_plus import executed, pairs, parity
from workbench_studies.papers.pac_plus.differences import ensemble, paired_bootstrap
from workbench_studies.papers.result import Result, Settings, shipped_result

SMALL = {"model": "tiny-bert-2", "epochs": 2, "batch_size": 8, "max_length": 16, "samples": (40, 20, 20)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with MRPC, STS-B and SST-2 of our own making, in GLUE's format."""
    folder = tmp_path_factory.mktemp("glue")
    draw = random.Random(0)

    def text(good):
        words = [
            draw.choice(("fine", "great", "lovely") if good else ("bad", "dull", "awful")),
            "film",
            draw.choice("abcdefgh"),
        ]
        return " ".join(words)

    rows = {"MRPC": [], "STS-B": [], "SST-2": []}
    for number in range(640):
        first, second = draw.random() < 0.5, draw.random() < 0.5
        one, other = text(first), text(second)
        rows["MRPC"].append(f"{int(first == second)}\t{number}\t{number}\t{one}\t{other}")
        rows["STS-B"].append(f"{number}\tg\tf\t2026\t0\ts\ts\t{one}\t{other}\t{5.0 * (first == second):.3f}")
        rows["SST-2"].append(f"{one}\t{int(first)}")
    for name, lines in rows.items():
        (folder / name).mkdir()
        header = ["sentence\tlabel"] if name == "SST-2" else []
        for part, chosen in (("train", lines[:400]), ("dev", lines[400:])):
            (folder / name / f"{part}.tsv").write_text("\n".join(header + chosen) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def embedded(tmp_path, monkeypatch):
    """Put ratings of our own making where the fetched ones would be."""
    folder = tmp_path / f"vader-ratings-{ASSETS['vader-ratings'].sha256[:12]}"
    folder.mkdir()
    draw = random.Random(1)
    for source in SOURCES:
        lines = []
        for number in range(10600 if source == SOURCES[0] else 40):
            good = draw.random() < 0.5
            words = " ".join(draw.choices(("fine", "great", "lovely") if good else ("bad", "dull", "awful"), k=3))
            lines.append(f"{number}\t{1.5 if good else -1.5}\t{words} {source} {number}")
        (folder / f"{source}_GroundTruth.txt").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    return folder


def small(technique, seed=0, **changes):
    return Training(task="sst2", technique=technique, seed=seed, **(SMALL | {"learning_rate": 5e-3} | changes))


def silent(line):
    pass


def test_taps_come_back_as_the_backbone_gave_them():
    stack = load_stack("tiny-bert-2")
    ids = tuple(tuple(range(5, 5 + length)) for length in (4, 9, 2, 7))
    split = TokenizedSplit(ids=ids, labels=(0, 1, 0, 1), sample_ids=(0, 1, 2, 3), pad_id=0)
    batch = collate(split, [2, 1])
    taps = taps_of(taped(stack, split, "float32"), batch)
    expected = stack(batch.input_ids, batch.attention_mask)[1]
    real = batch.attention_mask.bool()
    for tap, whole in zip(taps, expected, strict=True):
        torch.testing.assert_close(tap[real], whole[real])
        assert not tap[~real].any()


@pytest.mark.parametrize("technique", ["full", "adapters", "lora", "parallel_adapters"])
def test_each_technique_trains_on_the_same_footing(technique, data):
    (outcome,) = run_all([small(technique)], None, data, silent).values()
    assert len(outcome.test_outputs) == 20
    assert [step for step, _ in outcome.curve] == [5, 10] and outcome.best_step in (5, 10)
    assert outcome.validation_score == max(value for _, value in outcome.curve)
    assert outcome.losses[1] < outcome.losses[0] and outcome.trainable_parameters > 0
    stack = load_stack("tiny-bert-2")
    inside = sum(parameter.numel() for parameter in stack.parameters())
    assert (outcome.trainable_parameters > inside) == (technique == "full")


def test_outcomes_are_kept_and_found_again(data, tmp_path):
    lines = []
    first = run_all([small("parallel_adapters")], tmp_path, data, lines.append)
    again = run_all([small("parallel_adapters")], tmp_path, None, silent)  # no data: nothing is run
    assert first == again and any("epoch 2" in line for line in lines)
    (file,) = tmp_path.iterdir()
    file.write_text("{", encoding="utf-8")
    remade = run_all([small("parallel_adapters")], tmp_path, data, silent)  # what does not read is made again
    assert next(iter(remade.values())).test_outputs == next(iter(first.values())).test_outputs
    other = run_all([small("parallel_adapters", seed=1)], tmp_path, data, silent)
    assert next(iter(other.values())).test_outputs != next(iter(first.values())).test_outputs


def test_options_change_the_training(data, embedded):
    changes = [
        {}, {"averaging": 0.9}, {"initialization": "pruned"}, {"initialization": "distilled"}, {"backbone": "int8"},
        {"score_every": 2}, {"taps": "later half"},
    ]  # fmt: skip
    outcomes = list(run_all([small("parallel_adapters", **change) for change in changes], None, data, silent).values())
    assert (
        len({outcome.test_outputs for outcome in outcomes}) == len(changes) - 1
    )  # scoring more often changes nothing else
    assert [step for step, _ in outcomes[5].curve] == [2, 4, 5, 6, 8, 10] and outcomes[5].losses == outcomes[0].losses


@pytest.mark.parametrize(("taps", "read"), [("all", [0, 1, 2]), ("every second", [0, 2]), ("later half", [1, 2])])
def test_a_side_network_reads_the_chosen_taps_alone(taps, read, data, monkeypatch):
    """Whatever the other taps hold, the training is the same; a change in any chosen one changes it."""
    training = small("parallel_adapters", taps=taps, epochs=1)

    def outputs(doubled):
        """Return the test outputs where every batch has twice the values of one tap; None for no tap."""

        def taps_with_one_doubled(cache, batch):
            return [tap * (1 + (number == doubled)) for number, tap in enumerate(taps_of(cache, batch))]

        monkeypatch.setattr(inputs, "taps_of", taps_with_one_doubled)
        return run_all([training], None, data, silent)[training].test_outputs

    unchanged = outputs(None)
    assert [number for number in (0, 1, 2) if outputs(number) != unchanged] == read


def test_wrong_settings_are_refused(data):
    for changes, match in (
        ({"taps": "none"}, "Known are all"),
        ({"initialization": "magic"}, "Known are"),
        ({"technique": "prompt"}, "Known are full"),
    ):
        with pytest.raises(ConfigError, match=match):
            run_all([small(**({"technique": "parallel_adapters"} | changes))], None, data, silent)


def test_scores_and_paired_tests():
    draw = random.Random(0)
    labels = tuple(draw.randint(0, 1) for _ in range(400))
    split = Split(texts=("x",) * 400, labels=labels, sample_ids=tuple(range(400)))
    task = Task(
        name="mrpc",
        kind="classification",
        num_outputs=2,
        metrics=("accuracy", "f1"),
        train=split,
        validation=split,
        test=split,
    )

    def guess(share):
        expected = (label if draw.random() < share else 1 - label for label in labels)
        return tuple((1.0, 0.0) if answer == 0 else (0.0, 1.0) for answer in expected)

    perfect = guess(1.0)
    assert score(task, perfect, labels) == 100.0 and answers(task, perfect) == list(labels)
    good, bad = guess(0.9), guess(0.6)
    same, better = paired_bootstrap(task, [good], [good]), paired_bootstrap(task, [good], [bad])
    assert (same.points, same.low, same.high, same.p_value) == (0, 0, 0, 1) and not same.is_significant
    assert better.low > 0 and better.is_significant and better.p_value < 0.01
    assert better.points == pytest.approx(score(task, good, labels) - score(task, bad, labels))


def test_an_ensemble_is_the_mean_of_the_logits(data):
    outcomes = list(
        run_all([small("parallel_adapters", seed=seed, epochs=1) for seed in (0, 1)], None, data, silent).values()
    )
    expected = torch.tensor([outcome.test_outputs for outcome in outcomes]).mean(dim=0)
    torch.testing.assert_close(torch.tensor(ensemble(outcomes)), expected)


def test_iterations_to_a_target():
    assert executed.reached(((5, 50.0), (10, 61.0), (15, 60.0)), 60.0) == 10
    assert executed.reached(((5, 50.0),), 60.0) is None
    assert executed.saving(1, 10.0, 2.0) == 0 and executed.saving(2, 10.0, 2.0) == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("name", "comparisons"),
    [
        ("table6", 4),
        ("fig14", 6),
        ("table7", 4),
        ("fig18-executed", 3),
        ("parity", 7),
    ],
)
def test_quick_versions_run_from_end_to_end(name, comparisons, embedded, tmp_path):
    item = find_item("pac_plus", name)
    result = item.run(Settings(quick=True, seeds=(0,), workdir=tmp_path / "work"))
    assert len(result.comparisons) == comparisons and result.source == "executed" and result.explanation
    assert from_json(to_json(result), Result) == result
    assert all(figure.figure.data for figure in item.draw(result))


def test_the_papers_tasks_are_those_of_a_folder(data):
    result = find_item("pac_plus", "table6").run(Settings(quick=True, seeds=(0,), data=data))
    assert {task for _, task in (comparison.labels for comparison in result.comparisons)} == {"MRPC", "STS-B", "SST-2"}
    paper = {comparison.labels: comparison.paper for comparison in result.comparisons}
    # Table VI: the mean over three models of the row 'Difference from Mean'.
    assert paper["from the mean of the three", "MRPC"] == pytest.approx((0.00 + 0.29 + 0.06) / 3, abs=0.01)


def test_frozen_pairs_are_scored_with_nothing_trained_and_with_heads(data):
    item = find_item("pac_plus", "pairs")
    result = item.run(Settings(quick=True, seeds=(0,), data=data))
    assert len(result.comparisons) == 7 and all(figure.figure.data for figure in item.draw(result))
    messages = {(row[0], row[1]) for row in result.tables[0].rows}
    ways = {(title, way) for title in ("STS-B", "MRPC") for way in pairs.WORDS.values()}
    assert messages == ways - {("STS-B", pairs.FREQUENT)}


def test_pairs_train_on_a_decoder_next_to_the_most_frequent_answer(data):
    item = find_item("pac_plus", "parity-smollm2")
    result = parity.parity_smollm2(item, Settings(quick=True, seeds=(0,), data=data))
    assert [(row[0], row[1]) for row in result.tables[0].rows] == [
        (title, way) for title in ("STS-B", "MRPC") for way in ("LoRA", "r = 8", "r = 8, 20 epochs", "r = 8, pruned")
    ]
    assert {check.claim.partition(":")[0] for check in result.checks} == {"r = 8 on STS-B", "r = 8 on MRPC"}
    mrpc = load_task("mrpc", data=data, train_samples=48, test_samples=24).test.labels
    finding = result.findings[-1]
    rate = sum(mrpc) / len(mrpc)  # of the answer 'the same'; F1 is 0 for the other
    assert any(f"{score:.1f}" in finding for score in (50 * (rate + 2 * rate / (1 + rate)), 50 * (1 - rate)))
    assert all(figure.figure.data for figure in item.draw(result))


def test_remedies_are_tried_on_pairs_and_judge_nothing(data, embedded):
    item = find_item("pac_plus", "parity-remedies")
    result = parity.parity_remedies(item, Settings(quick=True, seeds=(0,), data=data))
    tried = [(way, title) for title in ("STS-B", "MRPC") for way in parity.REMEDIES | parity.FEWER_TAPS]
    assert [comparison.labels for comparison in result.comparisons] == tried
    assert not result.checks and len(result.findings) == len(tried)
    assert all(figure.figure.data for figure in item.draw(result))


@pytest.mark.parametrize("name", parity.PAIRS)
def test_embeddings_whose_cosine_is_the_answer_score_perfectly(name, data):
    task = load_task(name, data=data)

    def split(labels):
        cosines = torch.tensor(labels, dtype=torch.float32) / 6
        first = torch.tensor([[1.0, 0.0]]).repeat(len(labels), 1)
        second = torch.stack([cosines, (1 - cosines**2).sqrt()], dim=1)
        return pairs.Embedded(first=first, second=second, pair=cosines[:, None])

    splits = {part: split(getattr(task, part).labels) for part in ("train", "validation", "test")}
    assert pairs.cosine_score(task, splits) == pytest.approx(100, abs=0.1)
    wrong = {part: replace(each, second=each.second * -1) for part, each in splits.items()}
    assert pairs.cosine_score(task, wrong) < 90


def test_only_what_the_paper_claims_is_judged(embedded, tmp_path):
    """Widths, initial weights and precisions that are ours are findings: in the shipped results, and in a new one."""
    shipped_counts = {
        "table6": (3, 0), "table7": (3, 1), "parity": (4, 16), "parity-remedies": (0, 12), "parity-smollm2": (2, 7),
        "fig14": (2, 2),
    }  # fmt: skip
    for name, (judged, found) in shipped_counts.items():
        shipped = shipped_result("pac_plus", name)
        assert (len(shipped.checks), len(shipped.findings)) == (judged, found)
        assert all(
            words not in check.claim for check in shipped.checks for words in ("r = 4", "together", "nf4", "ours")
        )
    settings = Settings(quick=True, seeds=(0,), workdir=tmp_path)
    result = executed.table7(find_item("pac_plus", "table7"), settings)
    assert len(result.checks) == 3 and [words.split(",")[0] for words in result.findings] == ["With nf4"]
    result = parity.parity(find_item("pac_plus", "parity"), settings)
    assert len(result.checks) == 1 and len(result.findings) == 7
    assert result.checks[0].claim.startswith("r = 8 on sentiment")
