"""Every loss, correction, aggregation and algorithm of the catalogue: facts L2 and L4, gradients against finite
differences, and one result for every order, split and number of ranks."""

import math
import random
from dataclasses import replace

import pytest
import torch

from rollart.algo.catalogue import ALGORITHMS, function, pieces
from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.diagnostics import TokenStats
from rollart.backends.torch.fsdp import Alone
from rollart.backends.torch.learner import TorchTrainer
from rollart.backends.torch.losses import ActionTokens, approximated, policy_loss
from rollart.backends.torch.settings import LearnerSettings, SmallModel
from rollart.backends.torch.step import StepWork, share_of
from rollart.backends.torch.transformer import small_model
from rollart.backends.weights.memory import MemoryWeights
from rollart.core.tokens import floats, ids
from rollart.core.types import Sample, TrainBatch, TrajectoryId

SHAPE = SmallModel(layers=2, width=32, heads=2, kv_heads=1, mlp=48, vocabulary=20)
LEARNER = LearnerSettings(eps=1e3, learning_rate=1e3, max_grad_norm=0.0, precision="float32", device="cpu", threads=1)
CPU = torch.device("cpu")


def numbers(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def tokens_of(current, proximal=None, behaviour=None, advantages=None, age=None, counts=None):
    zero = current.detach() * 0
    return ActionTokens(current, current.detach() if proximal is None else proximal,
                        zero if behaviour is None else behaviour, zero + 1 if advantages is None else advantages,
                        zero if age is None else age, torch.tensor(counts or [len(current)]))


def test_l2_gspo_has_one_ratio_a_sequence_the_exponent_of_the_mean():
    current = numbers(0.1, -0.2, 0.4, 0.3, grad=True)
    settings = AlgoSettings(loss="gspo", correction="none", clip_high=0.5)
    made = policy_loss(tokens_of(current, numbers(0, 0, 0, 0), counts=[3, 1]), settings)
    assert made.loss.tolist() == pytest.approx([-1.10517] * 3 + [-math.exp(0.3)], abs=1e-5)
    made.loss[:3].mean().backward()
    assert current.grad.tolist() == pytest.approx([-1.10517 / 3] * 3 + [0], abs=1e-5)
    assert math.exp(0.1 - 0.2 + 0.4) == pytest.approx(1.34986, abs=1e-5)  # the product, which it is not


def test_l2_cispo_caps_the_weight_and_keeps_the_gradient():
    current = numbers(-0.7, grad=True)
    made = policy_loss(tokens_of(current, numbers(-0.7 - math.log(2))), AlgoSettings(loss="cispo", correction="none"))
    assert made.loss.item() == pytest.approx(0.896)
    made.loss.sum().backward()
    assert current.grad.item() == pytest.approx(-1.28)
    assert made.clipped.item()


@pytest.mark.parametrize(("correction", "changes", "expected"), [
    ("tis", {}, [1, 2, 0.25, 1.6487]),
    ("icepop", {"band_low": 0.5, "band_high": 5.0}, [1, 3, 0, 1.6487]),
    ("tis_sequence", {}, [2, 2, 0.4122, 0.4122]),
    ("geometric_mask", {"geometric_low": 0.6, "geometric_high": 1.7}, [0, 0, 1, 1]),
    ("staleness", {"staleness_decay": 0.5}, [1, 0.5, 0.25, 0.125]),
    ("tis+staleness", {}, [1, 1, 0.0625, 0.2061]),
])
def test_l4_corrections(correction, changes, expected):
    current = numbers(1, 3, 0.25, 1.6487).log().requires_grad_()
    made = policy_loss(tokens_of(current, age=numbers(0, 1, 2, 3), counts=[2, 2]),
                       AlgoSettings(correction=correction, **changes))
    assert made.weight.tolist() == pytest.approx(expected, abs=1e-4)
    assert not made.weight.requires_grad


@pytest.mark.parametrize(("advantage", "current", "kept"), [(1, 0.9, 0), (1, 0.1, 1), (-1, 0.9, 1), (-1, 0.1, 0),
                                                            (1, 0.6, 1), (-1, 0.4, 1)])
def test_dppo_masks_what_would_lead_further_away(advantage, current, kept):
    tokens = tokens_of(numbers(current).log(), behaviour=numbers(0.5).log(), advantages=numbers(advantage))
    settings = AlgoSettings(correction="dppo_tv")
    assert function("correction", "dppo_tv")(tokens, numbers(1), settings).item() == kept


def test_the_approximated_proximal_lies_between_behaviour_and_current_by_age():
    tokens = tokens_of(numbers(-1.0, -1.0, -1.0), behaviour=numbers(-2.0, -2.0, -2.0), age=numbers(0, 1, 3))
    assert approximated(tokens).tolist() == pytest.approx([-2.0, -1.5, -1.25])


def test_weights_are_of_every_loss_and_ratios_of_the_behaviour_need_none():
    tokens = tokens_of(numbers(-0.8), numbers(-1.0), numbers(-1.5))
    for piece in pieces("loss"):
        plain = policy_loss(tokens, AlgoSettings(loss=piece.name, correction="none")).loss.item()
        weighted = policy_loss(tokens, AlgoSettings(loss=piece.name, importance_cap=9.0)).loss.item()
        assert weighted == pytest.approx(math.exp(0.5) * plain)


def model(dtype=torch.float64, **shape):
    made = small_model(replace(SHAPE, **shape), 0).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return made


def samples(count=8, version=3):
    """Of one to three turns and of several ages, from a fixed stream; two of them are halves of one trajectory."""
    chance = random.Random(4)
    made = []
    for number in range(count):
        mask, turns = [0, 0], []
        for _ in range(chance.randrange(1, 4)):
            turns.append(chance.randrange(1, 6))
            mask += [1] * turns[-1] + [0] * 2
        logprobs = floats(-2.5 + chance.uniform(-1, 1) if m else 0.0 for m in mask)
        versions = ids(version - chance.randrange(3) if m else -1 for m in mask)
        rewards = tuple(chance.choice([0.0, 1.0]) for _ in turns)
        own = tuple(chance.uniform(-2, 2) for _ in turns) if number % 3 == 0 else ()
        made.append(Sample(TrajectoryId(0, max(number, 1)), "ab"[number % 2], ids(chance.randrange(20) for _ in mask),
                           ids(mask), logprobs, versions, chance.uniform(-2, 2), 1.0,
                           weight=0.5 if number < 2 else 1.0, turn_tokens=tuple(turns), turn_rewards=rewards,
                           turn_advantages=own, truncated=number % 4 == 1))
    return made


def work_of(algo, micro=10_000, **shape):
    trained = model(**shape)
    work = StepWork(trained, replace(LEARNER, micro_batch_tokens=micro), algo, 0.8, 0, Alone(CPU),
                    reference=model(**shape) if algo.reference == "copy" else None)
    return trained, work


def gradient(algo, given, order=None, micro=10_000, ranks=1, **shape):
    """Loss and gradient of the samples in some order, split over ranks whose parts are summed."""
    trained, work = work_of(algo, micro, **shape)
    batch = TrainBatch(3, tuple(given))
    work.begin(batch, 1.0)
    placed = [given[i] for i in (order or range(len(given)))]
    total, whole, sequences = 0.0, share_of(placed, algo), math.fsum(s.weight for s in placed)
    for rank in range(ranks):
        part = replace(work.rows(placed[rank::ranks], 3), share=whole, sequences=sequences)
        for row in part.rows:
            row.proximal = work.score(row) + 0.3 * torch.sin(7 * row.behaviour)  # as after an update
            loss = work._loss(row, part)
            loss.backward()
            total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in trained.parameters() if p.grad is not None])


