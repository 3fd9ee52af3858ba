"""Facts L1, L4-L6, L8-L10 and T2 for the arithmetic of the learner, and its gradient against finite differences."""

import math

import pytest
import torch

from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.diagnostics import effective_sample_size
from rollart.backends.torch.losses import ActionTokens, clip, kl_estimates, kl_penalty, policy_loss
from rollart.backends.torch.scoring import action_logprobs, chosen_logprobs, pack_sequences
from rollart.backends.torch.settings import SmallModel
from rollart.backends.torch.transformer import small_model

CPU = torch.device("cpu")
SYMMETRIC = {"clip_low": 0.2, "clip_high": 0.2}


def tiny(seed=0, dtype=torch.float64):
    shape = SmallModel(layers=2, width=32, heads=2, kv_heads=1, mlp=48, vocabulary=20)
    model = small_model(shape, seed).to(dtype)
    with torch.no_grad():  # far from uniform, so that differences show
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return model


def tokens_of(current, proximal, behaviour, advantages, age=None, counts=None):
    return ActionTokens(current, proximal, behaviour, advantages, current.detach() * 0 if age is None else age,
                        torch.tensor([len(current)] if counts is None else counts))


def clip_loss(ratio, advantages, settings):
    return clip(tokens_of(ratio.log(), ratio * 0, ratio * 0, advantages), ratio * 0, settings)


