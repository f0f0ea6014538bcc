"""The former place of methods.common.scaling."""

from workbench.methods.common.scaling import describe_facts

__all__ = ["describe_facts"]
