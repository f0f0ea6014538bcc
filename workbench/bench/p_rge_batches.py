"""Batches of prompts that all have one length: embedded sentences put end to end, a label word behind them (P-RGE, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from workbench.models.loading import load_tokenizer
from workbench.tasks.prompts import EncodedPrompts, PromptBatch, collate_prompts, encode_prompts, load_prompt_task
from workbench.tasks.prompts.encoding import EncodedRow

SENTENCES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Rows of exactly one length."""

    encoded: EncodedPrompts

    def rows(self, count: int) -> PromptBatch:
        """Return a batch of so many rows."""
        return collate_prompts(self.encoded, [index % len(self.encoded) for index in range(count)])


def prompts(model: str, length: int, loss: str = "vocabulary") -> Prompts:
    """Return prompts of `length` tokens for a model: its tokens of real sentences, cut, the prompt's own end behind them.

    loss: 'vocabulary', or 'label_words' alone.
    """
    task = load_prompt_task("sentiment", train_samples=SENTENCES)
    encoded = encode_prompts(task.train, task.prompt, load_tokenizer(model), is_causal=True, max_length=length)
    stream = list(chain.from_iterable(row.ids for row in encoded.rows))
    count = min(len(stream) // length, len(encoded))
    rows = []
    for index in range(count):
        end = encoded.rows[index]
        tail = end.ids[-min(len(end.ids), length) :]
        filling = stream[index * length : index * length + length - len(tail)]
        rows.append(EncodedRow(ids=(*filling, *tail), targets=end.targets, first_position=length - 1))
    return Prompts(
        encoded=EncodedPrompts(
            rows=tuple(rows),
            labels=encoded.labels[:count],
            sample_ids=encoded.sample_ids[:count],
            pad_id=encoded.pad_id,
            reader=encoded.reader,
            label_ids=encoded.label_ids,
            choices=encoded.label_ids if loss == "label_words" else (),
        )
    )
