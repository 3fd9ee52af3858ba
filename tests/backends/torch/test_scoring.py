"""The fused path to log-probabilities: the numbers of the plain one, values and gradients, whatever the pieces."""

import pytest
import torch

from rollart.backends.torch.scoring import action_logprobs, chosen_logprobs, fused_logprobs, pack_sequences
from rollart.backends.torch.settings import SmallModel
from rollart.backends.torch.transformer import small_model


def inputs(dtype, rows=37, width=24, vocabulary=101):
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=chance, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocabulary, width, generator=chance, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=chance)
    return hidden, head, targets


@pytest.mark.parametrize("pieces", [1, 4 * 101 * 5, 1 << 30])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_fused_equals_plain_in_value_and_gradient(pieces, temperature, entropy):
    hidden, head, targets = inputs(torch.float64)
    weights = torch.linspace(-1, 2, len(hidden), dtype=torch.float64)

    def outcome(logprobs, entropies):
        loss = (weights * logprobs).sum() + entropy * (weights ** 2 * entropies).sum()
        return [logprobs, entropies, *torch.autograd.grad(loss, (hidden, head))]

    plain = outcome(*chosen_logprobs(hidden @ head.t(), targets, temperature, entropy_gradient=True))
    fused = outcome(*fused_logprobs(hidden, head, targets, temperature, pieces))
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-11)


def test_fused_passes_gradcheck():
    hidden, head, targets = inputs(torch.float64, rows=5, width=3, vocabulary=7)
    assert torch.autograd.gradcheck(lambda h, w: fused_logprobs(h, w, targets, 0.8, 4 * 7 * 2), (hidden, head))


def test_a_frozen_head_gets_no_gradient_and_half_precision_stays_near():
    hidden, head, targets = inputs(torch.float32)
    frozen = head.detach()
    fused_logprobs(hidden, frozen, targets, 1.0, 2000)[0].sum().backward()
    assert hidden.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = fused_logprobs(hidden, head, targets, 1.0, 2000)
        plain, _ = chosen_logprobs(torch.nn.functional.linear(hidden, head), targets, 1.0)
    half.sum().backward()
    assert half.dtype == torch.float32
    assert torch.allclose(half, plain, atol=1e-3)
    assert head.grad.dtype == torch.float32


def test_a_long_batch_takes_the_fused_path_and_gives_the_same(monkeypatch):
    from rollart.backends.torch import scoring
    model = small_model(SmallModel(layers=2, width=32, heads=2, kv_heads=1, mlp=48, vocabulary=20), 0)
    packed = pack_sequences([([3, 4, 5, 6, 7], [0, 0, 1, 1, 0]), ([1, 2, 3, 4], [0, 1, 0, 1])], torch.device("cpu"))

    def gradient():
        logprobs, entropy = action_logprobs(model, packed, 0.9)
        return logprobs, entropy, *torch.autograd.grad(logprobs.sum(), list(model.parameters()))

    plain = gradient()
    called = []
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 100)
    monkeypatch.setattr(scoring, "fused_logprobs", lambda *given: called.append(1) or fused_logprobs(*given, 100))
    for ours, theirs in zip(gradient(), plain, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert called
