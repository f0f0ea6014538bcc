"""Training inside an inference engine: the dual-forwarding model as an ExecuTorch program (P-RGE, section 3.3)."""

from workbench.models.inference_engine.config import EngineBackend, EngineConfig, EngineDescription, EngineNoise, EngineSlot
from workbench.models.inference_engine.export import ExportResult, export_program
from workbench.models.inference_engine.packages import require_executorch
from workbench.models.inference_engine.trainer import EngineStep, EngineTrainer, philox_noise, replayed

__all__ = [
    "EngineBackend", "EngineConfig", "EngineDescription", "EngineNoise", "EngineSlot", "EngineStep", "EngineTrainer", "ExportResult",
    "export_program", "philox_noise", "replayed", "require_executorch",
]  # fmt: skip
