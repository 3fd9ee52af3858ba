"""Trained tokens per second: the learner's packed step against a plain padded loop, in one run on one batch.

    python benchmarks/learner.py --repeats 5 --threads 1 --json learner.json
    python benchmarks/learner.py --ranks 2 --layers 6 --width 256

Three contestants with equal weights, loss, optimizer and threads take turns on one ragged multi-turn batch:

    rollart        TorchTrainer.step: packed, logits at action tokens only
    padded         our decoder in the loop most people would write: rows padded to the longest of their micro-batch,
                   logits everywhere, the mask applied at the end
    transformers   the same loop with transformers' model of the same shape

With --ranks 2 the contestants are the learner in one process and over that many ranks, each rank with --threads
threads on this machine, over gloo.

Tokens count what was sampled or read, never padding. The first losses must agree, or the run fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from rollart.algo.settings import AlgoSettings
from rollart.backends.torch.chat import ByteChat
from rollart.backends.torch.checkpoint import save_model
from rollart.backends.torch.learner import TorchTrainer
from rollart.backends.torch.losses import ActionTokens, policy_loss
from rollart.backends.torch.optimizer import make_optimizer
from rollart.backends.torch.ranks import RankedTrainer, RankSpec
from rollart.backends.torch.settings import LearnerSettings, SmallModel
from rollart.backends.torch.transformer import Transformer, small_model
from rollart.backends.weights import WeightsSettings
from rollart.backends.weights.memory import MemoryWeights
from rollart.core.ports import Trainer
from rollart.core.tokens import floats, ids
from rollart.core.types import Sample, TrainBatch, TrajectoryId

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ragged_batch(count: int, vocabulary: int, seed: int) -> TrainBatch:
    """Episodes of 1 to 8 turns: a prompt of 80-160 tokens, actions of 2-32, replies of 20-80. Behaviour log-probs are
    those of a uniform policy, which a fresh model nearly is."""
    chance = random.Random(seed)
    samples = []
    for number in range(count):
        mask = [0] * chance.randint(80, 160)
        for _ in range(chance.randint(1, 8)):
            mask += [1] * chance.randint(2, 32) + [0] * chance.randint(20, 80)
        behaviour = -torch.log(torch.tensor(float(vocabulary))).item()
        samples.append(Sample(TrajectoryId(number // 8, number % 8), "d", ids(chance.randrange(256) for _ in mask),
                              ids(mask), floats(behaviour * m for m in mask), ids(m - 1 for m in mask),
                              chance.uniform(-1, 1), 0.0))
    return TrainBatch(0, tuple(samples))


def padded_forward(model: Transformer) -> Forward:
    """Rows [N, L] to logits [N, L, V], computing padding like any other token."""

    def forward(rows: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        count, longest = rows.shape
        positions = torch.arange(longest).repeat(count)
        return model.logits(model(rows.flatten(), positions, [longest] * count)).view(count, longest, -1)

    return forward


class PaddedLoop:
    """The plain loop: micro-batches of rows in their given order, padded to the longest of each."""

    def __init__(self, module: torch.nn.Module, forward: Forward, settings: LearnerSettings,
                 algo: AlgoSettings) -> None:
        self.module, self.forward, self.settings, self.algo = module, forward, settings, algo
        self.optimizer = make_optimizer(module, betas=(settings.beta1, settings.beta2), eps=settings.eps,
                                        weight_decay=settings.weight_decay)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate

    def step(self, samples: Sequence[Sample]) -> float:
        """One optimizer step on the token mean; returns the loss."""
        actions, total = sum(sum(sample.mask) for sample in samples), 0.0
        for start, end in self._slices(samples):
            loss = self._loss(samples[start:end]) / actions
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _slices(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        slices, start, longest = [], 0, 0
        for end, sample in enumerate(samples):
            longest = max(longest, len(sample.ids))
            if end > start and longest * (end + 1 - start) > self.settings.micro_batch_tokens:
                slices.append((start, end))
                start, longest = end, len(sample.ids)
        return [*slices, (start, len(samples))]

    def _loss(self, samples: Sequence[Sample]) -> torch.Tensor:
        def rows(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence([torch.tensor(getattr(s, name).tolist(), dtype=dtype)
                                                    for s in samples], batch_first=True)

        tokens, mask, behaviour = rows("ids", torch.int64), rows("mask", torch.int64), rows("logprobs", torch.float32)
        lengths = torch.tensor([len(s.ids) for s in samples])
        real = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long()
        logprobs = self.forward(tokens, real)[:, :-1].float().log_softmax(-1)
        current = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        advantages = torch.tensor([s.advantage for s in samples])[:, None].expand_as(current)
        flat = [part.flatten() for part in (current, current.detach(), behaviour[:, 1:], advantages)]
        made = policy_loss(ActionTokens(*flat, flat[0].detach() * 0, torch.tensor([len(flat[0])])), self.algo)
        return (made.loss * mask[:, 1:].flatten()).sum()


def transformers_model(model: Transformer) -> torch.nn.Module:
    """The same weights in transformers' own class."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder), ByteChat())
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def contestants(shape: SmallModel, settings: LearnerSettings, batch: TrainBatch) -> dict[str, Callable[[], float]]:
    """Name to a function that trains one step on the batch and returns its loss."""
    algo = AlgoSettings()
    trainer = TorchTrainer(small_model(shape, 0), settings, algo, MemoryWeights())
    ours = small_model(shape, 0)
    padded = PaddedLoop(ours, padded_forward(ours), settings, algo)
    foreign = transformers_model(ours)
    peer = PaddedLoop(foreign, lambda rows, real: foreign(input_ids=rows, attention_mask=real, use_cache=False).logits,
                      settings, algo)

    def packed() -> float:
        report = asyncio.run(trainer.step(TrainBatch(trainer.version, batch.samples)))
        return report.metrics["loss"]

    return {"rollart": packed, "padded": lambda: padded.step(batch.samples),
            "transformers": lambda: peer.step(batch.samples)}


