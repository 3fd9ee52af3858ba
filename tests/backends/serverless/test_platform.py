import asyncio
import json
import os
import time

import pytest

from played import request
from rollart.backends.serverless.platform import Platform
from rollart.rewards.contract import to_json
from rollart.rewards.settings import ElasticSettings


def run(story, function="reward_functions:fine", request_seconds=10.0, **values):
    async def main():
        settings = ElasticSettings(**{"idle_seconds": 0.5, "max_instances": 3, **values})
        platform = Platform([function], settings, request_seconds)
        reaper = asyncio.create_task(platform.run())
        try:
            async with asyncio.timeout(60):
                return await story(platform)
        finally:
            reaper.cancel()
            await platform.close()

    return asyncio.run(main())


async def ask(platform, asked):
    status, body = await platform.serve(json.dumps(to_json(asked)).encode(), asked.key)
    return status, json.loads(body)


async def down_to(platform, instances, seconds=10):
    deadline = time.monotonic() + seconds
    while platform.stats()["instances"] > instances:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_instances_rise_with_a_burst_and_fall_to_zero(tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_CALLS", str(tmp_path / "calls"))

    async def story(platform):
        assert platform.stats()["instances"] == 0
        answers = await asyncio.gather(*(ask(platform, request(i)) for i in range(60)))
        assert all(status == 200 and answer["score"]["value"] == 0.3 for status, answer in answers)
        assert platform.stats()["peak_instances"] == 3
        await down_to(platform, 0)
        stats = platform.stats()
        assert (stats["busy"], stats["queued"], stats["requests"], stats["started"]) == (0, 0, 60, 3)
        assert stats["alive_seconds"] > stats["busy_seconds"] > 3.0 / 60
        assert (await ask(platform, request(60)))[0] == 200, "and rise again"
        return sum(answer["instance"]["cold"] for _, answer in answers)

    assert run(story, function="reward_functions:slow") == 3
    lines = (tmp_path / "calls").read_text().splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(f"g{i}.0" for i in range(61)), "each once"
    for pid in {int(line.split()[1]) for line in lines}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_repeated_key_is_answered_without_work(tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_CALLS", str(tmp_path / "calls"))

    async def story(platform):
        first = await ask(platform, request(1))
        await down_to(platform, 0)
        assert await ask(platform, request(1)) == first
        assert platform.stats()["instances"] == 0

    run(story)
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_a_crash_and_a_hang_cost_their_own_request_and_instance_only():
    async def story(platform):
        moods = [request(0, facts={"mood": "exit"}), request(1, facts={"mood": "hang"})]
        answers = await asyncio.gather(*(ask(platform, r) for r in [*moods, *(request(i) for i in range(2, 12))]))
        assert answers[0][0] == 502
        assert "died with the request inside" in answers[0][1]["error"]["message"]
        assert answers[1][0] == 504
        assert "no answer within 4 s" in answers[1][1]["error"]["message"]
        assert [status for status, _ in answers[2:]] == [200] * 10
        assert platform.stats()["killed"] == 1 or platform.stats()["killed"] == 2

    run(story, function="reward_functions:moody", request_seconds=4.0)


def test_one_instance_serves_several_requests_at_a_time_if_it_may():
    async def story(platform):
        answers = await asyncio.gather(*(ask(platform, request(i)) for i in range(8)))
        assert len({answer["instance"]["id"] for _, answer in answers}) == 1

    run(story, function="reward_functions:slow", concurrency=8)


def test_requests_beyond_the_queue_are_turned_away_not_lost():
    async def story(platform):
        answers = await asyncio.gather(*(ask(platform, request(i)) for i in range(20)))
        statuses = [status for status, _ in answers]
        assert statuses.count(200) >= 5
        assert statuses.count(429) == 20 - statuses.count(200)
        assert platform.stats()["turned_away"] == statuses.count(429)

    run(story, function="reward_functions:slow", queue=5, max_instances=1)


def test_an_instance_that_cannot_start_is_told_to_all_who_wait():
    async def story(platform):
        answers = await asyncio.gather(*(ask(platform, request(i)) for i in range(5)))
        assert {status for status, _ in answers} == {503}
        assert "is not a function" in answers[0][1]["error"]["message"]

    run(story, function="reward_functions:missing")


def test_a_cold_start_beyond_its_deadline_is_told():
    async def story(platform):
        status, answer = await ask(platform, request(1))
        assert status == 503
        assert "did not start within 0.01 s" in answer["error"]["message"]
        await down_to(platform, 0)

    run(story, start_seconds=0.01)
