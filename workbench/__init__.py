"""Edge LLM Workbench: learn, run and compare methods that fine-tune and serve language models on small devices."""

__version__ = "0.1.0"
