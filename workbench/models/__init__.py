"""Hugging Face models seen as layer stacks, and the parallel adapters beside them."""
