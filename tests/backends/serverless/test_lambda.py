"""Calls of AWS Lambda through boto3, against a loopback endpoint that speaks its invoke API."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from played import request
from rollart.backends.scorers import open_scorers
from rollart.core.errors import ConfigError, ScorerFailed
from rollart.rewards.handler import Handler
from rollart.rewards.settings import CallSettings, RewardSettings

pytest.importorskip("boto3")


@contextmanager
def invoke_api(function, *moods):
    """`moods`: one per invocation after the first (the call at the start): ok, crash, throttle, gone, garbage."""
    handler, left, paths = Handler([function]), ["ok", *moods], []

    class Api(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            mood = left.pop(0) if len(left) > 1 else left[0]
            status, extra, out = 200, {}, json.dumps(handler.event(json.loads(body)))
            if mood == "crash":
                extra, out = {"X-Amz-Function-Error": "Unhandled"}, '{"errorMessage": "exit status 1"}'
            if mood == "throttle":
                status, extra, out = 429, {"x-amzn-ErrorType": "TooManyRequestsException"}, '{"Reason": "busy"}'
            if mood == "gone":
                status, extra, out = 404, {"x-amzn-ErrorType": "ResourceNotFoundException"}, '{"Message": "no"}'
            if mood == "garbage":
                out = '"it works"'
            self.send_response(status)
            for name, value in {**extra, "Content-Length": str(len(out))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(out.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", paths
    finally:
        server.shutdown()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1",
                        "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)


def score(url, monkeypatch, count=1):
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", url)

    async def main():
        scorers = await open_scorers({"d": "guess"}, RewardSettings(
            where="lambda:my-reward", score_seconds=20, call=CallSettings(backoff_seconds=0.01)))
        try:
            scores = await asyncio.gather(*(scorers.score_request(request(i)) for i in range(count)))
            return scores, await scorers.figures()
        finally:
            await scorers.close()

    return asyncio.run(main())


def test_trajectories_are_scored_by_an_invocation_each(monkeypatch):
    with invoke_api("reward_functions:fine", "ok") as (url, paths):
        scores, figures = score(url, monkeypatch, 20)
    assert [s.value for s in scores] == [0.3] * 20
    assert set(paths) == {"/2015-03-31/functions/my-reward/invocations"}
    assert (figures["attempts"], figures["cold_starts"]) == (20, 1)


def test_a_crash_and_a_throttle_are_repeated(monkeypatch):
    with invoke_api("reward_functions:fine", "crash", "throttle", "ok") as (url, _):
        scores, figures = score(url, monkeypatch)
    assert scores[0].value == 0.3
    assert (figures["retries"], figures["throttled"]) == (1, 1)


@pytest.mark.parametrize(("mood", "says"), [("gone", "HTTP 404: 'ResourceNotFoundException'"),
                                            ("garbage", "not of version 1 of the reward contract")])
def test_what_does_not_pass_is_not_repeated(mood, says, monkeypatch):
    with invoke_api("reward_functions:fine", mood) as (url, paths):
        with pytest.raises(ScorerFailed, match=says):
            score(url, monkeypatch)
        assert len(paths) == 2


def test_a_bad_score_and_an_unreachable_endpoint_are_one_line_at_the_start(monkeypatch):
    with invoke_api("reward_functions:nan") as (url, _), pytest.raises(ConfigError, match="bad_score"):
        score(url, monkeypatch)
    with pytest.raises(ConfigError, match="lambda:my-reward does not work: EndpointConnectionError"):
        score("http://127.0.0.1:9", monkeypatch)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(ConfigError, match="You must specify a region"):
        score("http://127.0.0.1:9", monkeypatch)
