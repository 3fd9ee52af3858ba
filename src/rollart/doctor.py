"""What is installed here, what works, and what would enable the rest."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys

from rich.table import Table
from rich.text import Text

from rollart.sandbox.launch import INSTALL, reason
from rollart.terminal import Terminal

PARTS = (
    # module, distribution, extra, what it enables
    ("torch", "torch", "torch", "the embedded engine and learner"),
    ("numpy", "numpy", "torch", "the embedded engine and learner"),
    ("safetensors", "safetensors", "torch", "reading and writing checkpoints"),
    ("transformers", "transformers", "hf", "tokenizers and chat templates of Hugging Face checkpoint folders"),
    ("peft", "peft", "lora", "training adapters only ([lora] in a recipe)"),
    ("gymnasium", "gymnasium", "envs", "the frozen_lake domain"),
    ("ray", "ray", "ray", "running on a cluster (rollart train --ray)"),
    ("bm25s", "bm25s", "envs", "the search_qa and webshop domains"),
    ("rapidfuzz", "rapidfuzz", "envs", "the webshop domain"),
    ("boto3", "boto3", "serverless", "rewards on AWS Lambda"),
    ("functions_framework", "functions-framework", "serverless", "rollart reward serve"),
)


def check_up(console: Terminal) -> bool:
    """Print the table. True if the quickstart can run here."""
    table = Table("part", "state", "what it is for", title="RollArt doctor", title_justify="left")
    table.add_row(f"Python {platform.python_version()}",
                  _state("ok" if sys.version_info >= (3, 11) else "", "needs 3.11 or newer"), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    table.add_row(f"{cores} CPU cores",
                  _state("ok" if cores >= 2 else "", "one core: rollout and training take turns"), "")
    needed = True
    for module, distribution, extra, use in PARTS:
        try:
            importlib.import_module(module)
            state = _state(importlib.metadata.version(distribution))
        except ImportError as missing:
            needed = needed and extra in ("hf", "lora", "serverless", "ray")
            state = _state("", f"{missing}: pip install 'rollart[{extra}]'")
        table.add_row(module, state, use)
    kind = next((kind for kind in ("bubblewrap", "podman", "docker") if not reason(kind)), "")
    table.add_row("sandbox", _state(kind, f"{reason('bubblewrap')}: {INSTALL}"),
                  "running code that a model wrote: maths, swe, unit tests")
    table.add_row("GPU", _gpu(), "engine and learner use it (device = auto)")
    console.print(table)
    console.print("ready: make quickstart" if needed else "not ready: install what is missing above")
    return needed


def _state(good: str, remedy: str = "") -> Text:
    return Text(good, "green") if good else Text(remedy, "yellow")


def _gpu() -> Text:
    try:
        import torch
    except ImportError:
        return Text("unknown without torch")
    return _state(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else Text("none; the CPU is used")
