"""RollArt: disaggregated, asynchronous, multi-task agentic RL training of LLMs."""

__version__ = "0.1.0"