def numbers(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


@pytest.mark.parametrize(("advantage", "ratio", "extra", "expected"), [
    (1, 1.5, {}, -1.2), (1, 0.5, {}, -0.5), (-1, 1.5, {}, 1.5), (-1, 0.5, {}, 0.8), (-1, 5.0, {}, 5.0),
    (-1, 5.0, {"dual_clip": 3.0}, 3.0), (1, 1.5, {"clip_high": 0.28}, -1.28),
])
def test_l1_clip_values(advantage, ratio, extra, expected):
    loss, _ = clip_loss(numbers(ratio), numbers(advantage), AlgoSettings(**(SYMMETRIC | extra)))
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(("advantage", "ratio", "extra", "clipped"), [
    (1, 1.5, {}, True), (1, 0.5, {}, False), (-1, 1.5, {}, False), (-1, 0.5, {}, True), (-1, 5.0, {}, False),
    (-1, 5.0, {"dual_clip": 3.0}, True), (1, 1.0, {}, False),
])
def test_l1_gradient_is_exactly_zero_where_and_only_where_a_limit_is_active(advantage, ratio, extra, clipped):
    given = numbers(ratio, grad=True)
    loss, active = clip_loss(given, numbers(advantage), AlgoSettings(**(SYMMETRIC | extra)))
    loss.sum().backward()
    assert given.grad.item() == (0.0 if clipped else pytest.approx(-advantage))
    assert active.item() is clipped


def test_l4_importance_weights_are_capped_and_carry_no_gradient():
    ratios = numbers(1.0, 3.0, 0.25, 1.6487)
    proximal = ratios.log().requires_grad_()
    current = numbers(0, 0, 0, 0, grad=True)
    tokens = tokens_of(current, proximal, numbers(0, 0, 0, 0), numbers(1, 1, 1, 1))
    made = policy_loss(tokens, AlgoSettings(importance_cap=2.0))
    assert made.weight.tolist() == pytest.approx([1, 2, 0.25, 1.6487])
    assert made.importance.tolist() == pytest.approx([1, 3, 0.25, 1.6487])
    made.loss.sum().backward()
    assert proximal.grad is None
    assert not made.weight.requires_grad


def test_l4_effective_sample_size():
    assert effective_sample_size(numbers(1, 1, 1, 9)).item() == pytest.approx(1.714, abs=5e-4)


def test_l5_decoupled_loss_and_its_naive_form():
    tokens = numbers(-0.8), numbers(-1.0), numbers(-1.5), numbers(1)
    decoupled = policy_loss(tokens_of(*tokens), AlgoSettings(**SYMMETRIC, importance_cap=10.0))
    assert decoupled.loss.item() == pytest.approx(-1.97847, abs=1e-5)
    coupled = policy_loss(tokens_of(*tokens), AlgoSettings(**SYMMETRIC, ratio="behaviour", correction="none"))
    assert coupled.loss.item() == pytest.approx(-1.2)


def test_at_the_start_of_a_step_the_gradient_is_that_of_truncated_importance_sampling():
    current = numbers(-0.8, -2.0, -0.1, grad=True)
    behaviour, advantages = numbers(-1.5, -1.9, -0.1), numbers(1, -2, 0.5)
    tokens = tokens_of(current, current, behaviour, advantages)
    policy_loss(tokens, AlgoSettings(importance_cap=1.5)).loss.sum().backward()
    weight = (current.detach() - behaviour).exp().clamp(max=1.5)
    assert current.grad.tolist() == pytest.approx((-weight * advantages).tolist())


def test_against_the_behaviour_the_correction_is_in_the_ratio():
    current, behaviour = numbers(-1.0, grad=True), numbers(-1.1)
    settings = AlgoSettings(ratio="behaviour", correction="none")
    policy_loss(tokens_of(current, current, behaviour, numbers(1)), settings).loss.sum().backward()
    assert current.grad.item() == pytest.approx(-math.exp(0.1))


def test_a_ratio_beyond_all_measure_stays_finite():
    made = policy_loss(tokens_of(numbers(0.0), numbers(0.0), numbers(-1e6), numbers(-1)), AlgoSettings())
    assert made.loss.isfinite().all()
    assert made.importance.isfinite().all()


def test_l6_kl_estimates():
    made = kl_estimates(numbers(-1.0), numbers(-1.5))
    assert tuple(made[name].item() for name in ("k1", "k2", "k3")) == pytest.approx((0.5, 0.125, 0.10653), abs=1e-5)


def test_l6_the_penalty_has_the_value_of_k3_and_the_gradient_of_the_true_kl():
    logits = numbers(0.5, -1.0, 2.0, grad=True)
    reference = numbers(1.0, 0.0, 0.0).log_softmax(-1)

    def gradient(term):
        """Gradient of the expectation over tokens that the policy sampled: the sampling itself carries none."""
        logprobs = logits.log_softmax(-1)
        return torch.autograd.grad((logprobs.detach().exp() * term(logprobs)).sum(), logits)[0].tolist()

    logprobs = logits.log_softmax(-1)
    true = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)[0].tolist()
    reverse = torch.autograd.grad((reference.exp() * (reference - logits.log_softmax(-1))).sum(), logits)[0].tolist()
    assert gradient(lambda lp: kl_estimates(lp, reference)["k1"]) == pytest.approx([0, 0, 0], abs=1e-12)
    assert gradient(lambda lp: kl_estimates(lp, reference)["k3"]) == pytest.approx(reverse)
    assert gradient(lambda lp: kl_penalty(lp, reference)) == pytest.approx(true)
    assert true != pytest.approx(reverse, abs=1e-2)
    assert kl_penalty(numbers(-1.0), numbers(-1.5)).item() == pytest.approx(0.10653, abs=1e-5)


SEQUENCES = [([3, 4, 5, 6, 7], [0, 0, 1, 1, 0]), ([9, 8, 7], [0, 1, 1]), ([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 0, 0, 0, 1])]


def test_l8_packed_is_alone():
    model = tiny(dtype=torch.float32)
    packed, _ = action_logprobs(model, pack_sequences(SEQUENCES, CPU), 1.0)
    alone = torch.cat([action_logprobs(model, pack_sequences([one], CPU), 1.0)[0] for one in SEQUENCES])
    assert (packed - alone).abs().max() < 1e-5


def test_l8_negative_control_without_resets_packed_differs():
    model = tiny(dtype=torch.float32)
    packed = pack_sequences(SEQUENCES, CPU)
    right = model.logits(model(packed.ids, packed.positions, packed.lengths)[packed.scored])
    run_on = model.logits(model(packed.ids, torch.arange(len(packed.ids)), [len(packed.ids)])[packed.scored])
    assert (right - run_on).abs().max() > 1e-2


