"""The forward passes of the engine: a decoder with keys and values kept in rows, one row per running request.

Keeps true: row r holds the keys and values of positions 0 .. filled-1 of its request, in the order of the context; what
lies beyond is finite and masked. Used by one thread. Shapes: n requests of t tokens each, D width, H heads of Dh, K
key-value heads with G = H / K queries each, L positions attended to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollart.backends.torch.moe import Experts, Routing
from rollart.backends.torch.shapes import ModelConfig
from rollart.backends.torch.transformer import Transformer, rotary, rotate
from rollart.backends.weights.memory import load_into


class _Norm:
    """RMS norm over the last dimension of x [..., len(weights), N], as x / hypot(|x|, small) * scale: a third of the
    CPU time of `F.rms_norm`. One weight [N] for hidden states, one per head for queries and keys."""

    def __init__(self, weights: Sequence[Tensor], eps: float) -> None:
        self._weights, self._eps = weights, eps

    def refresh(self) -> None:
        """Read the weights again, after they were loaded."""
        weights = torch.stack([weight.data for weight in self._weights]).float()
        self._scale = weights * math.sqrt(weights.shape[-1])
        self._small = torch.full((1,), math.sqrt(weights.shape[-1] * self._eps), device=weights.device)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self._small)).mul_(self._scale).to(x.dtype)


@dataclass(slots=True)
class _Layer:
    """One layer's weights, with those that share an input in one matrix; biases are None where there are none."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mixture: Experts | None
    gate_up: Tensor | None  # without a mixture, these two
    down: Tensor | None
    before: _Norm
    after: _Norm
    queries_and_keys: _Norm | None


@dataclass(frozen=True, slots=True)
class Kept:
    """What a row holds of its first L positions: keys and values [layers, 2, K, L, Dh], experts [L, layers, k]."""

    kv: Tensor
    routes: Tensor

    def __len__(self) -> int:
        return self.kv.shape[3]


