"""Fine-tuning with forward passes only: P-RGE and the methods with which it is compared (P-RGE, section 3, Algorithms 1
to 3).
"""

from workbench.methods.p_rge.zeroth_order.causal_model import CausalModel, PromptLike
from workbench.methods.p_rge.zeroth_order.directions import Directions
from workbench.methods.p_rge.zeroth_order.estimators import FirstOrder, Mezo, Prge, StepResult, replay
from workbench.methods.p_rge.zeroth_order.loading import (
    find_trained,
    load_causal_model,
    load_trained,
    metadata_of,
    save_for_peft,
)
from workbench.methods.p_rge.zeroth_order.perturbation import passes_of
from workbench.methods.p_rge.zeroth_order.rounding import PrecisionWarning, smallest_epsilon, warn_of_rounding
from workbench.methods.p_rge.zeroth_order.step_log import (
    Copies,
    LogFile,
    StepLog,
    ZerothOrderConfig,
    gradients_of,
    make_log,
    read_log,
)
from workbench.methods.p_rge.zeroth_order.trainables import TrainableConfig
