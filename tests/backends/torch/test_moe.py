"""Mixtures of experts: the engine's routes replayed in the learner, the balance loss, gradients to the router."""

import asyncio
from dataclasses import replace

import pytest
import torch
from test_pieces import CPU, LEARNER, SHAPE, gradient, samples

from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.engine import EmbeddedEngine
from rollart.backends.torch.learner import TorchTrainer
from rollart.backends.torch.moe import UNKNOWN, Routing, balance_loss, replayed
from rollart.backends.torch.scoring import action_logprobs, pack_sequences
from rollart.backends.torch.settings import EngineSettings, LearnerSettings, WarmStartSettings
from rollart.backends.torch.transformer import small_model
from rollart.backends.torch.warm_start import imitate
from rollart.backends.weights.memory import MemoryWeights
from rollart.core.tokens import floats, ids, join
from rollart.core.types import GenerateRequest, Sample, TrainBatch, TrajectoryId

MIXTURE = replace(SHAPE, experts=8, experts_per_token=2, vocabulary=50, layers=3)


def mixture(ties=False):
    """A small mixture. `ties`: router rows in pairs that differ by less than float32 resolves in a product, and three
    experts a token, so that rounding picks the third: what happens by chance in a large mixture, made certain."""
    model = small_model(replace(MIXTURE, experts_per_token=3 if ties else 2), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 and "gate.weight" not in name else 1.0)
            if ties and name.endswith("mlp.gate.weight"):
                parameter[1::2] = parameter[::2] * (1 + 2e-7)
    return model


def rollout(model, turns=3, actions=40, later=None):
    """One trajectory of several turns in the real engine, as the sample that the learner gets; `later`: the model whose
    weights are loaded before the last turn."""
    async def story():
        weights = MemoryWeights()
        engine = EmbeddedEngine("e", "p", model, weights, EngineSettings(max_concurrent=4, device="cpu"))
        engine.start()
        await engine.load_weights(weights.put(0, model.state_dict()))
        context, mask, logprobs = ids(range(1, 30)), [0] * 29, [0.0] * 29
        for turn in range(turns):
            if later is not None and turn == turns - 1:
                await engine.load_weights(weights.put(1, later.state_dict()))
            request = GenerateRequest(TrajectoryId(0, 0), turn, "d", context, actions, seed=turn)
            said = await engine.generate(request)
            context = join(context, said.tokens, ids([5, 6, 7]))
            mask += [1] * len(said.tokens) + [0] * 3
            logprobs += [*said.logprobs, 0.0, 0.0, 0.0]
        await engine.close()
        return Sample(TrajectoryId(0, 0), "d", context, ids(mask), floats(logprobs),
                      ids(0 if m else -1 for m in mask), 1.0, 1.0, routes=said.routes), said

    return asyncio.run(asyncio.wait_for(story(), 60))


def gap(model, sample, replay):
    settings = LearnerSettings(device="cpu", precision="float32", threads=1, routing_replay=replay)
    trainer = TorchTrainer(model, settings, AlgoSettings(), MemoryWeights())
    report = asyncio.run(trainer.step(TrainBatch(0, (sample,))))
    trainer.close()
    return report.metrics["logprob_gap"]


def test_with_replay_the_learner_says_what_the_engine_said_and_without_it_does_not():
    sample, said = rollout(mixture(ties=True))
    positions = 29 + 3 * 40 + 2 * 3 - 1
    assert len(said.routes) == positions * 3 * 3
    assert set(said.routes) <= set(range(8))
    assert gap(mixture(ties=True), sample, replay=True) < 1e-4
    assert gap(mixture(ties=True), sample, replay=False) > 1e-3


@pytest.mark.parametrize("renewed", [False, True], ids=["kept-kv", "new-weights"])
def test_routes_are_those_of_the_newest_weights_for_the_whole_context(renewed):
    model = mixture()
    newest = model if not renewed else small_model(MIXTURE, 5)
    sample, said = rollout(model, later=newest if renewed else None)
    routing = Routing()
    row = torch.tensor(list(sample.ids))[:-3]
    with torch.no_grad():
        newest(row, torch.arange(len(row)), [len(row)], routing)
    own = torch.stack([routing.chosen[i] for i in range(3)], 1)[:-1]
    engine = torch.frombuffer(bytearray(said.routes), dtype=torch.uint8).view(-1, 3, 2)
    assert torch.equal(own.sort(-1).values, engine.long().sort(-1).values)


