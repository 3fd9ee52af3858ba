"""A language model as judge, for real: the embedded engine behind an OpenAI-compatible server scores over HTTP."""

import asyncio
import json
import string

from played import request
from rollart.backends.scorers import open_scorers
from rollart.backends.serverless.http import read_message
from rollart.backends.torch.chat import ByteChat
from rollart.backends.torch.engine import EmbeddedEngine
from rollart.backends.torch.settings import EngineSettings, SmallModel, WarmStartSettings
from rollart.backends.torch.transformer import small_model
from rollart.backends.torch.warm_start import imitate
from rollart.backends.weights.memory import MemoryWeights
from rollart.core.tokens import join
from rollart.core.types import GenerateRequest, Message, Sampling, TrajectoryId
from rollart.rewards.settings import ElasticSettings, RewardSettings

CHAT = ByteChat()


def verdict(letter):
    """What the judge is taught: how early in the alphabet the letter stands."""
    return 10 if letter in string.ascii_lowercase[:13] else 2


def taught():
    """A small model that has learned to judge."""
    model = small_model(SmallModel(layers=1, width=48, heads=2, kv_heads=2, mlp=96, context_tokens=64), 0)
    sequences = []
    for letter in string.ascii_lowercase * 12:
        prompt, said = CHAT.prompt([Message("user", letter)]), CHAT.action(f"SCORE: {verdict(letter)}")
        sequences.append((join(prompt, said), [0] * len(prompt) + [1] * len(said)))
    imitate(model, sequences, WarmStartSettings(passes=8, batch_tokens=384, learning_rate=5e-3), 1)
    return model


class Endpoint:
    """POST /v1/chat/completions over one engine; `most` requests were inside at once."""

    def __init__(self, engine):
        self.engine, self.served, self.inside, self.most = engine, 0, 0, 0

    async def connected(self, reader, writer):
        try:
            while True:
                asked = await read_message(reader, 100_000, request=True)
                assert asked.start[:2] == ("POST", "/v1/chat/completions")
                out = json.dumps(await self.complete(json.loads(asked.body))).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(out) + out)
        except (EOFError, OSError):
            writer.close()

    async def complete(self, body):
        self.served, self.inside = self.served + 1, self.inside + 1
        self.most = max(self.most, self.inside)
        prompt = CHAT.prompt([Message(m["role"], m["content"]) for m in body["messages"]])
        done = await self.engine.generate(GenerateRequest(
            TrajectoryId(0, self.served), 0, "judge", prompt, body["max_tokens"], Sampling(body["temperature"]),
            CHAT.stop))
        self.inside -= 1
        self.engine.release(TrajectoryId(0, self.served))
        return {"choices": [{"message": {"role": "assistant", "content": CHAT.text(done)}}]}


def test_a_language_model_on_the_embedded_engine_judges_a_batch_over_http(monkeypatch):
    model, weights = taught(), MemoryWeights()

    async def main():
        engine = EmbeddedEngine("judge", "judge", model, weights, EngineSettings(max_concurrent=16))
        engine.start()
        await engine.load_weights(weights.put(0, model.state_dict()))
        endpoint = Endpoint(engine)
        server = await asyncio.start_server(endpoint.connected, "127.0.0.1", 0)
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        letters = string.ascii_lowercase * 4
        scorers = await open_scorers({"d": "reward_functions:letter_judge"}, RewardSettings(
            where="elastic", elastic=ElasticSettings(max_instances=2, concurrency=8)))
        try:
            scores = await asyncio.gather(*(scorers.score_request(request(i, answer=letter))
                                            for i, letter in enumerate(letters)))
        finally:
            await scorers.close()
            server.close()
            await engine.close()
        return letters, scores, endpoint

    letters, scores, endpoint = asyncio.run(main())
    right = [score.value == verdict(letter) / 10 for letter, score in zip(letters, scores, strict=True)]
    assert sum(right) >= 0.9 * len(right)
    assert {score.parts["verdict"] for score in scores} == {2.0, 10.0}
    assert endpoint.most > 1, "the engine had several at once"
    assert endpoint.served < len(letters) + 10, "each instance asked once for each letter"
