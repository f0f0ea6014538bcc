"""The picture of data that stay on devices shows the split's own counts."""

from workbench.plots import device_samples
from workbench.tasks.batching import split_samples
from workbench.tasks.task import Split


def bars(figure):
    return {bar.name: list(bar.x) for bar in figure.data}


def test_bars_count_each_devices_samples_by_class() -> None:
    labels = [0, 0, 1, 1, 1, 0]
    figure = device_samples(
        [[0, 1, 2], [3, 4], [5]], labels, ["a", "b", "c"], class_names=("bad", "good"), rule="sizes:3,2,1"
    )
    assert bars(figure) == {"bad": [2, 0, 1], "good": [1, 2, 0]}
    assert list(figure.data[0].y) == ["a (3)", "b (2)", "c (1)"]
    assert "6 training samples" in figure.layout.title.text and "sizes:3,2,1" in figure.layout.title.subtitle.text


def test_many_labels_and_numbers_become_a_few_parts_that_add_up() -> None:
    split = Split(
        texts=("",) * 1000,
        labels=tuple(min(index % 11, index % 7) for index in range(1000)),
        sample_ids=tuple(range(1000)),
    )
    shares = split_samples(split, 4, "dirichlet:0.5", 3)
    for labels in (
        split.labels,
        [float(label) for label in split.labels],
        [f"topic {label}" for label in split.labels],
    ):
        figure = device_samples(shares, labels, ["a", "b", "c", "d"])
        parts = bars(figure)
        assert len(parts) <= 6 and [sum(part[rank] for part in parts.values()) for rank in range(4)] == [
            len(share) for share in shares
        ]
    assert list(parts)[-1] == "others"
