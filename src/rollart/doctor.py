"""What is installed here, what works, and what would enable the rest."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollart.sandbox.launch import INSTALL, reason

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


def check_up(console: Console) -> bool:
    """Print the table. True if the quickstart can run here."""
    table = Table("part", "state", "what it is for", title="RollArt doctor", title_justify="left")
    table.add_row(f"Python {platform.python_version()}", _state(sys.version_info >= (3, 11), "needs 3.11 or newer"), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    table.add_row(f"{cores} CPU cores", _state(cores >= 2, "one core: rollout and training take turns"), "")
    needed = True
    for module, distribution, extra, use in PARTS:
        try:
            importlib.import_module(module)
            state = f"[green]{importlib.metadata.version(distribution)}[/]"
        except ImportError as missing:
            needed = needed and extra in ("hf", "lora", "serverless", "ray")
            state = f"[yellow]{missing}: pip install 'rollart\\[{extra}]'[/]"
        table.add_row(module, state, escape(use))
    kind = next((kind for kind in ("bubblewrap", "podman", "docker") if not reason(kind)), "")
    table.add_row("sandbox", f"[green]{kind}[/]" if kind else f"[yellow]{reason('bubblewrap')}: {INSTALL}[/]",
                  "running code that a model wrote: maths, swe, unit tests")
    table.add_row("GPU", _gpu(), "engine and learner use it (device = auto)")
    console.print(table)
    console.print("ready: make quickstart" if needed else "not ready: install what is missing above")
    return needed


def _state(good: bool, remedy: str) -> str:
    return "[green]ok[/]" if good else f"[yellow]{remedy}[/]"


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "unknown without torch"
    return f"[green]{torch.cuda.get_device_name(0)}[/]" if torch.cuda.is_available() else "none; the CPU is used"
