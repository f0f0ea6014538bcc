"""Write a conversation as the text that a model was trained to continue: its own chat template, or Alpaca's prompt.

A model's files name its template (Jinja), which transformers' `apply_chat_template` renders; so does this module.
A model without one gets the prompt with which instruction tuning trains it (Alpaca's; Taori et al., 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from workbench.core.errors import ConfigError

Role = Literal["system", "user", "assistant"]
TEMPLATE_FILE = "chat_template.jinja"
_PREAMBLE = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
_PAIRED = ", paired with an input that provides further context"
ALPACA = (
    "{{ '" + _PREAMBLE.format("").replace("\n", "\\n") + "' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Response:\\n' + message['content'] + '\\n\\n' }}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
"""The template of a model without one: Alpaca's prompt, one instruction and response for each turn."""


class Message(TypedDict):
    """One turn of a conversation."""

    role: Role
    content: str


def alpaca_prompt(instruction: str, input: str = "") -> str:
    """Return Alpaca's prompt, which the output follows."""
    input_section = f"### Input:\n{input}\n\n" if input else ""
    preamble = _PREAMBLE.format(_PAIRED if input else "")
    return f"{preamble}### Instruction:\n{instruction}\n\n{input_section}### Response:\n"


def render(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
    """Return a conversation's text, up to where the model's answer begins.

    special_tokens: such as bos_token, as the template names them.  Raises ConfigError for a conversation without a
    message, for an unknown role, and if the template refuses the conversation.
    """
    request = f"An answer to a conversation of {len(messages)} messages was asked for."
    if not messages:
        raise ConfigError(request, "There is nothing to answer.", "Give at least one message.")
    for message in messages:
        if message.get("role") not in get_args(Role) or not isinstance(message.get("content"), str):
            raise ConfigError(
                request,
                f"A message has the role {message.get('role')!r} and a {type(message.get('content')).__name__}.",
                f"Give texts, and the roles {', '.join(get_args(Role))}.",
            )
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        [text], _ = render_jinja_template(
            conversations=[list(messages)], chat_template=template, add_generation_prompt=True, **special_tokens
        )
    except (TemplateError, TypeError) as error:
        raise ConfigError(
            request, f"The model's chat template refuses it: {error}.", "Change the roles or their order."
        ) from error
    return text


def stored_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the template in a model's folder, None if it has none.  settings: its tokenizer_config.json."""
    path, named = folder / TEMPLATE_FILE, settings.get("chat_template")
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(named, list):  # several templates by name
        named = next((template.get("template") for template in named if template.get("name") == "default"), None)
    return named if isinstance(named, str) else None
