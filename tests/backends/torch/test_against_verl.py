"""PPO, GSPO, DPPO, the critic's loss, GAE and group advantages against verl's own functions on the same tensors, 20
random batches each, within 1e-5 in float32 (needs `rollart[compare]`).

Where verl differs by definition: its GAE always whitens advantages (compared after whitening both, with its unbiased
deviation); its policy losses always have dual clip (compared with ours set to the same limit); its GRPO advantages of a
group of one are the reward, ours 0; its RLOO is equal.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_against_trl import BATCHES, Tensors

from rollart.algo.advantages import gae, group_advantages
from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.losses import policy_loss

verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs rollart[compare]")


def config(**changes):
    """The part of verl's actor configuration that its losses read."""
    from verl.workers.config import ActorConfig
    plain = object.__new__(type("Plain", (ActorConfig,), {"__setattr__": object.__setattr__}))
    values = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0,
              "global_batch_info": {}} | changes
    for name, value in values.items():
        object.__setattr__(plain, name, value)
    object.__setattr__(plain, "get", lambda name, default=None: values.get(name, default))
    return plain


def agree(given, ours, theirs):
    mine, = torch.autograd.grad(ours, given.new)
    other, = torch.autograd.grad(theirs, given.new)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    assert (mine - other).abs().max() < 1e-5
    assert other.abs().max() > 1e-4


@pytest.mark.parametrize("seed", BATCHES)
@pytest.mark.parametrize(("name", "ours", "aggregation", "mode"), [
    ("vanilla", {"dual_clip": 3.0}, "token_mean", "token-mean"),
    ("vanilla", {"dual_clip": 3.0}, "sequence_mean", "seq-mean-token-mean"),
    ("gspo", {"loss": "gspo"}, "sequence_mean", "seq-mean-token-mean"),
], ids=["ppo", "ppo-sequences", "gspo"])
def test_policy_losses_agree(seed, name, ours, aggregation, mode):
    given = Tensors(seed, level=0.4 if name == "gspo" else 1.5)
    made = policy_loss(given.tokens(), AlgoSettings(correction="none", **ours))
    spread = given.advantages[:, None].expand_as(given.mask)
    theirs, _ = getattr(verl, f"compute_policy_loss_{name}")(given.old, given.new, spread, given.mask, mode, config())
    agree(given, given.aggregate(made.loss, aggregation), theirs)


@pytest.mark.parametrize("seed", BATCHES)
def test_dppo_agrees(seed):
    given = Tensors(seed, level=1.0)
    made = policy_loss(given.tokens(), AlgoSettings.named("dppo"))
    spread = given.advantages[:, None].expand_as(given.mask)
    theirs, _ = verl.compute_policy_loss_dppo_tv(given.old, given.new, spread, given.mask, "token-mean",
                                                 config(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=20.0))
    assert (made.weight == 0).any()
    agree(given, given.aggregate(made.loss, "token_mean"), theirs)


def observed(seed):
    """A mask with gaps, rewards at action tokens, values everywhere."""
    chance = torch.Generator().manual_seed(seed)
    mask = (torch.rand(5, 12, generator=chance) < 0.6).float()
    mask[:, -1] = 1
    values, rewards = torch.randn(5, 12, generator=chance), torch.randn(5, 12, generator=chance) * mask
    return mask, values, rewards


@pytest.mark.parametrize("seed", BATCHES)
def test_generalised_advantages_agree_also_over_observations(seed):
    mask, values, rewards = observed(seed)
    theirs, returns = verl.compute_gae_advantage_return(rewards, values, mask, 0.97, 0.9)
    ours = torch.zeros_like(mask)
    for row in range(5):
        at = mask[row].bool()
        ours[row, at] = torch.tensor(gae(rewards[row, at].tolist(), values[row, at].tolist(), 0.0, 0.97, 0.9))
    flat = ours[mask.bool()]
    assert torch.allclose(flat + values[mask.bool()], returns[mask.bool()], atol=1e-5)
    white = (flat - flat.mean()) / (flat.std() + 1e-8)
    assert torch.allclose(white, theirs[mask.bool()], atol=1e-4)


@pytest.mark.parametrize("seed", BATCHES)
def test_the_critics_loss_agrees(seed):
    from rollart.backends.torch.critic import Critic, Estimate
    mask, old, returns = observed(seed)
    new = (old + 0.5 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))).requires_grad_()
    theirs, _ = verl.compute_value_loss(new, returns, old, mask, 0.2)
    at = mask.bool()
    said = SimpleNamespace()
    critic = type("Said", (Critic,), {"__init__": lambda _: None, "__call__": lambda *_: (new[at], said, [])})()
    estimate = Estimate(old[at], old[at] * 0, returns[at])
    ours, _ = critic.loss([], [estimate], AlgoSettings.named("ppo"), torch.ones(int(mask.sum())), torch.device("cpu"))
    ours = ours / mask.sum()
    mine, other = torch.autograd.grad(ours, new, retain_graph=True)[0], torch.autograd.grad(theirs, new)[0]
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    assert (mine - other).abs().max() < 1e-5


@pytest.mark.parametrize("seed", BATCHES)
@pytest.mark.parametrize(("kind", "name"), [("grpo", "grpo"), ("rloo", "rloo")])
def test_group_advantages_agree(seed, kind, name):
    chance = np.random.default_rng(seed)
    rewards = chance.random(12).astype(np.float32)
    groups = np.array(sorted(chance.permutation([0] * 5 + [1] * 4 + [2] * 3)))
    scores, mask = torch.zeros(12, 3), torch.ones(12, 3)
    scores[:, -1] = torch.from_numpy(rewards)
    theirs, _ = getattr(verl, f"compute_{name}_outcome_advantage")(scores, mask, groups)
    ours = [a for g in range(3) for a in group_advantages(rewards[groups == g].tolist(), kind)]
    assert theirs[:, 0].tolist() == pytest.approx(ours, abs=1e-5)