def ranked(shape: SmallModel, settings: LearnerSettings, batch: TrainBatch,
           loop: asyncio.AbstractEventLoop) -> dict[str, Callable[[], float]]:
    """The learner in one process, and over `settings.ranks` processes; the figure includes gathering the weights."""
    model, algo = small_model(shape, 0), AlgoSettings()
    spec = RankSpec(model=(model.config, model.state_dict()), settings=settings, algo=algo, weights=WeightsSettings())
    several = RankedTrainer(spec)
    loop.run_until_complete(several.start())
    trainers = {"rank": TorchTrainer(small_model(shape, 0), settings, algo, MemoryWeights()), "ranks": several}

    def step(trainer: Trainer) -> float:
        report = loop.run_until_complete(trainer.step(TrainBatch(trainer.version, batch.samples)))
        return report.metrics["loss"]

    return {"1 rank" if name == "rank" else f"{settings.ranks} ranks": partial(step, trainer)
            for name, trainer in trainers.items()}


def measure(entrants: dict[str, Callable[[], float]], tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Tokens per second of each, taking turns; the first round warms up and checks that the losses agree."""
    first = {name: step() for name, step in entrants.items()}
    if max(first.values()) - min(first.values()) > 1e-3 * max(1.0, *map(abs, first.values())):
        raise SystemExit(f"the contestants do not compute the same loss: {first}")
    rates: dict[str, list[float]] = {name: [] for name in entrants}
    for _ in range(repeats):
        for name, step in entrants.items():
            started = time.perf_counter()
            step()
            rates[name].append(tokens / (time.perf_counter() - started))
    return {name: {"median": statistics.median(seen), "low": min(seen), "high": max(seen), "first_loss": first[name]}
            for name, seen in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=LearnerSettings().micro_batch_tokens)
    parser.add_argument("--vocabulary", type=int, default=SmallModel().vocabulary)
    parser.add_argument("--layers", type=int, default=SmallModel().layers)
    parser.add_argument("--width", type=int, default=SmallModel().width)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="compare this many processes with one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()

    torch.set_num_threads(given.threads)
    shape = SmallModel(vocabulary=given.vocabulary, layers=given.layers, width=given.width)
    settings = LearnerSettings(threads=given.threads, micro_batch_tokens=given.micro_batch_tokens, device="cpu",
                               precision="float32", ranks=given.ranks)
    batch = ragged_batch(given.trajectories, given.vocabulary, given.seed)
    lengths = [len(sample.ids) for sample in batch.samples]
    with asyncio.Runner() as runner:
        entrants = contestants(shape, settings, batch) if given.ranks == 1 else ranked(shape, settings, batch,
                                                                                       runner.get_loop())
        result = measure(entrants, sum(lengths), given.repeats)

    parameters = sum(p.numel() for p in small_model(shape, 0).parameters())
    print(f"{given.trajectories} trajectories of {min(lengths)}-{max(lengths)} tokens, {parameters / 1e6:.1f}M "
          f"parameters, vocabulary {given.vocabulary}, {given.threads} thread(s), float32, median of {given.repeats}")
    first = next(iter(result))
    print(f"{'':14}{'tokens/s':>10}{'low':>10}{'high':>10}{first + ' is':>12}")
    for name, seen in result.items():
        ahead = result[first]["median"] / seen["median"]
        print(f"{name:14}{seen['median']:>10,.0f}{seen['low']:>10,.0f}{seen['high']:>10,.0f}{ahead:>11.2f}x")
    if given.json:
        settings_used = {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}
        given.json.write_text(json.dumps({"benchmark": "learner", "torch": torch.__version__,
                                          "machine": platform.processor() or platform.machine(),
                                          "settings": settings_used, "tokens_per_second": result}, indent=2) + "\n",
                              encoding="utf-8")


if __name__ == "__main__":
    main()
