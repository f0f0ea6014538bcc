"""Hugging Face models as layer stacks, and the parallel adapters that run next to them."""
