"""The seed of each query's noise: devices share a perturbation by its seed alone (P-RGE, Algorithm 1, line 5; MeZO's
seed trick).

Seeds have 32 bits, because torch's generator on CPUs uses only 32 bits of a seed.
"""

from __future__ import annotations

from workbench.core.errors import ConfigError

MAX_QUERIES = 1 << 12
MAX_STEPS = 1 << 20

_BITS = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


def query_seed(seed: int, step: int, query: int) -> int:
    """Return the 32-bit seed of a step's query (both from 0); within a run no two queries share one.

    seed: the run's seed, any integer.  Raises ConfigError for a step or query outside [0, MAX_STEPS) and [0,
    MAX_QUERIES).
    """
    if not (0 <= step < MAX_STEPS and 0 <= query < MAX_QUERIES):
        raise ConfigError(
            f"The noise of query {query} in step {step} was asked for.",
            f"Seeds differ for {MAX_STEPS} steps of {MAX_QUERIES} queries.",
            "Lower the number of steps or queries.",
        )
    key = _mix64(seed & 0xFFFFFFFFFFFFFFFF)
    # Each operation is invertible, so different indices give different seeds under the same key.
    return _mix32((_mix32((step * MAX_QUERIES + query) ^ (key & _BITS)) + (key >> 32)) & _BITS)


def subspace_seed(seed: int, number: int) -> int:
    """Return the 32-bit seed of the matrices that all directions of some steps share (LOZO's V), counted by number."""
    return _mix32(_mix64((seed ^ _GOLDEN) & 0xFFFFFFFFFFFFFFFF) + number & _BITS)


def _mix32(value: int) -> int:
    """MurmurHash3's finalizer (Appleby, 2011), a bijection of 32 bits."""
    value = (value ^ value >> 16) * 0x85EBCA6B & _BITS
    value = (value ^ value >> 13) * 0xC2B2AE35 & _BITS
    return value ^ value >> 16


def _mix64(value: int) -> int:
    """Splitmix64's finalizer (Steele, Lea, Flood, 2014)."""
    value = (value + _GOLDEN) & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31
