"""Batched sampling by inverse distribution function: one uniform number a row, so that a draw belongs to its row.

Keeps true (L9): the log-prob that is returned is that of the distribution the token was drawn from: temperature first,
then top-k, then top-p, then renormalised. Greedy rows (temperature 0) have no such distribution: they take the most
likely token, and their log-prob is that of temperature 1 without top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.core.types import Sampling

_OFF = 2.0  # a top_p that keeps everything, whatever the rounding of the cumulative sum


@dataclass(frozen=True, slots=True)
class Rows:
    """The sampling parameters of a batch on its device. What no row needs is None, and then costs nothing."""

    temperature: Tensor | None  # [B, 1]
    greedy: Tensor | None  # [B] bool
    top_k: Tensor | None  # [B, 1]
    top_p: Tensor | None  # [B, 1]

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocabulary: int, device: torch.device | str = "cpu") -> Rows:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        greedy = [row.temperature == 0 for row in rows]
        filters = any((row.top_k or row.top_p < 1) and row.temperature for row in rows)
        return cls(
            temperature=column([row.temperature or 1.0 for row in rows])
            if any(row.temperature not in (0, 1) for row in rows) else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=column([(row.temperature and row.top_k) or vocabulary for row in rows]) if filters else None,
            top_p=column([row.top_p if row.temperature and row.top_p < 1 else _OFF for row in rows])
            if filters else None)


def sample(logits: Tensor, rows: Rows, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and their log-probs [B] float32 from logits [B, V] and uniforms [B] in [0, 1]. Raises
    FloatingPointError for logits that are no distribution: not finite, but for -inf."""
    logits = logits.float()
    if rows.temperature is not None:
        logits = logits / rows.temperature
    if rows.top_k is not None and rows.top_p is not None:
        logits = _filtered(logits, rows.top_k, rows.top_p)
    probabilities = logits.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    if not bool(total.isfinite().all()):
        raise FloatingPointError("logits that are not finite")
    # Strictly below the total, so that the found token has a probability above 0 whatever the rounding.
    point = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, point, right=True)
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log()


def _filtered(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf for all but the top_k most likely tokens, and of those all but the fewest that reach top_p."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    drop = (before >= top_p) | (rank >= top_k)
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
