"""Fine-tuning with forward passes only: P-RGE and what it is compared with (P-RGE, section 3, Algorithms 1 to 3)."""

from workbench.models.zeroth_order.causal_model import CausalModel
from workbench.models.zeroth_order.config import Copies, Execution, TrainableConfig, ZerothOrderConfig, ZerothOrderTechnique
from workbench.models.zeroth_order.dual_forwarding import DualForwardingModel
from workbench.models.zeroth_order.estimators import FirstOrder, Mezo, Prge, StepResult, passes_of, replay
from workbench.models.zeroth_order.loading import load_backbone, load_causal_model, load_causal_stage
from workbench.models.zeroth_order.losses import PromptLike, Prompts
from workbench.models.zeroth_order.precision import PrecisionWarning, smallest_epsilon, warn_of_rounding
from workbench.models.zeroth_order.saving import TrainedDescription, find_trained, load_trained, save_for_peft, save_trained
from workbench.models.zeroth_order.step_log import LogFile, StepLog, gradients_of, make_log, read_log
from workbench.models.zeroth_order.trainables import Slot, Trainables

__all__ = [
    "CausalModel", "Copies", "DualForwardingModel", "Execution", "FirstOrder", "LogFile", "Mezo", 
    "PrecisionWarning", "Prge", "PromptLike", "Prompts", "Slot", "StepLog", "StepResult", "TrainableConfig", "Trainables",
    "TrainedDescription", "ZerothOrderConfig", "ZerothOrderTechnique", "find_trained", "gradients_of", "load_backbone",
    "load_causal_model", "load_causal_stage", "load_trained", "make_log", "passes_of", "read_log", "replay", "save_for_peft",
    "save_trained", "smallest_epsilon", "warn_of_rounding",
]  # fmt: skip
