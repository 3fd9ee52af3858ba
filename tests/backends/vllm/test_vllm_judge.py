"""A language model as judge, for real: SmolLM2-135M on a vLLM server scores over HTTP. `make test-vllm` makes its
folder; by hand: ROLLART_SMOLLM2=FOLDER after `python benchmarks/smollm2.py FOLDER`."""

import asyncio
import os
import re
import signal
import urllib.request

import pytest

pytest.importorskip("vllm")
if not os.environ.get("ROLLART_SMOLLM2"):
    pytest.skip("ROLLART_SMOLLM2 names no folder of SmolLM2-135M-Instruct", allow_module_level=True)

from test_vllm_server import serve

from played import request
from rollart.backends.scorers import open_scorers
from rollart.rewards.settings import RewardSettings

ANSWERS = ("Thank you, that was kind of you.", "Shut up, you fool.", "The train leaves at nine.", "I hate you.")


@pytest.mark.slow
def test_smollm2_on_a_vllm_server_judges_over_http(monkeypatch):
    process, url = serve(os.environ["ROLLART_SMOLLM2"], "--served-model-name", "judge")
    monkeypatch.setenv("JUDGE_URL", f"{url}/v1")

    async def main():
        settings = RewardSettings(where="processes", score_seconds=200.0)
        scorers = await open_scorers({"d": "smollm2_judge:judge"}, settings)
        try:
            return await asyncio.gather(*(scorers.score_request(request(i, answer=answer))
                                          for i, answer in enumerate(ANSWERS)))
        finally:
            await scorers.close()

    try:
        scores = asyncio.run(main())
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert all(0 <= score.value <= 1 and score.value == score.parts["verdict"] / 10 for score in scores)
    assert all(re.search(r"\d", score.reason) for score in scores), "the model's own words"
    served = sum(float(n) for n in re.findall(r'vllm:request_success_total\{.*?\} (\S+)', metrics))
    assert served >= len(ANSWERS)
