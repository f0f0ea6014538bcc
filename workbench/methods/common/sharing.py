"""Push a run's trained model to the Hugging Face hub, and load it from there.

Uploaded are the files of the run's adapter/: the weights, the tokenizer, result.json, and the model card that was made
from the report.  Paths of this computer are taken out before.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from workbench.assets.hub import hub_endpoint, hub_is_reachable
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.run_folder import scratch_folder
from workbench.core.serial import shown
from workbench.methods.common.model_card import HUB_NAMES, Result
from workbench.methods.common.result import LoadedResult, load_result
from workbench.methods.common.result_file import find_result, required_result, write_description
from workbench.models.lora import PEFT_CONFIG, read_peft_config, write_peft_config
from workbench.models.saving import WHOLE_MODEL


def push_to_hub(place: Path | str, repository: str, *, public: bool = False, token: str | None = None) -> str:
    """Upload a run's result to a model repository of the hub and return its address.

    place: the run's folder, or adapter/ in it.  repository: OWNER/NAME; it is made, private unless `public`, if it does
    not exist.  token: None takes that of `hf auth login`, or $HF_TOKEN.
    Raises ConfigError if there is no result, its base model is on this computer only, or nobody is logged in;
    MissingDataError if the hub cannot be reached or refuses.
    """
    request = f"Pushing '{shown(str(place), 200)}' to '{shown(repository)}' was asked for."
    folder, about = required_result(place, request)
    if Path(about.job.model).is_absolute() and not (folder / WHOLE_MODEL).is_file():
        problem = "Its base model is a folder of this computer, which nobody else has."
        raise ConfigError(request, problem, "Train over a model of the hub, or merge it: `workbench export --merge`.")
    _require_online(request)
    from huggingface_hub import HfApi, get_token

    if token is None and get_token() is None:
        raise ConfigError(request, "Nobody is logged in to the hub.", "Run `hf auth login`, or set HF_TOKEN.")
    api = HfApi(endpoint=hub_endpoint(), token=token)
    with scratch_folder() as scratch, _refusals(request):
        shared = scratch / "model"
        shutil.copytree(folder, shared)
        _take_paths_out(shared, about)
        api.create_repo(repository, private=not public, exist_ok=True)
        message = f"{about.technique} of {Path(about.job.model).name} for {about.job.task}"
        api.upload_folder(repo_id=repository, folder_path=shared, commit_message=message)
    return f"{hub_endpoint()}/{repository}"


def from_pretrained(place: Path | str, *, token: str | None = None) -> LoadedResult:
    """Return a trained model that can predict: of a folder, or of a repository OWNER/NAME that push_to_hub has made.

    Raises as load_result does, and MissingDataError if the hub cannot be reached or refuses.
    """
    if find_result(place) is not None:
        return load_result(place)
    request = f"The result '{shown(str(place), 200)}' was asked for."
    if Path(place).exists() or str(place).count("/") != 1:
        return load_result(place)  # its error names the missing file
    _require_online(request)
    from huggingface_hub import snapshot_download

    with _refusals(request):
        folder = snapshot_download(str(place), endpoint=hub_endpoint(), token=token)
    return load_result(folder)


def _take_paths_out(folder: Path, about: Result) -> None:
    """Write result.json, the card and peft's description again, without paths of this computer."""
    base = HUB_NAMES.get(about.job.model, about.job.model)
    if (folder / PEFT_CONFIG).is_file():
        write_peft_config(folder, read_peft_config(folder) | {"base_model_name_or_path": base})
    data, model = about.job.data, about.job.model
    job = replace(about.job, data=None if data is None else Path(data).name, model=_named(model))
    about = replace(about, job=job)
    write_description(folder, about)


def _named(model: str) -> str:
    return Path(model).name if Path(model).is_absolute() else model


def _require_online(request: str) -> None:
    if not hub_is_reachable():
        problem = f"The hub ({hub_endpoint()}) does not answer, or HF_HUB_OFFLINE is set."
        raise MissingDataError(request, problem, "Connect this computer to the network and repeat.")


@contextmanager
def _refusals(request: str) -> Iterator[None]:
    """Turn what the hub's client raises into one error of ours."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(request, shown(str(error), 200), "Name a repository as OWNER/NAME.") from error
    except HfHubHTTPError as error:
        problem = f"The hub refused: {shown(str(error).splitlines()[0], 200)}."
        raise MissingDataError(request, problem, "Check the name, and what your token may do.") from error
