"""A device reads what it keeps and nothing else, and after a re-plan only what it lacks (Galaxy+, sections III-B and
III-E)."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.plans import inference_plan
from workbench.methods.galaxy_plus.serving.drafts import draft_plan
from workbench.models import stored_tensors
from workbench.models.configuration import local_folder, stored_weights
from workbench.models.loading import load_tokenizer
from workbench.models.sharding import (
    ModelShard,
    WeightSource,
    added_bytes,
    model_layout,
    open_weights,
    shard_spec,
    weights_of,
)
from workbench.models.sharding.layout import deal
from workbench.models.sharding.shard import _parts

from .builders import CUT_FAMILIES, assert_equal_to, hybrid, run_plan, shards_of, tiny_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that gives the folder of a saved tiny model, in two safetensors files."""
    results = {}

    def of(family):
        if family not in results:
            results[family] = path = tmp_path_factory.mktemp(family)
            tiny_case(family).model.save_pretrained(path, max_shard_size="30KB")
            tokenizer = load_tokenizer(f"tiny-{family}")
            if hasattr(tokenizer, "backend"):
                tokenizer.backend.save(str(path / "tokenizer.json"))
        return results[family]

    return of


@pytest.mark.parametrize("family", CUT_FAMILIES)
def test_bytes_read_are_bytes_held(family, folder, monkeypatch):
    """No byte is read twice or for nothing, and what is held is what the shapes say, to the byte."""
    monkeypatch.setattr("workbench.models.sharding.building.load_model", None)  # the whole model is never loaded
    case, path = tiny_case(family), folder(family)
    layout = model_layout(str(path))
    shapes = layout.stacks
    shape = shapes[0]
    plan = hybrid(case, (0, 1, shape.num_units - 1), (40, 0, 24), (0.0, 0.5, 0.5), (1, 2, 1))
    ends, total = sum(layout.end_bytes), 0
    for position in range(3):
        source = open_weights(str(path), layout=layout)
        assert source.is_on_disk
        spec = shard_spec(plan, position, shapes)
        shard = ModelShard(layout, spec, source)
        expected = layer = 0
        for stack in shapes:
            units, columns = plan.cut(stack)
            for _ in range(stack.num_layers):
                is_whole = plan.schemes[layer] == 2 and plan.shares[position] > 0
                expected += units[position] * (stack.unit_bytes + stack.cross_unit_bytes) + stack.layer_bytes
                expected += (stack.columns if is_whole else columns[position]) * stack.column_bytes
                layer += 1
        # Everyone holds the norms behind the stacks, and T5's tables, which count as the ends'.
        everywhere = sum(tensor.nbytes for final in shard.finals if final for tensor in final.tensors) + sum(
            table.nbytes for table in shard.tables if table is not None
        )
        expected += ends if position == 0 else everywhere
        assert shard.held_bytes == source.bytes_read == expected - missing_norms(layout)
        source.close()
        total += shard.held_bytes
    assert total > 0


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "vit"])
def test_shards_from_files_are_those_from_memory(family, folder):
    case = tiny_case(family)
    units = case.layout.stacks[0].num_units
    plan = hybrid(case, (1, units - 1), (40, 24), (0.5, 0.5), (2, 1))
    for position in range(2):
        spec = shard_spec(plan, position, case.layout.stacks)
        one = ModelShard(case.layout, spec, weights_of(case.model))
        other = ModelShard(case.layout, spec, open_weights(str(folder(family)), layout=case.layout))
        for number, held in one.held.items():
            theirs = other.held[number]
            pairs = [
                *zip(held.inputs, theirs.inputs, strict=True),
                *zip(held.biases, theirs.biases, strict=True),
                (held.output, theirs.output),
            ]
            for ours, read in pairs:
                assert (ours is None and read is None) or torch.equal(ours, read)
                assert ours is None or ours.is_contiguous()
    assert other.held_bytes == one.held_bytes


def test_column_slices_are_read_by_rows_without_the_matrix(tmp_path, monkeypatch):
    """One read for whole rows, one for each row of a column slice; every read is of what was asked for."""
    matrix = torch.randn(50, 64)
    save_file({"other": torch.randn(7), "w": matrix, "v": torch.randn(64)}, tmp_path / "model.safetensors")
    source = WeightSource(stored_tensors.stored_tensors(tmp_path))
    reads = []
    original = stored_tensors._read_bytes
    monkeypatch.setattr(
        stored_tensors, "_read_bytes", lambda file, at, view: (reads.append(len(view)), original(file, at, view))
    )
    rows, columns = torch.empty(10, 64), torch.empty(50, 40)
    source.fill(rows, "w", (20, 30))
    source.fill(columns[:, 8:24], "w", (0, 50), (16, 32))
    assert torch.equal(rows, matrix[20:30]) and torch.equal(columns[:, 8:24], matrix[:, 16:32])
    assert reads == [10 * 64 * 4] + [16 * 4] * 50 and source.bytes_read == sum(reads)
    half = torch.empty(64, 3, dtype=torch.bfloat16)
    source.fill(half.t(), "w", (4, 7))
    assert torch.equal(half, matrix[4:7].t().bfloat16())
    source.close()


