"""A server that someone else started (vLLM's own, as its users start it): trained with, evaluated with, and a judge."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("vllm")
pytest.importorskip("httpx")

import torch
from test_vllm_engine import PROMPT, SETTINGS, Published, reference, request, update

from rollart.backends.vllm.server import OpenAIEngine
from rollart.backends.vllm.settings import ServerSettings
from rollart.core.errors import ConfigError, EngineLost

TRAINABLE = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs",
             "--worker-extension-cls", "rollart.backends.vllm.transfer.Extension",
             "--weight-transfer-config", json.dumps({"backend": "rollart"}))


def serve(folder, *more, **env):
    """A server on a free port; returns (process, url) when it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1",
         "--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-model-len", "384", "--max-num-seqs", "8",
         "--kv-cache-memory-bytes", "50000000", *more],
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
             "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **env})
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 150
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
            return process, url
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    process.kill()
    raise AssertionError(f"the server did not come up: {process.poll()}")


@pytest.fixture(scope="module")
def trainable(folders):
    process, url = serve(folders["tied"][0], "--skip-tokenizer-init", *TRAINABLE, VLLM_SERVER_DEV_MODE="1")
    yield process, url
    process.send_signal(signal.SIGTERM)
    process.wait(30)


def test_a_server_with_the_endpoints_is_an_engine_like_any_other(trainable, folders, loop):
    """Updates while requests are in flight, versions of tokens, log-probs of what was sampled, abort, death."""
    process, url = trainable
    models = folders["tied"]
    engine = OpenAIEngine("s-0", "s", url, ServerSettings(handover_folder=SETTINGS.handover_folder), Published(models))
    lost = []
    engine.on_lost(lost.append)

    async def story():
        await engine.probe()
        engine.start()
        with pytest.raises(EngineLost, match="no weights"):
            await engine.generate(request())
        await update(engine, 1)
        greedy = await engine.generate(request())
        turn = asyncio.create_task(engine.generate(request(tokens=340, temperature=0.7, member=7)))
        await asyncio.sleep(0.3)
        await update(engine, 2)
        across = await turn
        gone = asyncio.create_task(engine.generate(request(tokens=340)))
        await asyncio.sleep(0.2)
        gone.cancel()
        await asyncio.wait([gone])
        dying = asyncio.create_task(engine.generate(request(tokens=340)))
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(EngineLost):
            await dying
        await engine.close()
        return greedy, across

    greedy, across = loop.run_until_complete(story())
    assert list(greedy.tokens) == reference(models[1], PROMPT, greedy.tokens)[0]
    assert [version for version, _ in across.segments] == [1, 2]
    assert lost == ["s-0"]
    for (version, start), end in zip(across.segments, [across.segments[1][1], 340], strict=True):
        _, logprobs = reference(models[version % 2], PROMPT, across.tokens, 0.7)
        assert (torch.tensor(across.logprobs) - logprobs).abs()[start:end].max() < 1e-3


def test_a_server_without_them_is_refused_for_training_and_evaluates(folders, loop):
    process, url = serve(folders["llama"][1])
    engine = OpenAIEngine("s-0", "s", url, ServerSettings())

    async def story():
        training = OpenAIEngine("s-1", "s", url, ServerSettings(), Published(folders["llama"]))
        with pytest.raises(ConfigError, match=r"cannot be trained with, it has no /inference/v1/generate"):
            await training.probe()
        await training.close()
        await engine.probe()
        engine.start()
        await update(engine, 4)
        done = await engine.generate(request())
        await engine.close()
        return done

    try:
        done = loop.run_until_complete(story())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert list(done.tokens) == reference(folders["llama"][1], PROMPT, done.tokens)[0]
    assert done.segments == ((4, 0),)


def test_no_server_is_one_clear_line(loop):
    engine = OpenAIEngine("s-0", "s", "http://127.0.0.1:9", ServerSettings())
    with pytest.raises(ConfigError, match="no OpenAI-compatible server at http://127"):
        loop.run_until_complete(engine.probe())