def _fuse(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """One tensor with the rows of all; the parameters become views of it, so that loading fills it."""
    fused = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, fused.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return fused


class Runner:
    """Weights and KV rows. `capacity` grows by doubling up to `rows` rows of `context_tokens` tokens each."""

    def __init__(self, config: ModelConfig, rows: int, context_tokens: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.model = Transformer(config).to(device, dtype).requires_grad_(False)
        self._limit = (rows, context_tokens + 1)  # one position more: the scratch that padding writes to
        self._layers = [self._layer(layer) for layer in self.model.model.layers]
        self._norm = _Norm([self.model.model.norm.weight], config.norm_eps)
        self._cos, self._sin = rotary(torch.arange(context_tokens + 1), config.rope.frequencies(config.head_dim), dtype)
        self._cos, self._sin = self._cos.to(device)[:, None], self._sin.to(device)[:, None]
        self._range = torch.arange(context_tokens + 1, device=device)
        self._nothing = torch.zeros(1, 1, 1, device=device, dtype=dtype)
        self.clear()

    def _layer(self, layer: torch.nn.Module) -> _Layer:
        attention, mlp, eps = layer.self_attn, layer.mlp, self.config.norm_eps
        mixture = mlp if isinstance(mlp, Experts) else None
        inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
        return _Layer(
            qkv=_fuse([part.weight for part in inputs]),
            qkv_bias=_fuse([part.bias for part in inputs]) if self.config.qkv_bias else None,
            out=attention.o_proj.weight.data.t(), out_bias=attention.o_proj.bias,
            mixture=mixture, gate_up=None if mixture else _fuse([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=None if mixture else mlp.down_proj.weight.data.t(),
            before=_Norm([layer.input_layernorm.weight], eps),
            after=_Norm([layer.post_attention_layernorm.weight], eps),
            queries_and_keys=_Norm([attention.q_norm.weight] * self.config.heads
                                   + [attention.k_norm.weight] * self.config.kv_heads, eps)
            if self.config.qk_norm else None)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy new weights in place. Raises ValueError that names what does not fit, before any change (T9)."""
        load_into(self.model, tensors)
        for layer in self._layers:
            for norm in (layer.before, layer.after, layer.queries_and_keys):
                if norm is not None:
                    norm.refresh()
        self._norm.refresh()

    def clear(self) -> None:
        """Forget every row."""
        self._kv, self._routes = torch.zeros(0), torch.zeros(0)
        self.capacity = (0, 0)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` positions (and the scratch position), keeping what they hold."""
        old_rows, old_length = self.capacity
        if rows <= old_rows and length < old_length:
            return
        new_rows = old_rows if rows <= old_rows else min(self._limit[0], max(rows, 2 * old_rows, 4))
        new_length = old_length if length < old_length else min(self._limit[1], max(length + 1, 2 * old_length, 128))
        config = self.config
        grown = torch.zeros(config.layers, 2, new_rows, config.kv_heads, new_length, config.head_dim,
                            dtype=self.dtype, device=self.device)
        if old_rows:
            grown[:, :, :old_rows, :, :old_length] = self._kv
        routes = torch.zeros(new_rows, new_length, config.layers, config.experts_per_token, dtype=torch.uint8,
                             device=self.device)
        if old_rows:
            routes[:old_rows, :old_length] = self._routes
        self._kv, self._routes, self.capacity = grown, routes, (new_rows, new_length)
        self._flat = [layer.view(-1, config.head_dim) for layer in grown]
        shape = (2, new_rows, config.kv_heads)
        self._blocks = torch.arange(math.prod(shape), device=self.device).view(shape)  # of new_length positions each
        self._starts = self._blocks.transpose(0, 1).reshape(new_rows, -1) * new_length  # [rows, 2K], into flat

    @property
    def scratch(self) -> int:
        """The position that padding is written to; never attended to by a live row."""
        return self.capacity[1] - 1

    def take(self, row: int, length: int) -> Kept:
        """A copy of what the first `length` positions of a row hold."""
        return Kept(self._kv[:, :, row, :, :length].clone(), self._routes[row, :length].clone())

    def put(self, row: int, kept: Kept, length: int) -> None:
        """Give a row the first `length` positions of what was taken."""
        self._kv[:, :, row, :, :length] = kept.kv[:, :, :, :length]
        self._routes[row, :length] = kept.routes[:length]

    def move(self, source: int, target: int, length: int) -> None:
        self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]
        self._routes[target, :length] = self._routes[source, :length]

    def routes(self, row: int, length: int) -> bytes:
        """The experts of the first `length` positions of a row, as a Completion has them."""
        return self._routes[row, :length].cpu().numpy().tobytes() if self.config.experts else b""

    def decode(self, tokens: Tensor, positions: Tensor, longest: int, even: bool) -> Tensor:
        """Logits [n, V] of one token for each of the first n rows; tokens, positions [n].

        `longest` is the largest live position + 1; `even`: all positions are `longest - 1`, so nothing is masked.
        """
        n = len(tokens)
        mask = None if even else self._mask(positions[:, None], longest)
        x = self._forward(tokens, positions, self._starts[:n] + positions[:, None], n, None, longest, mask)
        return F.linear(self._norm(x), self.model.head)

    def prefill(self, rows: Sequence[int], starts: Sequence[int], chunks: Sequence[Sequence[int]]) -> None:
        """Fill positions starts[i] .. of row rows[i] with chunks[i]; chunks may differ in length."""
        n, t = len(rows), max(map(len, chunks))
        longest = max(start + len(chunk) for start, chunk in zip(starts, chunks, strict=True))
        tokens = torch.tensor([[*chunk, *[0] * (t - len(chunk))] for chunk in chunks], device=self.device)
        lengths = torch.tensor([len(chunk) for chunk in chunks], device=self.device)[:, None]
        positions = torch.tensor(starts, device=self.device)[:, None] + self._range[:t]
        positions = torch.where(self._range[:t] < lengths, positions, self.scratch)  # [n, t]
        index = torch.tensor(rows, device=self.device)
        places = (self._starts[index][:, None] + positions[..., None]).flatten(0, 1)
        self._forward(tokens.flatten(), positions.flatten(), places, n, index, longest, self._mask(positions, longest),
                      last=False)

    def _mask(self, positions: Tensor, longest: int) -> Tensor:
        """-inf where a query at positions [n, t] must not look, as bmm wants it: [n * K, G * t (or 1), L]."""
        n, t = positions.shape
        groups = self.config.heads // self.config.kv_heads if t > 1 else 1
        hidden = self._range[:longest] > positions[..., None]
        mask = torch.zeros(n, t, longest, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        return mask[:, None, None].expand(n, self.config.kv_heads, groups, t, longest).reshape(
            n * self.config.kv_heads, groups * t, longest)

    def _forward(self, tokens: Tensor, positions: Tensor, places: Tensor, n: int, index: Tensor | None, longest: int,
                 mask: Tensor | None, last: bool = True) -> Tensor:
        """Hidden states [n * t, D] of tokens, positions [n * t], written to `places` [n * t, 2K] of the flat rows.

        `index`: which rows, or None for the first n. Without `last` only what later tokens need is computed: the last
        layer stops at its keys and values. A mixture's last layer is computed whole: its experts are recorded.
        """
        config, routing = self.config, Routing()
        last = last or bool(config.experts)
        heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
        t, groups, scale, beta = len(tokens) // n, heads // kv_heads, width ** -0.5, 0.0 if mask is None else 1.0
        mask = self._nothing if mask is None else mask
        x = F.embedding(tokens, self.model.model.embed_tokens.weight)
        cos, sin, flat = self._cos[positions], self._sin[positions], places.flatten()
        blocks = None if index is None else self._blocks[:, index].flatten()
        for i, layer in enumerate(self._layers):
            mixed = F.linear(layer.before(x), layer.qkv, layer.qkv_bias).view(n * t, heads + 2 * kv_heads, width)
            turned = mixed[:, :heads + kv_heads]
            if layer.queries_and_keys is not None:
                turned = layer.queries_and_keys(turned)
            turned = rotate(turned, cos, sin)
            self._flat[i].index_copy_(
                0, flat, torch.cat([turned[:, heads:], mixed[:, heads + kv_heads:]], 1).view(-1, width))
            if i == len(self._layers) - 1 and not last:
                break
            if index is None:
                keys, values = self._kv[i, :, :n, :, :longest].flatten(1, 2)
            else:  # over dimension 0, for over any other one index_select first copies all rows
                keys, values = self._kv[i].flatten(0, 2)[:, :longest].index_select(0, blocks).chunk(2)
            q = turned[:, :heads].reshape(n, t, kv_heads, groups, width).permute(0, 2, 3, 1, 4).reshape(
                n * kv_heads, groups * t, width)
            scores = torch.baddbmm(mask, q, keys.transpose(1, 2), beta=beta, alpha=scale).softmax(-1)
            seen = torch.bmm(scores, values).view(n, kv_heads, groups, t, width)
            x = torch.addmm(x, seen.permute(0, 3, 1, 2, 4).reshape(n * t, heads * width), layer.out)
            if layer.out_bias is not None:
                x += layer.out_bias
            if layer.mixture is not None:
                x = x + layer.mixture(layer.after(x), routing, i)
            else:
                gate, up = F.linear(layer.after(x), layer.gate_up).chunk(2, -1)
                x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
        if config.experts:
            rows = self._range[:n] if index is None else index
            self._routes[rows.repeat_interleave(t), positions] = torch.stack(
                [routing.chosen[i] for i in range(config.layers)], 1).to(torch.uint8)
        return x