def test_replay_fixes_the_choice_and_not_the_weights_and_unknown_positions_choose_themselves():
    model = mixture()
    packed = pack_sequences([([1, 2, 3, 4, 5], [0, 0, 1, 1, 1])], CPU)
    free, chosen = Routing(), Routing(torch.tensor([[[0, 3]] * 3] * 4, dtype=torch.uint8))
    chosen.replay[2] = UNKNOWN
    action_logprobs(model, packed, 1.0, free)
    logprobs, _ = action_logprobs(model, packed, 1.0, chosen)
    assert all(torch.equal(chosen.chosen[i][[0, 1, 3]], torch.tensor([[0, 3]] * 3)) for i in range(3))
    assert torch.equal(chosen.chosen[0][2], free.chosen[0][2])
    logprobs.sum().backward()
    router = model.model.layers[1].mlp.gate.weight.grad
    assert router[[0, 3]].abs().sum() > 0
    assert replayed([b"", b""], [3, 2], 1, 2) is None
    made = replayed([bytes([1, 2, 3, 4]), b""], [1, 2], 1, 2)
    assert made.tolist() == [[[1, 2]], [[UNKNOWN] * 2], [[UNKNOWN] * 2]]


def test_the_balance_loss_is_one_when_even_and_the_number_of_experts_over_k_when_not():
    even, one = Routing(), Routing()
    even.chosen[0], even.probabilities[0] = torch.tensor([[0, 1], [2, 3]]), torch.full((2, 4), 0.25)
    assert balance_loss(even, [2]).tolist() == pytest.approx([1.0])
    one.chosen[0], one.probabilities[0] = torch.tensor([[0], [0]]), torch.tensor([[1.0, 0, 0, 0]] * 2)
    assert balance_loss(one, [1, 1]).tolist() == pytest.approx([4.0, 4.0])


def test_l7_the_router_loss_is_the_same_for_every_order_and_split():
    algo, given = AlgoSettings(router_coefficient=0.5), samples()
    shape = {"experts": 8, "experts_per_token": 2}
    loss, plain = gradient(algo, given, **shape)
    for change in ({"order": [5, 2, 7, 0, 1, 6, 3, 4]}, {"micro": 1}, {"ranks": 3}):
        other, moved = gradient(algo, given, **shape, **change)
        assert other == pytest.approx(loss, abs=1e-9)
        assert (moved - plain).norm() < 1e-8 * plain.norm()
    without, _ = gradient(AlgoSettings(), given, **shape)
    assert loss > without + 0.3


def test_gradient_checkpointing_changes_nothing_but_memory():
    grads = []
    for checkpointing in (False, True):
        model = mixture()
        model.checkpointing = checkpointing
        routing = Routing()
        packed = pack_sequences([([1, 2, 3, 4, 5], [0, 0, 1, 1, 1])], CPU)
        logprobs, _ = action_logprobs(model, packed, 1.0, routing)
        (logprobs.sum() + balance_loss(routing, packed.lengths).sum()).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(*grads, atol=1e-6)


def test_a_mixture_learns_in_the_learner():
    trainer = TorchTrainer(mixture(), replace(LEARNER, eps=1e-8, learning_rate=1e-3), AlgoSettings(
        router_coefficient=0.01), MemoryWeights())
    report = asyncio.run(trainer.step(TrainBatch(0, tuple(samples(8, 0)))))
    trainer.close()
    assert report.metrics["router_balance"] > 0.9
    assert report.metrics["updates"] == 1


def test_a_mixture_imitates_also_where_an_expert_got_no_token():
    model = mixture()
    made = imitate(model, [([1, 2, 3, 4], [0, 0, 1, 1])] * 2, WarmStartSettings(passes=6, batch_tokens=8), 1)
    assert made["last_loss"] < made["first_loss"]
