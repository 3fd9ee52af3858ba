import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from played import played, request
from rollart.backends.scorers import open_scorers
from rollart.core.errors import ConfigError, ScorerFailed
from rollart.core.events import RewardsSampled
from rollart.core.tokens import ids
from rollart.core.types import Observation, Outcome, Task, Trajectory, TrajectoryId
from rollart.rewards.settings import ElasticSettings, RewardSettings

F = "reward_functions:"
DOMAINS = {name: name for name in ("calculator", "frozen_lake", "guess")}


def run(story, domains, **values):
    async def main():
        values.setdefault("elastic", ElasticSettings(max_instances=2, idle_seconds=0.5))
        async with asyncio.timeout(60):
            scorers = await open_scorers(domains, RewardSettings(**values))
            try:
                return await story(scorers)
            finally:
                await scorers.close()

    return asyncio.run(main())


@pytest.mark.parametrize("where", ["in_process", "processes", "elastic"])
def test_every_place_gives_the_same_scores(where):
    async def story(scorers):
        episodes = played(60)
        scores = await asyncio.gather(*(scorers.score_request(asked) for asked, _ in episodes))
        assert scores == [score for _, score in episodes]
        figures = await scorers.figures()
        assert (figures["calls"], figures["scored"], figures["failed"], figures["in_flight"]) == (60, 60, 0, 0)
        return figures

    figures = run(story, DOMAINS, where=where)
    if where != "in_process":
        assert 0 < figures["busy_seconds"] < figures["alive_seconds"]


def test_a_domain_of_its_own_place_and_function_and_what_register_serverless_bound():
    async def story(scorers):
        assert (await scorers.score_request(request(1, domain="a", answer="ab"))).value == 0.2
        assert (await scorers.score_request(request(1, domain="b", answer="ab"))).value == 0.2
        figures = await scorers.figures()
        assert figures["started"] == 1, "b runs where its function was bound"
        assert figures["attempts"] == 1

    run(story, {"a": "guess", "b": F + "bound"}, places={"a": "in_process"}, functions={"a": F + "fine"})


def test_the_figures_are_told_when_they_change_and_not_while_nothing_happens():
    async def story(scorers):
        events = []
        watching = asyncio.create_task(scorers.watch(events.append))
        while not events:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.2)
        assert len(events) == 1
        await scorers.score_request(request(1, domain="a"))
        while len(events) < 2:
            await asyncio.sleep(0.05)
        watching.cancel()
        assert isinstance(events[-1], RewardsSampled)
        assert events[-1].figures["scored"] == 1

    run(story, {"a": F + "fine"}, where="in_process")


@pytest.mark.parametrize("where", ["in_process", "processes", "elastic"])
@pytest.mark.parametrize(("name", "says"), [
    (F + "missing", "is not a function"), ("nowhere:f", "needs the module nowhere"),
    (F + "two_arguments", "must take one argument, the RewardRequest: missing a required argument: 'other'"),
    (F + "nan", "a score's value must be a finite number; got nan"), (F + "nothing", "returns a Score"),
    (F + "later", "the judge is away")])
def test_a_function_that_does_not_work_is_one_line_at_the_start(where, name, says):
    async def story(scorers):
        raise AssertionError("it was opened")

    with pytest.raises(ConfigError, match=says) as refused:
        run(story, {"d": name}, where=where)
    assert "\n" not in str(refused.value)


def test_a_place_that_there_is_not_is_refused_in_the_recipe_and_in_the_code():
    with pytest.raises(ValueError, match="a reward runs in_process, in processes, elastic"):
        RewardSettings(where="cloud")
    with pytest.raises(ConfigError, match="is bound by register_serverless: a reward runs in_process"):
        run(None, {"d": F + "bound_to_nowhere"})


def test_a_failed_call_is_counted_and_raised_never_zero():
    async def story(scorers):
        with pytest.raises(ScorerFailed, match="KeyError: 'target'"):
            await scorers.score_request(request(1, domain="d"))
        with pytest.raises(ScorerFailed, match="no reward is named for domain e"):
            await scorers.score_request(request(1, domain="e"))
        assert (await scorers.figures())["failed"] == 1

    run(story, {"d": F + "raises"}, where="in_process")


def test_a_platform_that_is_killed_comes_back_and_nothing_is_lost():
    async def story(scorers):
        await scorers.score_request(request(0, domain="d"))
        await scorers.figures()
        scorers._platforms[0]._process.kill()
        scores = await asyncio.gather(*(scorers.score_request(request(i, domain="d")) for i in range(1, 21)))
        assert [score.value for score in scores] == [0.3] * 20
        figures = await scorers.figures()
        assert figures["platform_restarts"] == 1
        assert figures["started"] >= 2, "totals go on"
        assert figures["failed"] == 0

    run(story, {"d": F + "slow"}, where="elastic", retries=20)


def test_a_trajectory_is_scored_from_its_facts_and_facts_that_are_not_json_are_a_failure():
    made = Trajectory(TrajectoryId(3, 1), Task("t", "d"), ids([1]), Observation(facts={"n": 1}), (), Outcome.FINISHED)

    async def story(scorers):
        assert (await scorers.score(made)).value == 0.0
        with pytest.raises(ScorerFailed, match=r"g3.1: its payload or facts are not JSON"):
            await scorers.score(replace(made, start=Observation(facts={"n": object()})))

    run(story, {"d": F + "fine"}, where="in_process")


LEFT_ALONE = """
import asyncio, os, signal
from played import request
from rollart.backends.scorers import open_scorers
from rollart.rewards.settings import RewardSettings

async def main():
    scorers = await open_scorers({"d": "reward_functions:fine"}, RewardSettings(where="elastic"))
    print(scorers._platforms[0]._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_nothing_is_left_of_the_platform_when_the_run_is_killed(tmp_path):
    tests = os.path.dirname(sys.modules["played"].__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
                   "REWARD_CALLS": str(tmp_path / "calls")}
    done = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, check=False,
                          env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids, deadline = [done.stdout.strip(), (tmp_path / "calls").read_text().split()[1]], time.monotonic() + 10
    while left := [line for line in subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True,
                                                   check=True).stdout.splitlines()
                   if line.split()[0] in pids and not line.split()[1].startswith("Z")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