EXTRAS = [{}, {"aggregation": "constant_length", "aggregation_tokens": 9}, {"aggregation": "sequence_mean"},
          {"entropy_coefficient": 0.1, "kl_coefficient": 0.2, "reference": "copy", "dual_clip": 1.5},
          {"correction": "tis_sequence+geometric_mask+staleness", "geometric_low": 0.5, "geometric_high": 2.0},
          {"proximal": "approximated", "correction": "icepop"}, {"kl_coefficient": 0.2, "reference": "copy",
                                                                  "kl_value": "k1", "kl_gradient": "k3"}]
RULES = [AlgoSettings.named(name) for name in ALGORITHMS] + [AlgoSettings(**extra) for extra in EXTRAS]
LABELS = [*ALGORITHMS, *("+".join(extra) or "defaults" for extra in EXTRAS)]


@pytest.mark.parametrize("algo", RULES, ids=LABELS)
def test_l7_order_split_packing_and_ranks_change_nothing(algo):
    given = samples()
    loss, plain = gradient(algo, given)
    assert plain.norm() > 1e-3
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    together = {"order": order, "micro": 40, "ranks": 2}
    for change in ({"order": order}, {"micro": 1}, {"micro": 40}, {"ranks": 3}, together):
        other, moved = gradient(algo, given, **change)
        assert other == pytest.approx(loss, abs=1e-9), change
        assert (moved - plain).norm() < 1e-8 * plain.norm(), change


INTEGRABLE = [(label, algo) for label, algo in zip(LABELS, RULES, strict=True)
              if algo.loss != "cispo" and algo.proximal == "recomputed" and not algo.kl_coefficient]


