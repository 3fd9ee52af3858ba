"""The plain and the fused path to log-probabilities on one packed batch: same numbers, peak memory, time.

    python benchmarks/logprobs.py [--tokens 8192] [--vocabulary 49152] [--width 576] [--layers 2] [--repeats 2]

Each path runs in a process of its own, since a process's peak memory never falls: forward and backward of the sum of
the log-probabilities of every token. `plain` keeps all logits, `fused` a piece of them. Before it is timed, each path
leaves its log-probabilities and gradient in a file; the parent compares them. Memory is the process's largest resident
set less what it was before the first pass (model and libraries).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rollart.backends.torch import scoring
from rollart.backends.torch.settings import SmallModel
from rollart.backends.torch.transformer import small_model


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def measure(given: argparse.Namespace) -> dict[str, float]:
    """One path: seconds of each repeat, and megabytes above the model's."""
    torch.set_num_threads(given.threads)
    scoring.LOGIT_BYTES = 1 << 60 if given.path == "plain" else scoring.LOGIT_BYTES
    model = small_model(SmallModel(layers=given.layers, width=given.width, heads=9, kv_heads=3, mlp=3 * given.width,
                                   vocabulary=given.vocabulary, context_tokens=given.tokens), 0)
    chance = torch.Generator().manual_seed(1)
    length = given.tokens // 8
    sequences = [(torch.randint(0, given.vocabulary, (length,), generator=chance).tolist(), [0] + [1] * (length - 1))
                 for _ in range(8)]
    packed = scoring.pack_sequences(sequences, torch.device("cpu"))
    before, seconds = peak_mb(), []
    for _ in range(given.repeats):
        model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        logprobs, _ = scoring.action_logprobs(model, packed, 1.0)
        logprobs.sum().backward()
        seconds.append(time.perf_counter() - started)
    peak = peak_mb() - before
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.save({"logprobs": logprobs.detach(), "gradient": gradient}, given.out)
    return {"seconds": statistics.median(seconds), "peak_mb": peak, "tokens": len(logprobs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 8192), ("vocabulary", 49_152), ("width", 576), ("layers", 2), ("repeats", 2),
                        ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--path", choices=("plain", "fused"), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.path:
        print(json.dumps(measure(given)))
        return
    results, tensors = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for path in ("plain", "fused"):
            out = str(Path(folder) / path)
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--path", path, "--out", out],
                                  capture_output=True, text=True, check=True)
            results[path] = json.loads(done.stdout.splitlines()[-1])
            tensors[path] = torch.load(out)
    plain, fused = tensors["plain"], tensors["fused"]
    apart = (plain["logprobs"] - fused["logprobs"]).abs().max()
    turned = (plain["gradient"] - fused["gradient"]).norm() / plain["gradient"].norm()
    print(f"{results['plain']['tokens']} scored tokens, vocabulary {given.vocabulary}, width {given.width}, "
          f"{given.layers} layers, {given.threads} thread(s), float32; largest difference of a log-probability "
          f"{float(apart):.1e}, of the gradient {float(turned):.1e} of its norm")
    for path, seen in results.items():
        print(f"{path:8}{seen['seconds']:>8.1f} s{seen['peak_mb']:>10,.0f} MB above the model")
    if apart > 1e-4 or turned > 1e-4:
        raise SystemExit("the two paths do not compute the same")


if __name__ == "__main__":
    main()
