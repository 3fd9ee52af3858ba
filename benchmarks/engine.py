"""Decode speed of the embedded engine against transformers' `generate`: same weights, same threads, one process.

    python benchmarks/engine.py --rounds 5 --json engine.json

Each round times both sides one after the other for 1, 16 and 64 trajectories; the table shows medians over the rounds.
`generate` samples all rows to the same length from prompts of equal length, which is its best case: no padding at all.
The last row plays several turns and compares KV kept between turns with prefilling each turn's whole context.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from rollart.backends.torch.chat import ByteChat
from rollart.backends.torch.checkpoint import save_model
from rollart.backends.torch.engine import EmbeddedEngine
from rollart.backends.torch.settings import EngineSettings, SmallModel
from rollart.backends.torch.transformer import Transformer, small_model
from rollart.backends.weights.memory import MemoryWeights
from rollart.core.tokens import ids, join
from rollart.core.types import GenerateRequest, TrajectoryId


async def ours(engine: EmbeddedEngine, prompts: list[list[int]], new: int, turns: int = 1, keep: bool = True) -> float:
    """Sampled tokens per second; each further turn adds `new` tokens and a reply of 24."""
    async def play(member: int, prompt: list[int]) -> None:
        context = ids(prompt)
        for turn in range(turns):
            trajectory = TrajectoryId(0, member)
            done = await engine.generate(GenerateRequest(trajectory, turn, "", context, new, seed=member))
            context = join(context, done.tokens, ids(prompt[:24]))
            if not keep or turn == turns - 1:
                engine.release(trajectory)

    begun = time.perf_counter()
    await asyncio.gather(*(play(i, prompt) for i, prompt in enumerate(prompts)))
    return len(prompts) * new * turns / (time.perf_counter() - begun)


def theirs(model: torch.nn.Module, prompts: list[list[int]], new: int) -> float:
    """Sampled tokens per second of `generate` on the same prompts."""
    batch = torch.tensor(prompts)
    begun = time.perf_counter()
    out = model.generate(batch, attention_mask=torch.ones_like(batch), do_sample=True, temperature=1.0, top_k=0,
                         top_p=1.0, max_new_tokens=new, min_new_tokens=new, eos_token_id=None)
    assert out.shape[1] == batch.shape[1] + new
    return len(prompts) * new / (time.perf_counter() - begun)


def reference(model: Transformer) -> torch.nn.Module:
    """The same weights as a transformers model."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder, ByteChat())
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def run(arguments: argparse.Namespace) -> list[dict[str, float | str]]:
    torch.set_num_threads(arguments.threads)
    model = small_model(SmallModel(), seed=0)
    their_model = reference(model)
    weights = MemoryWeights()
    engine = EmbeddedEngine("e0", "all", model, weights, EngineSettings(threads=arguments.threads))
    engine.start()
    await engine.load_weights(weights.put(0, model.state_dict()))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (64, arguments.prompt), generator=generator).tolist()
    sizes, new, speeds = (1, 16, 64), arguments.new, {}
    await ours(engine, prompts, 8)
    theirs(their_model, prompts, 8)
    for _ in range(arguments.rounds):
        for n in sizes:
            speeds.setdefault(("engine", n), []).append(await ours(engine, prompts[:n], new))
            speeds.setdefault(("generate", n), []).append(theirs(their_model, prompts[:n], new))
        for keep in (True, False):
            speeds.setdefault(("turns", keep), []).append(await ours(engine, prompts, 16, turns=8, keep=keep))
    await engine.close()
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    rows = [(f"{n} trajectories", medians["engine", n], "transformers generate", medians["generate", n]) for n in sizes]
    rows.append(("64 trajectories of 8 turns", medians["turns", True], "the same, KV dropped between turns",
                 medians["turns", False]))
    return [{"row": row, "tokens_per_second": mine, "against": against, "their_tokens_per_second": other,
             "ratio": mine / other} for row, mine, against, other in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of either side")
    parser.add_argument("--prompt", type=int, default=100, help="prompt tokens")
    parser.add_argument("--new", type=int, default=128, help="sampled tokens of a trajectory")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = asyncio.run(run(arguments))
    print(f"{'':28}{'engine':>10}{'other':>10}{'ratio':>8}   tokens/s, {arguments.threads} thread(s), medians of "
          f"{arguments.rounds}")
    for row in rows:
        print(f"{row['row']:28}{row['tokens_per_second']:10,.0f}{row['their_tokens_per_second']:10,.0f}"
              f"{row['ratio']:8.2f}   against {row['against']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
