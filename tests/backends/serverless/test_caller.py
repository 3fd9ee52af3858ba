import asyncio
import time

import pytest
from servers import serving

from played import request
from rollart.backends.serverless.caller import Caller
from rollart.backends.serverless.transport import HttpTransport
from rollart.core.errors import ConfigError, ScorerFailed
from rollart.rewards.contract import probe_request
from rollart.rewards.settings import CallSettings, RewardSettings


def settings(call=None, **values):
    call = {"backoff_seconds": 0.01, "backoff_limit_seconds": 0.1, **(call or {})}
    return RewardSettings(**{"score_seconds": 10.0, "retries": 2, "wait_seconds": 10.0, **values},
                          call=CallSettings(**call))


def run(story, *moods, call=None, function="reward_functions:fine", **values):
    async def main():
        async with asyncio.timeout(30), serving(*moods, function=function) as server:
            chosen = settings(call, **values)
            caller = Caller(HttpTransport(server.url, chosen.call), chosen)
            try:
                return await story(caller, server)
            finally:
                await caller.close()

    return asyncio.run(main())


def fails(says, **values):
    async def story(caller, server):
        begin = time.monotonic()
        with pytest.raises(ScorerFailed, match=says):
            await caller.score(request())
        return caller.counts, server, time.monotonic() - begin

    return story


@pytest.mark.parametrize("moods", [("ok",), ("500", "ok"), ("503", "500", "ok"), ("refuse", "ok"), ("drop", "ok"),
                                   ("429", "429 0", "429", "429", "ok"), ("408", "504", "ok")])
def test_what_may_be_repeated_is_and_gives_the_score_once(moods):
    async def story(caller, server):
        score = await caller.score(request())
        assert (score.value, score.success, score.reason) == (0.3, True, "counted")
        assert len(set(server.served)) == 1
        return caller.counts

    counts = run(story, *moods)
    turned_away = sum(mood.startswith("429") for mood in moods)
    assert (counts.attempts, counts.throttled, counts.retries) == (len(moods), turned_away,
                                                                   len(moods) - 1 - turned_away)
    assert counts.in_flight == counts.waiting == 0


def test_a_connection_dropped_after_the_work_is_asked_again_with_the_same_key_and_not_worked_again(tmp_path,
                                                                                                   monkeypatch):
    monkeypatch.setenv("REWARD_CALLS", str(tmp_path / "calls"))

    async def story(caller, server):
        await caller.score(request(7))
        assert len(server.served) == 2
        assert server.heads[0]["idempotency-key"] == server.heads[1]["idempotency-key"] == request(7).key

    run(story, "drop", "ok")
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


@pytest.mark.parametrize(("mood", "says", "attempts"), [
    ("garbage", "its answer is not JSON", 1), ("deep", "nested more than 100 levels", 1),
    ("infinite", "must be a finite number; got inf", 1),
    ("huge", "above reward.call.answer_mb = 1", 1), ("404", "HTTP 404: 'busy'", 1), ("500", "attempt 3: HTTP 500", 3),
    ("refuse", "attempt 3: it hung up before its answer was whole", 3),
    ("status", "attempt 3: ValueError: it does not speak HTTP/1.1: 'HTTP/1.1 abc X'", 3),
    ("promises", "attempt 3: ValueError: it promises an answer 20 times", 3),
    ("chunk", "attempt 3: ValueError: a line or the head of the message is too long", 3)])
def test_a_function_that_fails_for_good_is_an_error_that_says_why_and_never_zero(mood, says, attempts):
    counts, _, _ = run(fails(says), mood)
    assert counts.attempts == attempts


@pytest.mark.parametrize(("function", "says", "attempts"), [
    ("raises", r"attempt 3: raised: KeyError: 'target'", 3), ("later", "attempt 3: unavailable: the judge is away", 3),
    ("never", "attempt 1: unscorable: it is empty", 1), ("nan", "attempt 1: bad_score: a score's value must", 1)])
def test_only_errors_of_the_function_that_may_pass_are_repeated(function, says, attempts):
    counts, _, _ = run(fails(says), "ok", function=f"reward_functions:{function}")
    assert (counts.attempts, counts.circuit_opened) == (attempts, 0)


def test_a_hung_function_costs_its_deadline_and_no_more():
    counts, _, seconds = run(fails("attempt 2: no answer within 0.3 s"), "hang", score_seconds=0.3, retries=1)
    assert counts.attempts == 2
    assert 0.6 <= seconds < 5


def test_a_function_that_always_turns_away_ends_at_the_deadline():
    counts, _, seconds = run(fails("the deadline has passed; last: HTTP 429"), "429", score_seconds=0.2, retries=1,
                             wait_seconds=0.5)
    assert counts.retries == 0
    assert counts.throttled > 2
    assert seconds < 5


def test_retry_after_holds_back_every_caller():
    async def story(caller, server):
        begin = time.monotonic()
        await caller.score(request(1))
        await caller.score(request(2))
        assert time.monotonic() - begin >= 1.0

    run(story, "429 1", "ok")


def test_at_most_the_stated_number_of_calls_is_out_and_the_rest_waits():
    async def story(caller, server):
        await asyncio.gather(*(caller.score(request(i)) for i in range(20)))
        assert server.most == 3
        assert len(server.served) == 20

    run(story, "slow 0.05", call={"concurrency": 3})


