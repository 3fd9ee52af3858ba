"""Losses and gradients against TRL's own code on the same tensors, 20 random batches each (needs `rollart[compare]`).

TRL's `_compute_loss` runs as it is, on a bare trainer whose forward pass is replaced by our log-probabilities. Where
the definitions coincide, value and gradient agree within 1e-5 in float32:

    TRL grpo, token ratios       clip, sequence_mean                    GRPO
    TRL bnpo, dapo               clip, token_mean                       GRPO, and PPO's policy loss
    TRL grpo, sequence ratios    gspo, sequence_mean                    GSPO
    TRL dr_grpo                  clip, constant_length
    TRL cispo                    cispo, token_mean (TRL's epsilon_high is our 1 + clip_high)
    TRL delta                    its cap on the ratio limits both signs of advantage; our dual_clip (as published) only
                                 negative ones: equal there
    TRL beta                     KL with value and gradient of k3, and no importance weight on it

RLOO differs by definition and is compared where it does not: TRL's loss is PPO's clip on the product of a whole
sequence's ratios, summed over its tokens; ours is -A log p per token. On the tokens that were just sampled (all ratios
1) TRL's gradient is -A for each token over the number of sequences, ours the same over the chosen aggregation. The
advantages are the same numbers. TRL has no PPO with a critic any more: `test_against_verl.py` has that part.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rollart.algo.advantages import group_advantages
from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.losses import ActionTokens, kl_penalty, policy_loss

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs rollart[compare]")
rloo_trainer = pytest.importorskip("trl.trainer.rloo_trainer", reason="needs rollart[compare]")

BATCHES = range(20)


class Tensors:
    """A random batch of ragged sequences: padded [B, T] and flat [A] views of the same log-probabilities."""

    def __init__(self, seed, level=0.4):
        chance = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, 9, (6,), generator=chance)
        self.mask = (torch.arange(int(self.lengths.max()))[None] < self.lengths[:, None]).float()

        def padded(low, high):
            return (torch.rand(self.mask.shape, generator=chance) * (high - low) + low) * self.mask

        self.old = padded(-3, -0.1)
        self.new = (self.old + padded(-level, level)).requires_grad_()
        self.reference, self.entropy = padded(-3, -0.1), padded(0.5, 2)
        self.advantages = torch.randn(6, generator=chance)

    def flat(self, padded):
        return padded[self.mask.bool()]

    def tokens(self):
        spread = self.advantages[:, None].expand_as(self.mask)
        old = self.flat(self.old)
        return ActionTokens(self.flat(self.new), old, old, self.flat(spread), torch.zeros(len(old)), self.lengths)

    def aggregate(self, loss, aggregation, constant=0):
        """[A] to a number, by the weights that the learner uses."""
        counts = self.lengths.repeat_interleave(self.lengths)
        if aggregation == "token_mean":
            return loss.mean()
        return (loss / counts).sum() / 6 if aggregation == "sequence_mean" else loss.sum() / (6 * constant)


def trl_loss(trainer, given, **settings):
    """TRL's loss of the tensors, from a trainer without model, data or accelerator."""
    plain = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,
                            num_processes=1)
    bare = trainer.__new__(trainer)
    defaults = {
        "accelerator": plain, "model": SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)},
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token",
        "beta": 0.0, "loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.28, "use_vllm": False,
        "current_gradient_accumulation_steps": 1, "max_completion_length": 11, "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False, "use_adaptive_entropy": False,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)}
    for name, value in (defaults | settings).items():
        object.__setattr__(bare, name, value)
    object.__setattr__(bare, "_get_per_token_logps_and_entropies", lambda *a, **k: (given.new, given.entropy, None))
    nothing = torch.zeros(6, 1)
    return trainer._compute_loss(bare, None, {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": given.mask, "completion_mask": given.mask,
        "advantages": given.advantages, "old_per_token_logps": given.old, "ref_per_token_logps": given.reference,
        "old_logps": (given.old * given.mask).sum(1), "num_items_in_batch": given.mask.sum()})


def agree(given, ours, theirs):
    mine, = torch.autograd.grad(ours, given.new, retain_graph=True)
    other, = torch.autograd.grad(theirs, given.new)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    assert (mine - other).abs().max() < 1e-5
    assert other.abs().max() > 1e-4


CASES = [
    ("clip", "sequence_mean", {"loss_type": "grpo"}), ("clip", "token_mean", {"loss_type": "bnpo"}),
    ("clip", "token_mean", {"loss_type": "dapo"}), ("clip", "constant_length", {"loss_type": "dr_grpo"}),
    ("gspo", "sequence_mean", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ("cispo", "token_mean", {"loss_type": "cispo", "epsilon_high": 1.28}),
]


@pytest.mark.parametrize("seed", BATCHES)
@pytest.mark.parametrize(("loss", "aggregation", "trl"), CASES, ids=[
    "grpo", "bnpo-ppo", "dapo", "dr_grpo", "gspo", "cispo"])
def test_losses_and_gradients_agree(seed, loss, aggregation, trl):
    given = Tensors(seed)
    settings = AlgoSettings(loss=loss, correction="none")
    made = policy_loss(given.tokens(), settings)
    agree(given, given.aggregate(made.loss, aggregation, 11), trl_loss(grpo_trainer.GRPOTrainer, given, **trl))


@pytest.mark.parametrize("seed", BATCHES)
def test_the_kl_term_agrees_with_value_and_gradient_of_k3(seed):
    given = Tensors(seed)
    made = policy_loss(given.tokens(), AlgoSettings(correction="none"))
    kl = kl_penalty(given.flat(given.new), given.flat(given.reference), "k3", "k3")
    agree(given, given.aggregate(made.loss + 0.3 * kl, "sequence_mean"),
          trl_loss(grpo_trainer.GRPOTrainer, given, beta=0.3))


@pytest.mark.parametrize("seed", BATCHES)
def test_dual_clip_agrees_where_the_advantage_is_negative(seed):
    given = Tensors(seed, level=2.0)
    given.advantages = -given.advantages.abs()
    made = policy_loss(given.tokens(), AlgoSettings(correction="none", dual_clip=1.5))
    args = SimpleNamespace(delta=1.5, use_bias_correction_kl=False, steps_per_generation=1)
    agree(given, given.aggregate(made.loss, "sequence_mean"), trl_loss(grpo_trainer.GRPOTrainer, given, args=args))


@pytest.mark.parametrize("seed", BATCHES)
def test_rloo_agrees_on_policy_up_to_the_aggregation(seed):
    given = Tensors(seed, level=0.0)
    made = policy_loss(given.tokens(), AlgoSettings.named("rloo", correction="none"))
    theirs = trl_loss(rloo_trainer.RLOOTrainer, given, epsilon_high=0.2)
    mine, = torch.autograd.grad(given.aggregate(made.loss, "constant_length", 1), given.new)  # sums over B, as TRL's
    other, = torch.autograd.grad(theirs, given.new)
    assert (mine - other).abs().max() < 1e-5
    rewards = given.advantages.tolist()
    others = [sum(rewards[:i] + rewards[i + 1:]) / 5 for i in range(6)]
    assert group_advantages(rewards, "rloo") == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])