def plans_of(case):
    """Return plans one after the other as devices come and go, and schemes change."""
    units = case.layout.stacks[0].num_units
    yield hybrid(case, (1, units - 1, 0), (20, 20, 24), (0.3, 0.3, 0.4), (1, 1, 2))
    yield hybrid(case, (units, 0, 0), (0, 30, 34), (0.5, 0.0, 0.5), (2, 1, 1))
    yield hybrid(case, (units - 1, 0, 1), (24, 16, 24), (0.0, 0.4, 0.6), (1, 2, 1))
    yield inference_plan("pipeline", method="edgeshard", layers=(1, 0, 2))
    yield hybrid(case, (0, 1, units - 1), (64, 0, 0), (0.2, 0.2, 0.6), (1, 1, 1))


def missing_bytes(layout, old, spec):
    """Return the bytes that a device holds for `spec` and not yet: whole parts are new, or some units or columns of a
    block."""
    parts, known = _parts(layout, spec), _parts(layout, old.spec)
    new = {part: count for part, count in parts.items() if part not in known}
    for part in [part for part in new if part[0] == "block"]:
        here, before = (
            {unit for start, stop in ranges for unit in range(start, stop)}
            for ranges in (part[2], old.held[part[1]].ranges)
        )
        new[part] = len(here - before) * layout.blocks[part[1]].unit_size(layout.hidden_size)
    return 4 * sum(new.values())


def nbytes_of(*shards):
    """Return the bytes of all that some shards hold; what they share counts once."""
    parts = [one for shard in shards for one in (*shard.held.values(), *shard.tables, shard.ends)]
    parts += [
        tensor
        for shard in shards
        for one in (*shard.connections.values(), *shard.finals)
        if one is not None
        for tensor in one.tensors
    ]
    return sum({id(part): part.nbytes for part in parts if part is not None}.values())


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_a_new_plan_reads_only_what_is_missing(family, release, folder):
    case = tiny_case(family)
    layout, path = case.layout, str(folder(family))
    expected = case.local()
    shards, specs, last = {}, {}, None
    for turn, plan in enumerate(plans_of(case)):
        devices = [
            (position + turn) % 3 for position in range(3)
        ]  # who sits where changes too, and with it who has the ends
        values = [specs.get(device) for device in devices] if specs else None
        specs = {
            device: shard_spec(plan, position, layout.stacks, old_specs=values)
            for position, device in enumerate(devices)
        }
        before, shards = shards, {}
        for device, spec in specs.items():
            source = open_weights(path, layout=layout)
            if not before:
                shards[device] = ModelShard(layout, spec, source)
                assert shards[device].held_bytes == added_bytes(layout, spec, None)
                continue
            old = before[device]
            both = old.held_bytes + added_bytes(layout, spec, old.spec)
            blocks, missing = dict(old.held), missing_bytes(layout, old, spec)
            shards[device] = ModelShard(old.layout, spec, source, old, release=release)
            assert source.bytes_read == missing
            for number, block in blocks.items():
                assert (shards[device].held[number] is block) == (shards[device].held[number].ranges == block.ranges)
            assert bool(old.held) != release
            assert shards[device].held_bytes == added_bytes(layout, spec, None)
            if not release:
                assert nbytes_of(old, shards[device]) == both
        assert_equal_to(run_plan(plan, [shards[device] for device in devices], case.ids, case.decoder_ids), expected)
        if before and not release:  # the old ones still work
            again = [before[(position + turn - 1) % 3] for position in range(3)]
            assert_equal_to(run_plan(last, again, case.ids, case.decoder_ids), expected)
        last = plan


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_draft_of_first_layers_reads_nothing_that_the_device_holds(family, folder):
    """A device that has the model's first layers whole lacks nothing; another one lacks the layers, not the ends."""
    case, path = tiny_case(family), str(folder(family))
    layout = case.layout
    first = layout.first_layers(1)
    spec = shard_spec(draft_plan(0, first.stacks), 0, first.stacks)
    every_layer = sum(shape.num_layers for shape in layout.stacks)
    reference = inference_plan("pipeline", method="local", layers=(every_layer,))
    for plan in (reference, hybrid(case, (1, layout.stacks[0].num_units - 1), (40, 24), (0.5, 0.5), (1,))):
        part = ModelShard(layout, shard_spec(plan, 0, layout.stacks), open_weights(path, layout=layout))
        source = open_weights(path, layout=first)
        draft = ModelShard(first, spec, source, part)
        assert draft.ends is part.ends and (source.bytes_read == 0) == (plan is reference)
        alone = ModelShard(first, spec, open_weights(path, layout=first))
        run = draft_plan(0, first.stacks)
        expected = run_plan(run, [alone], case.ids, case.decoder_ids)
        assert torch.equal(run_plan(run, [draft], case.ids, case.decoder_ids), expected)