def test_who_is_not_let_out_in_time_is_told_what_to_raise():
    async def story(caller, server):
        first = asyncio.create_task(caller.score(request(1)))
        while not server.inside:
            await asyncio.sleep(0.01)
        with pytest.raises(ScorerFailed, match=r"not let out within 0.2 s, 1 calls were \(reward.call.concurrency\)"):
            await caller.score(request(2))
        first.cancel()
        await asyncio.wait([first])

    run(story, "hang", wait_seconds=0.2, call={"concurrency": 1})


def test_a_hedged_call_passes_a_slow_instance_by():
    async def story(caller, server):
        for i in range(30):
            await caller.score(request(i))
        server.moods = ["slow 8", "ok"]
        begin = time.monotonic()
        await caller.score(request(99))
        assert time.monotonic() - begin < 6
        assert caller.counts.hedges_won >= 1
        assert caller.counts.in_flight == 0

    run(story, "ok", call={"hedge": 0.95})


def test_the_circuit_opens_and_closes_and_nothing_is_lost():
    async def story(caller, server):
        calls = [asyncio.create_task(caller.score(request(i))) for i in range(40)]
        while not caller.counts.circuit_opened:
            await asyncio.sleep(0.05)
        before, began = caller.counts.attempts, time.monotonic()
        await asyncio.sleep(0.5)
        most = (time.monotonic() - began) / 0.1 + 3
        assert caller.counts.attempts - before <= most, "one each 0.1 s, not one of each caller"
        server.moods = ["ok"]
        scores = await asyncio.gather(*calls)
        assert [score.value for score in scores] == [0.3] * 40

    run(story, "503", retries=20, call={"breaker_failures": 5, "breaker_seconds": 0.1, "backoff_limit_seconds": 0.02})


def test_a_batched_function_gets_full_batches_and_the_rest_after_the_wait():
    async def story(caller, server):
        scores = await asyncio.gather(*(caller.score(request(i)) for i in range(10)))
        assert sorted(score.value for score in scores) == [2.0] * 2 + [4.0] * 8
        assert caller.counts.attempts == 10
        assert len(server.heads) == 3

    run(story, "ok", function="reward_functions:together", call={"batch": 4, "batch_seconds": 0.05})


def test_one_bad_trajectory_of_a_batch_spoils_no_other():
    async def story(caller, server):
        results = await asyncio.gather(caller.score(request(1)), caller.score(request(2, domain="elsewhere")),
                                       caller.score(request(3)), return_exceptions=True)
        assert [isinstance(result, ScorerFailed) for result in results] == [False, True, False]
        assert "no reward is served for domain" in str(results[1])

    run(story, "ok", function="d=reward_functions:fine", call={"batch": 3})


def test_a_cancelled_call_frees_its_room():
    async def story(caller, server):
        hung = asyncio.create_task(caller.score(request(1)))
        while not server.inside:
            await asyncio.sleep(0.01)
        hung.cancel()
        await asyncio.wait([hung])
        assert hung.cancelled()
        server.moods = ["ok"]
        await caller.score(request(2))
        assert caller.counts.in_flight == 0

    run(story, "hang", call={"concurrency": 1})


def test_a_request_above_its_limit_is_not_sent():
    async def story(caller, server):
        with pytest.raises(ScorerFailed, match=r"above reward.call.request_mb = 0.01"):
            await caller.score(request(1, answer="x" * 20_000))
        assert not server.heads

    run(story, "ok", call={"request_mb": 0.01})


def test_the_token_comes_from_the_environment_is_sent_and_is_in_no_error(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")

    async def story(caller, server):
        with pytest.raises(ScorerFailed) as failed:
            await caller.score(request(1))
        assert server.heads[0]["authorization"] == "Bearer s3cret"
        assert "s3cret" not in str(failed.value)

    run(story, "404", call={"token_env": "REWARD_TOKEN"})
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(ConfigError, match="set that environment variable"):
        HttpTransport("http://127.0.0.1:1/", CallSettings(token_env="REWARD_TOKEN"))


@pytest.mark.parametrize(("mood", "function", "says"), [
    ("404", "fine", "HTTP 404"), ("garbage", "fine", "not JSON"), ("ok", "nan", "bad_score"),
    ("ok", "nothing", "returns a Score; got NoneType"), ("ok", "later", "unavailable: the judge is away")])
def test_the_call_at_the_start_finds_what_does_not_work(mood, function, says):
    async def story(caller, server):
        with pytest.raises(ConfigError, match=f"the reward of domain d at http.*does not work: .*{says}"):
            await caller.probe(probe_request("d", 1))

    run(story, mood, function=f"reward_functions:{function}")


def test_a_url_that_refuses_is_one_line_at_the_start():
    async def main():
        chosen = settings()
        caller = Caller(HttpTransport("http://127.0.0.1:9/x", chosen.call), chosen)
        with pytest.raises(ConfigError, match=r"http://127.0.0.1:9/x does not work: ConnectionRefusedError"):
            await caller.probe(probe_request("d", 1))
        await caller.close()

    asyncio.run(main())


def test_a_function_that_only_dislikes_an_empty_episode_passes_the_call_at_the_start():
    run(lambda caller, server: caller.probe(probe_request("d", 1)), "ok", function="reward_functions:raises")
