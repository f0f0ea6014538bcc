"""P-RGE's machines from one documented set of constants: A100, Jetson Orin Nano, OnePlus 12 (P-RGE, section 4, Table
14).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.core.catalogue import data_folder
from workbench.core.published import constants_of
from workbench.methods.p_rge.analytic import Machine

Precision = Literal["float16", "int8", "nf4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """data/papers/p_rge/constants.toml, which states the source of each value."""

    logit_bytes: float
    first_order_logit_bytes: float
    copy_bytes: float
    workspace_bytes: float
    kept_share: float
    full_bytes: float
    memory_bytes_per_s: float
    a100_flops_per_s: float
    a100_layer_s: float
    a100_step_s: float
    a100_nf4_per_s: float
    a100_int8_per_s: float
    appendix_flops_per_s: float
    sweep_s_per_param: float
    tasks_layer_s: float
    tasks_adapter_layer_s: float
    tasks_step_s: float
    adapter_share: float
    jetson_memory_bytes_per_s: float
    jetson_flops_per_s: float
    jetson_layer_s: float
    jetson_nf4_per_s: float
    oneplus_memory_bytes_per_s: float
    oneplus_flops_per_s: float
    oneplus_besides_bytes: float
    oneplus_token_bytes: float
    rank: int
    batch_size: int
    steps: int
    nf4_bytes: float
    int8_bytes: float

    def a100(self, precision: Precision = "float16") -> Machine:
        """Return the server of Tables 12 and 13."""
        return Machine(
            flops_per_s=self.a100_flops_per_s,
            memory_bytes_per_s=self.memory_bytes_per_s,
            layer_s=self.a100_layer_s,
            dequantized_per_s={"float16": 0.0, "int8": self.a100_int8_per_s, "nf4": self.a100_nf4_per_s}[precision],
            step_s=self.a100_step_s,
        )

    def appendix(self) -> Machine:
        """Return the server implied by Table 6."""
        return Machine(
            flops_per_s=self.appendix_flops_per_s,
            memory_bytes_per_s=self.memory_bytes_per_s,
            layer_s=self.a100_layer_s,
            sweep_s_per_param=self.sweep_s_per_param,
            step_s=self.a100_step_s,
        )

    def tasks(self) -> Machine:
        """Return the server of Tables 15 and 16.  Its rate is that of a pass without adapters."""
        return Machine(
            flops_per_s=self.a100_flops_per_s * (1 + self.adapter_share),
            memory_bytes_per_s=self.memory_bytes_per_s,
            layer_s=self.tasks_layer_s,
            adapter_layer_s=self.tasks_adapter_layer_s,
            adapter_share=self.adapter_share,
            sweep_s_per_param=self.sweep_s_per_param,
            step_s=self.tasks_step_s,
        )

    def jetson(self) -> Machine:
        """Return the Jetson of Table 4.  Preparing an NF4 product does not overlap the arithmetic."""
        return Machine(
            flops_per_s=self.jetson_flops_per_s,
            memory_bytes_per_s=self.jetson_memory_bytes_per_s,
            layer_s=self.jetson_layer_s,
            is_asynchronous=False,
            dequantized_per_s=self.jetson_nf4_per_s,
        )

    def oneplus(self) -> Machine:
        """Return the phone of Table 5."""
        return Machine(flops_per_s=self.oneplus_flops_per_s, memory_bytes_per_s=self.oneplus_memory_bytes_per_s)

    def weight_bytes(self, precision: Precision) -> float:
        """Return the bytes of a stored weight."""
        return {"float16": 2.0, "int8": self.int8_bytes, "nf4": self.nf4_bytes}[precision]


def load_constants() -> Constants:
    """Read the constants."""
    return constants_of(data_folder() / "papers/p_rge/constants.toml", Constants)
