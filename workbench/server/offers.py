"""The offers of a server: a model in this process, or on devices of a method that serves texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Fidelity
from workbench.core.methods import attribute, declaration_of, method_with
from workbench.core.run_folder import scratch_folder
from workbench.methods.common.merged import export_merged
from workbench.methods.common.result_file import find_result, read_result
from workbench.methods.common.services import Panel, ServeTexts
from workbench.methods.common.text_model import TextModel, load_text_model
from workbench.methods.option_values import read_options
from workbench.models.configuration import model_facts, require_known
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.speculation import DraftChoice
from workbench.models.tokenizer import TextTokenizer
from workbench.server.app import Offer
from workbench.server.desk import Desk, Limits, Metrics


class OneProcess:
    """A Panel without devices."""

    def state(self) -> dict[str, Any]:
        """Return that this process computes."""
        return {"where": "one process on this computer", "svg": "", "devices": []}

    def act(self, device: str, action: str) -> None:
        """Raise ConfigError."""
        raise ConfigError(f"'{action}' of '{device}' was asked for.", "There are no devices.", "Serve with --cluster.")


@contextmanager
def offered(
    place: str,
    cluster: Cluster | None,
    fidelity: Fidelity,
    *,
    token: str,
    say: Callable[[str], None],
    method: str = "",
    options: Mapping[str, Any] | None = None,
    draft: str = "",
) -> Iterator[Offer]:
    """Load a model, or start the devices of a cluster with it, and end them afterwards.

    place: a model's name or a run's folder.  method: divides the model over the devices, with these options; by default
    the first that serves texts.  draft: see DraftChoice.read.
    Raises ConfigError for a model that can neither write nor embed texts, and as the loaders and the planner do.
    """
    limits = Limits()
    panel: Panel = OneProcess()
    result = find_result(place)
    if result is None:
        require_known(place)
        facts = model_facts(place)
        if not facts.is_causal and facts.num_encoder_layers is None:
            if draft:
                raise ConfigError("A draft was asked for.", f"'{place}' writes no texts.", "Leave --draft out.")
            yield _embedding(place, token, limits)
            return
    with ExitStack() as stack:
        if cluster is None:
            say(f"Loading {place}")
            model = load_text_model(place, draft)
        else:
            method = method_with("serves_texts", method)
            declared, name = declaration_of(method), place
            settings = read_options(method, declared.options, options or {})
            if result is not None:
                if draft:
                    DraftChoice.read(draft, read_result(result).job.model)  # it is refused before anything is merged
                folder = stack.enter_context(scratch_folder()) / "merged"
                say(f"Merging {place}: devices read weights, not adapters")
                name = export_merged(place, folder, "float16").path
            end_id = load_tokenizer(name).end_id  # type: ignore[union-attr]  # a model of words
            ends = [] if end_id is None else [end_id]
            serve_texts: ServeTexts = attribute(declared.serves_texts)
            devices = stack.enter_context(
                serve_texts(name, cluster, fidelity, options=settings, ends=ends, say=say, draft=draft)
            )
            model, panel = TextModel(name, devices.writer, devices.ends, devices.passes), devices.panel
        desk = stack.enter_context(Desk(model, limits, Metrics(passes=model.passes)))
        yield Offer(
            name=place if result is None else Path(place).name,
            desk=desk,
            tokenizer=model.tokenizer,
            panel=panel,
            draft=draft,
            token=token,
            body_bytes=limits.body_bytes,
        )


def _embedding(name: str, token: str, limits: Limits) -> Offer:
    tokenizer = load_tokenizer(name)
    if not isinstance(tokenizer, TextTokenizer):
        raise ConfigError(f"'{name}' over HTTP was asked for.", "It reads pictures.", "Choose a model of texts.")
    stack, longest = load_stack(name), model_facts(name).max_length

    def embed(texts: Sequence[str]) -> tuple[np.ndarray, int]:
        rows = [torch.tensor([ids]) for ids in tokenizer.encode(texts, max_length=longest)]
        with torch.inference_mode():
            means = torch.cat([stack(ids, torch.ones_like(ids))[0].float().mean(1) for ids in rows])
        return torch.nn.functional.normalize(means).numpy(), sum(ids.shape[1] for ids in rows)

    return Offer(
        name=name,
        desk=None,
        tokenizer=tokenizer,
        panel=OneProcess(),
        embed=embed,
        token=token,
        body_bytes=limits.body_bytes,
    )