def test_slices_move_as_little_as_can_be():
    """A lost device's units go to the others; what they hold stays where it is (Fig. 11)."""
    before = deal(12, (3, 3, 3, 3))
    assert before == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    after = deal(12, (4, 4, 4), before[:3])
    assert after == [[0, 1, 2, 9], [3, 4, 5, 10], [6, 7, 8, 11]]
    back = deal(12, (3, 3, 3, 3), [*after, ()])
    assert sorted(unit for units in back for unit in units) == list(range(12))
    assert [len(set(new).intersection(old)) for new, old in zip(back, after, strict=False)] == [3, 3, 3]
    # Who held everything (scheme 2) leaves the others what they have.
    assert deal(8, (4, 4), [range(8), range(3)]) == [[3, 4, 5, 6], [0, 1, 2, 7]]


def test_weights_under_unknown_names_are_loaded_whole(tmp_path):
    """A checkpoint that transformers can load, but whose names are others', is sliced in memory."""
    case = tiny_case("bert")
    case.model.save_pretrained(tmp_path)
    load_tokenizer("tiny-bert").backend.save(str(tmp_path / "tokenizer.json"))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = open_weights(str(tmp_path))
    assert not source.is_on_disk
    plan = hybrid(case, (1, 3), (40, 24), (0.5, 0.5), (1,))
    shards = [ModelShard(case.layout, shard_spec(plan, position, case.layout.stacks), source) for position in range(2)]
    source.close()  # what was cut out lives on
    assert_equal_to(run_plan(plan, shards, case.ids), case.local())


def test_a_hub_model_is_read_where_the_hub_keeps_it(tmp_path, monkeypatch):
    case = tiny_case("llama")
    snapshot = tmp_path / "models--someone--model" / "snapshots" / ("a" * 40)
    case.model.save_pretrained(snapshot, max_shard_size="60KB")
    (tmp_path / "models--someone--model" / "refs").mkdir()
    (tmp_path / "models--someone--model" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert local_folder("someone/else") is None
    source = open_weights("someone/model")
    assert source.is_on_disk
    plan = hybrid(case, (1, 1), (40, 24), (0.5, 0.5), (1, 2))
    shards = [ModelShard(case.layout, shard_spec(plan, position, case.layout.stacks), source) for position in range(2)]
    assert_equal_to(run_plan(plan, shards, case.ids), case.local())
    source.close()
    for file in sorted(snapshot.glob("*.safetensors"))[1:]:
        file.unlink()
    assert stored_weights("someone/model") is None  # the rest has to be fetched


def missing_norms(layout):
    """Return the bytes that shapes count, whose layers are all equal, but a layer does not have: a first norm."""
    counted = sum(shape.num_layers * shape.layer_bytes for shape in layout.stacks)
    result = counted - 4 * layout.count(set().union(*(block.undivided for block in layout.blocks)))
    assert result in (0, 4 * layout.hidden_size)
    return result


@pytest.mark.parametrize("family", CUT_FAMILIES)
def test_shapes_count_every_weight_once(family):
    """Units, columns, connections and ends together are the model's parameters (but for a pooler, which nothing here
    reads)."""
    case = tiny_case(family)
    layers = sum(
        shape.num_layers * (shape.attention_bytes + shape.feed_forward_bytes + shape.layer_bytes)
        for shape in case.layout.stacks
    )
    named = {name: parameter.numel() for name, parameter in case.model.named_parameters() if "pooler" not in name}
    named |= {name: buffer.numel() for name, buffer in case.model.named_buffers() if name == "final_logits_bias"}
    assert layers + sum(case.layout.end_bytes) == 4 * sum(named.values()) + missing_norms(case.layout)
    reference = inference_plan("pipeline", method="local", layers=(case.layout.num_layers,))
    assert shards_of(case, reference)[0].held_bytes == 4 * sum(named.values())
