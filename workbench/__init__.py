"""Edge LLM Workbench: learn, try out and compare how language models are fine-tuned and served on small devices."""

__version__ = "0.1.0"
