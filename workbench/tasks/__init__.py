"""Tasks: data, tokenization, seeded mini-batches and metrics."""