@pytest.mark.parametrize("algo", [algo for _, algo in INTEGRABLE] + [
    AlgoSettings(kl_coefficient=0.3, reference="copy", kl_value=kl, kl_gradient=kl, correction="none",
                 entropy_coefficient=0.1) for kl in ("k1", "k2", "k3")],
    ids=[label for label, _ in INTEGRABLE] + ["k1", "k2", "k3"])
def test_gradients_agree_with_finite_differences(algo):
    """At the entry of the largest gradient of several tensors. Not for losses whose value is by definition not the
    integral of their gradient: a weight that follows the current policy, a value and a gradient of two estimators."""
    given = samples(4)
    trained, work = work_of(algo)
    work.begin(TrainBatch(3, tuple(given)), 1.0)
    part = work.rows(given, 3)
    for row in part.rows:
        row.proximal = work.score(row) + 0.05 * torch.sin(7 * row.behaviour)

    def loss():
        return sum(work._loss(row, part) for row in part.rows)

    names = [name for name, _ in trained.named_parameters()][::7]
    chosen = [dict(trained.named_parameters())[name] for name in names]
    slopes = torch.autograd.grad(loss(), chosen)
    for name, parameter, slope in zip(names, chosen, slopes, strict=True):
        at, step = slope.abs().argmax(), 1e-6
        with torch.no_grad():
            flat = parameter.view(-1)
            flat[at] += step
            above = loss().item()
            flat[at] -= 2 * step
            below = loss().item()
            flat[at] += step
        assert slope.view(-1)[at].item() == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-8), name


def test_figures_by_staleness_add_up_to_those_of_all_tokens():
    stats = TokenStats()
    current, age = numbers(-1, -2, -1.5, -1, -3), numbers(0, 0, 1, 5, 3)
    tokens = tokens_of(current, behaviour=numbers(-1.1, -2, -1, -1.5, -2), age=age)
    stats.add(tokens, policy_loss(tokens, AlgoSettings(correction="icepop")), current * 0 + 2)
    made = stats.metrics(1.5)
    assert (made["action_tokens"], made["tokens_age0"], made["tokens_age1"], made["tokens_age3"]) == (5, 2, 1, 2)
    assert "tokens_age2" not in made
    for name in ("mismatch_kl", "clip_fraction", "masked"):
        by_age = (2 * made[f"{name}_age0"] + made[f"{name}_age1"] + 2 * made[f"{name}_age3"]) / 5
        assert made[name] == pytest.approx(by_age)
    assert made["masked"] == pytest.approx(1 / 5)  # e^-1 is below the band
    assert made["logprob_gap"] == pytest.approx(0.05)
    assert made["importance_p100"] == made["importance_p100_age3"] == pytest.approx(math.exp(0.5))
    assert made["importance_p50_age1"] == pytest.approx(math.exp(-0.5))
    assert made["importance_capped"] == pytest.approx(1 / 5)
    assert TokenStats().metrics(2.0) == {}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_steps_and_reports(name):
    import asyncio
    algo = AlgoSettings.named(name)
    trainer = TorchTrainer(model(torch.float32), replace(LEARNER, minibatches=2), algo, MemoryWeights())
    trainer.version = 3
    report = asyncio.run(trainer.step(TrainBatch(3, tuple(samples()))))
    trainer.close()
    assert report.metrics["updates"] == 2
    assert report.metrics["grad_norm"] > 0
    assert ("critic_loss" in report.metrics) == algo.critic
    assert {"mismatch_kl_age1", "importance_ess_age2", "masked", "importance_p99"} <= report.metrics.keys()


OWN = '''
def hinge(tokens, base, settings):
    ratio = (tokens.current - base).exp()
    return (settings.clip_high - ratio * tokens.advantages).clamp(min=0), ratio * tokens.advantages > settings.clip_high

def half(tokens, importance, settings):
    return importance * 0 + 0.5

def best(members, settings):
    top = max(m.reward for m in members if m.reward is not None)
    return [((m.reward or 0) - top,) * len(m.turns) for m in members]
'''


def test_pieces_of_ones_own_are_used_by_name(tmp_path, monkeypatch):
    from rollart.algo.advantages import Member
    (tmp_path / "own_losses.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    settings = AlgoSettings(advantage="own_losses:best", loss="own_losses:hinge", correction="own_losses:half")
    made = policy_loss(tokens_of(numbers(-1.0, -1.0), advantages=numbers(0.2, 2.0)), settings)
    assert made.loss.tolist() == pytest.approx([0.5 * 0.08, 0.0])
    assert made.clipped.tolist() == [False, True]
    members = [Member(1.0, (1.0,)), Member(0.0, (0.0,))]
    assert function("advantage", settings.advantage)(members, settings) == [(0,), (-1,)]
