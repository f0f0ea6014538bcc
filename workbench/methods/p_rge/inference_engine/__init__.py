"""Training inside an inference engine: the dual-forwarding model as an ExecuTorch program (P-RGE, section 3.3)."""

from workbench.methods.p_rge.inference_engine.config import EngineBackend, EngineConfig, require_executorch
from workbench.methods.p_rge.inference_engine.trainer import (
    EngineStep,
    EngineTrainer,
    direction,
    export_program,
    philox_noise,
    replayed,
)
