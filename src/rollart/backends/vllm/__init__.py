"""vLLM engines: in this process (`engine`), or behind an OpenAI-compatible server (`server`)."""
