"""Importing this module imports peft, as models/lora.py does: for the process from which engines are forked."""

from workbench.models.lora import require_peft

require_peft()
