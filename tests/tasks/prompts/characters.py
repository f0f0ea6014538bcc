"""A tokenizer that numbers characters, and samples to read with it."""

from dataclasses import replace

from workbench.tasks.prompts import PROMPTS, PromptSample
from workbench.tasks.prompts.encoding import EncodedPrompts, PromptEncoder


class Characters:
    """lead, trail: special tokens in front of and behind every text.  start_id: of a decoder."""

    pad_id = 0

    def __init__(self, *, lead: tuple[int, ...] = (), trail: tuple[int, ...] = (), start_id: int | None = None) -> None:
        self.lead, self.trail, self.start_id = lead, trail, start_id

    def encode(self, texts, pairs=None, *, max_length):
        return [[*self.lead, *codes(text), *self.trail][:max_length] or [self.pad_id] for text in texts]

    def decode(self, ids):
        return "".join(chr(token) for token in ids if token not in (self.pad_id, *self.lead, *self.trail))


def encode_prompts(samples, prompt, encoder, **given) -> EncodedPrompts:
    return PromptEncoder(prompt, encoder, **given).split(samples)


def codes(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


# Characters tell " terrible" and " great" apart only without the space.
FILM = replace(PROMPTS["sst2"], text="{sentence} It was ", words=("terrible", "great"))
FILMS = tuple(
    PromptSample(sample_id=10 + at, fields={"sentence": text}, label=at % 2)
    for at, text in enumerate(("bad", "so good", "so so bad"))
)
CHOICES = (
    PromptSample(
        sample_id=7,
        fields={"premise": "It fell", "conjunction": "because", "candidate1": "he hit it", "candidate2": "I did"},
        label=1,
    ),
    PromptSample(
        sample_id=8,
        fields={"premise": "It stood up", "conjunction": "so", "candidate1": "we sat", "candidate2": "it rains"},
        label=0,
    ),
)
QUESTIONS = (
    PromptSample(
        sample_id=3, fields={"title": "T", "context": "aa bb", "question": "Who?", "answer": "me"}, answers=("me", "us")
    ),
    PromptSample(
        sample_id=4,
        fields={"title": "T", "context": "c", "question": "When, and where?", "answer": "now"},
        answers=("now",),
    ),
)
