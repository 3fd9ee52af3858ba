"""How weights are stepped: learning rate schedule, precision of the forward pass, AdamW, gradient clipping.

Keeps true: everything is a function of the step's number and the settings, so there is no schedule state to save.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def rate_at(step: int, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The share of the learning rate that step 0, 1, 2, ... uses; 0 from `total_steps` on."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


def half_precision(precision: str, device: torch.device) -> bool:
    """Whether products are in bfloat16; `auto` takes it on a GPU that has it, never on a CPU: there the embedded engine
    samples in float32, and one recipe is to give one result whatever units the processor has."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bfloat16"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass over float32 weights."""
    return torch.autocast(device.type, torch.bfloat16) if half_precision(precision, device) else nullcontext()


def make_optimizer(model: torch.nn.Module, *, betas: tuple[float, float], eps: float,
                   weight_decay: float) -> torch.optim.AdamW:
    """AdamW, decaying matrices and not vectors. The learning rate is set before each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=True)


def apply_gradient(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: float, max_norm: float) -> float:
    """One optimizer step at learning rate `rate`; returns the gradient's norm before clipping, over all ranks where the
    parameters are sharded. Clears the gradient.

    A norm that is not finite changes nothing.
    """
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    norm = float(getattr(total, "full_tensor", lambda: total)())
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def moments(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """AdamW's state by the parameter's name, sharded as the parameter is; zeros before its first step. In place."""
    for parameter in (p for p in module.parameters() if p.requires_grad and not optimizer.state[p]):
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device),
                                      "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    return {name: optimizer.state[p] for name, p in module.named_parameters() if p.requires_grad}
