"""A first policy by imitation, so that reinforcement starts where rewards are not all zero; and a cache of it.

Keeps true: only action tokens are imitated; the result is a function of model, sequences and settings; a cached
folder is whole or absent, also when two processes make the same one at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollart.algo.packing import dealt
from rollart.backends.torch.optimizer import apply_gradient, autocast, make_optimizer, rate_at
from rollart.backends.torch.scoring import action_logprobs, pack_sequences
from rollart.backends.torch.settings import WarmStartSettings
from rollart.backends.torch.transformer import Transformer
from rollart.core.clock import stream
from rollart.core.errors import ConfigError
from rollart.observe.run_folder import sync

MARKER = "complete"


def imitate(model: Transformer, sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
            settings: WarmStartSettings, threads: int,
            progress: Callable[[int, int, float], None] = lambda step, steps, loss: None) -> dict[str, float]:
    """Train `model` in place on (ids, mask) pairs, each [T_i]: cross-entropy of the tokens with mask 1, averaged over a
    sequence and then over sequences, so that tasks with few action tokens weigh as much as talkative ones.

    `progress(step, steps, loss)` is called after each of the `steps`. Returns steps, tokens (of all passes) and the
    loss (nats per action token) of the first and of the last step. On the CPU each of `threads` threads computes the
    gradient of its part of a batch: a small model gains little from threads inside its products. Raises ConfigError
    without sequences or when the loss is not finite.
    """
    if not sequences:
        raise ConfigError("a warm start needs demonstrations; got none: set demonstrations, or a domain that has them")
    device = next(model.parameters()).device
    workers = threads if device.type == "cpu" else 1
    optimizer = make_optimizer(model, betas=(0.9, 0.99), eps=1e-8, weight_decay=settings.weight_decay)
    lengths = [len(ids) for ids, _ in sequences]
    batches = _batches(lengths, settings)
    steps, losses = len(batches), []
    warmup = max(1, steps // 20)
    with ThreadPoolExecutor(workers, "imitate", torch.set_num_threads, (1,)) as pool:
        for step, members in enumerate(batches):
            parts = [[sequences[i] for i in part] for part in dealt(members, lengths, min(workers, len(members)))]
            results = list(pool.map(partial(_gradient, model, len(members)), parts))
            losses.append(sum(loss for loss, _ in results))
            for parameter, *gradients in zip(model.parameters(), *(g for _, g in results), strict=True):
                parameter.grad = torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0]
            rate = settings.learning_rate * rate_at(step, settings.schedule, warmup, max(steps, warmup + 1))
            if not math.isfinite(apply_gradient(model, optimizer, rate, 1.0)):
                raise ConfigError(f"warm start step {step}: the loss is not finite; lower learning_rate "
                                  f"(now {settings.learning_rate:g})")
            progress(step + 1, steps, losses[-1])
    return {"steps": float(steps), "tokens": float(settings.passes * sum(len(ids) for ids, _ in sequences)),
            "first_loss": losses[0], "last_loss": losses[-1]}


def _gradient(model: Transformer, count: int, part: Sequence[tuple[Sequence[int], Sequence[int]]],
              ) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Loss and gradient of a part of a batch that has `count` sequences in all."""
    device = next(model.parameters()).device
    with autocast("auto", device):
        packed = pack_sequences(part, device)
        logprobs, _ = action_logprobs(model, packed, 1.0)
    actions = torch.tensor(packed.counts, device=device)
    loss = -(logprobs / actions.repeat_interleave(actions)).sum() / count
    return float(loss.detach()), torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)


def _batches(lengths: Sequence[int], settings: WarmStartSettings) -> list[list[int]]:
    """Indices of each step. Every pass deals all sequences out in a new order, so that each step is a mixture."""
    batches: list[list[int]] = []
    for number in range(settings.passes):
        order = list(range(len(lengths)))
        stream(settings.seed, "imitate", number).shuffle(order)
        room = 0
        for index in order:
            if lengths[index] > room:
                batches.append([])
                room = settings.batch_tokens
            batches[-1].append(index)
            room -= lengths[index]
    return batches


def cached(folder: Path, key: Mapping[str, Any]) -> Path | None:
    """The folder that `store` made for `key`, if there is a whole one. `key`: JSON, all that the result depends on."""
    found = folder / _name(key)
    return found if os.path.exists(found / MARKER) else None  # False too where it may not be looked at


def store(folder: Path, key: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """Let `write` fill a folder and give it its name in one rename, marker last. If another process was first, its
    folder is kept. Nothing is left behind when `write` fails."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / _name(key)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
    try:
        write(made)
        (made / "key.json").write_text(json.dumps(key, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        sync(*made.rglob("*"), made)
        (made / MARKER).touch()
        sync(made / MARKER, made)
        made.chmod(0o755)
        if target.exists() and cached(folder, key) is None:  # somebody removed a part of it
            shutil.rmtree(target, ignore_errors=True)
        try:
            made.rename(target)
        except OSError:
            if cached(folder, key) is None:
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _name(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
