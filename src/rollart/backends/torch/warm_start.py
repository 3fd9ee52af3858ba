"""A first policy by imitation, so that reinforcement starts where rewards are not all zero; and a cache of it.

Keeps true: only action tokens are imitated; the result is a function of model, sequences and settings; a cached
folder is whole or absent, also when two processes make the same one at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollart.backends.torch.learner import apply_gradient, autocast, make_optimizer, rate_at, sync_folder
from rollart.backends.torch.losses import action_logprobs, pack_sequences
from rollart.backends.torch.settings import WarmStartSettings
from rollart.backends.torch.transformer import Transformer
from rollart.core.clock import stream
from rollart.core.errors import ConfigError

MARKER = "complete"


def imitate(model: Transformer, sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
            settings: WarmStartSettings, threads: int,
            progress: Callable[[int, int, float], None] = lambda step, steps, loss: None) -> dict[str, float]:
    """Train `model` in place on (ids, mask) pairs, each [T_i]: mean cross-entropy of the tokens with mask 1.

    `progress(step, steps, loss)` is called after each of the `steps`. Returns steps, tokens (of all passes) and the
    loss (nats per action token) of the first and of the last step. Runs in the calling thread, with `threads` CPU
    threads. Raises ConfigError without sequences or when the loss is not finite.
    """
    if not sequences:
        raise ConfigError("a warm start needs demonstrations; got none: set demonstrations, or a domain that has them")
    torch.set_num_threads(threads)
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, betas=(0.9, 0.99), eps=1e-8, weight_decay=settings.weight_decay)
    batches = _batches([len(ids) for ids, _ in sequences], settings)
    steps, losses = len(batches), []
    warmup = max(1, steps // 20)
    for step, members in enumerate(batches):
        packed = pack_sequences([sequences[i] for i in members], device)
        with autocast("auto", device):
            logprobs, _ = action_logprobs(model, packed, 1.0)
        loss = -logprobs.mean()
        loss.backward()
        losses.append(float(loss.detach()))
        rate = settings.learning_rate * rate_at(step, settings.schedule, warmup, max(steps, warmup + 1))
        if not math.isfinite(apply_gradient(model, optimizer, rate, 1.0)):
            raise ConfigError(f"warm start step {step}: the loss is not finite; lower learning_rate "
                              f"(now {settings.learning_rate:g})")
        progress(step + 1, steps, losses[-1])
    return {"steps": float(steps), "tokens": float(settings.passes * sum(len(ids) for ids, _ in sequences)),
            "first_loss": losses[0], "last_loss": losses[-1]}


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
    return found if (found / MARKER).exists() else None


def store(folder: Path, key: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """Let `write` fill a folder and give it its name in one rename, marker last. If another process was first, its
    folder is kept. Nothing is left behind when `write` fails."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / _name(key)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
    try:
        write(made)
        (made / "key.json").write_text(json.dumps(key, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        sync_folder(made)
        (made / MARKER).touch()
        sync_folder(made)
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