@pytest.mark.parametrize(("temperature", "expected", "entropy"), [
    (1.0, [-0.4076, -1.4076, -2.4076], 0.83240), (0.6, [-0.2026, -1.8692, -3.5359], 0.55675),
])
def test_l9_l10_log_probabilities_and_entropy_at_the_sampling_temperature(temperature, expected, entropy):
    logits = numbers(2, 1, 0).expand(3, 3)
    logprobs, entropies = chosen_logprobs(logits, torch.arange(3), temperature)
    assert logprobs.tolist() == pytest.approx(expected, abs=5e-5)
    assert entropies.tolist() == pytest.approx([entropy] * 3, abs=5e-6)


def test_log_probabilities_of_half_precision_logits_are_float32():
    logprobs, entropy = chosen_logprobs(torch.zeros(2, 7, dtype=torch.bfloat16), torch.tensor([0, 1]), 1.0)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert logprobs.tolist() == pytest.approx([-math.log(7)] * 2)


def test_t2_the_logit_before_a_token_scores_it_and_only_action_tokens_are_scored():
    model = tiny()
    packed = pack_sequences(SEQUENCES, CPU)
    got, _ = action_logprobs(model, packed, 1.0)
    expected = []
    for ids, mask in SEQUENCES:
        row = torch.tensor(ids)
        logprobs = model.logits(model(row, torch.arange(len(row)), [len(row)])).log_softmax(-1)
        expected += [logprobs[i - 1, ids[i]].item() for i, acted in enumerate(mask) if acted]
    assert got.tolist() == pytest.approx(expected, abs=1e-9)
    assert packed.counts == [2, 2, 2]


def test_t2_what_is_masked_is_context_and_no_target():
    """Ids after the last action change nothing at all; an id before it changes the context, never the targets."""
    model = tiny()

    def gradient(ids):
        logprobs, _ = action_logprobs(model, pack_sequences([(ids, [0, 0, 1, 0, 1, 0, 0])], CPU), 1.0)
        return torch.cat([g.flatten() for g in torch.autograd.grad(logprobs.sum(), list(model.parameters()))])

    plain = gradient([1, 2, 3, 4, 5, 6, 7])
    assert torch.equal(plain, gradient([1, 2, 3, 4, 5, 9, 9]))
    assert not torch.allclose(plain, gradient([1, 2, 3, 9, 5, 6, 7]))
    assert pack_sequences([([1, 2, 3, 9, 5], [0, 0, 1, 0, 1])], CPU).targets.tolist() == [3, 5]


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 0, 1]])
def test_a_sequence_that_cannot_be_scored_is_refused(mask):
    with pytest.raises(ValueError, match="needs an action token, and context"):
        pack_sequences([([1, 2, 3], mask)], CPU)


def test_gradient_agrees_with_finite_differences():
    model = tiny()
    packed, settings = pack_sequences(SEQUENCES, CPU), AlgoSettings(importance_cap=2.0)
    behaviour, advantages = numbers(-1, -2, -3, -2, -2, -1), numbers(1, 1, -1, -1, 0.5, 0.5)
    with torch.no_grad():
        proximal = action_logprobs(model, packed, 0.7)[0] + numbers(0.05, -0.4, 0.1, 0.5, 0.02, -0.01)

    def loss():
        return policy_loss(tokens_of(action_logprobs(model, packed, 0.7)[0], proximal, behaviour, advantages),
                           settings).loss.sum()

    names = dict(model.named_parameters())
    gradients = dict(zip(names, torch.autograd.grad(loss(), list(names.values())), strict=True))
    step = 1e-6
    for name, parameter in names.items():
        at = gradients[name].abs().argmax()
        with torch.no_grad():
            flat = parameter.view(-1)
            flat[at] += step
            above = loss()
            flat[at] -= 2 * step
            below = loss()
            flat[at] += step
        measured = ((above - below) / (2 * step)).item()
        assert gradients[name].view(-1)[at].item() == pytest.approx(measured, rel=1e-4, abs=1e-7), name
