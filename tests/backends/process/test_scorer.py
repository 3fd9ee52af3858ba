import asyncio
import time

import pytest
from troublesome import trouble_task

from rollart.backends.process.scorer import ProcessScorer
from rollart.core.errors import ConfigError, ScorerFailed
from rollart.core.tokens import ids
from rollart.core.types import Observation, Outcome, Trajectory, TrajectoryId
from rollart.rewards.contract import probe_request, request_of
from rollart.rewards.settings import RewardSettings

MOODY = {"troublesome:Trouble": "troublesome:moody"}


def trajectory(**payload):
    return request_of(Trajectory(TrajectoryId(1, 2), trouble_task(**payload), ids([1]), Observation(), (),
                                 Outcome.FINISHED), 30)


def run(story, rewards=MOODY, **values):
    async def main():
        scorer = ProcessScorer(rewards, RewardSettings(**values))
        try:
            async with asyncio.timeout(30):
                return await story(scorer)
        finally:
            await scorer.close()

    return asyncio.run(main())


def test_a_hung_scorer_is_killed_at_its_deadline_and_replaced():
    async def story(scorer):
        before = await scorer.score(trajectory(mood="good"))
        begin = time.monotonic()
        with pytest.raises(ScorerFailed, match=r"domain troublesome:Trouble, attempt 2: no answer within 1 s"):
            await scorer.score(trajectory(mood="hang"))
        assert 2.0 <= time.monotonic() - begin < 20
        after = await scorer.score(trajectory(mood="good"))
        assert after.success
        assert after.parts["pid"] != before.parts["pid"]

    run(story, processes=1, retries=1, score_seconds=1.0)


@pytest.mark.parametrize("mood", ["hang", "crash"])
def test_a_retry_gives_the_score_of_the_call_that_worked(mood, tmp_path):
    async def story(scorer):
        await scorer.score(trajectory(mood="good"))
        return await scorer.score(trajectory(mood=mood, once=str(tmp_path / "tried")))

    assert run(story, score_seconds=2.0).value == 0.5


@pytest.mark.parametrize(("mood", "says"), [("crash", "ended with code 3"), ("nan", "BadScore: a score's value must")])
def test_no_score_is_an_error_and_never_zero(mood, says):
    async def story(scorer):
        with pytest.raises(ScorerFailed, match=says):
            await scorer.score(trajectory(mood=mood))

    run(story)


def test_a_hung_call_does_not_hold_up_the_others():
    async def story(scorer):
        await scorer.score(trajectory(mood="good"))
        hung = asyncio.create_task(scorer.score(trajectory(mood="hang")))
        begin = time.monotonic()
        await asyncio.gather(*(scorer.score(trajectory(mood="good")) for _ in range(50)))
        assert time.monotonic() - begin < 1.5
        hung.cancel()
        await asyncio.wait([hung])
        assert hung.cancelled()

    run(story, processes=2, score_seconds=20)


def test_a_domain_without_a_reward_and_a_reward_that_does_not_exist_are_refused():
    async def story(scorer):
        with pytest.raises(ScorerFailed, match="no reward is named for it"):
            await scorer.score(trajectory(mood="good"))

    run(story, rewards={"guess": "guess"})
    async def unknown():
        ProcessScorer({"guess": "gess"}, RewardSettings())

    with pytest.raises(ConfigError, match="no reward 'gess'"):
        asyncio.run(unknown())


def test_the_call_at_the_start_finds_a_function_that_gives_no_score_and_pardons_one_that_raises():
    async def story(scorer):
        await scorer.probe(probe_request("raises", 1))
        for domain, says in (("nan", "must be a finite number"), ("none", "returns a Score; got NoneType"),
                             ("exits", "ended with code 4"), ("hangs", "no answer within 3 s")):
            with pytest.raises(ConfigError, match=says):
                await scorer.probe(probe_request(domain, 1))

    run(story, rewards={name: f"troublesome:{name}" for name in ("raises", "nan", "none", "exits", "hangs")},
        score_seconds=3.0)
