"""Rewards on Ray Serve: bursts from and to zero, functions that fail, refusals, and nothing left at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

pytest.importorskip("ray", reason="needs rollart[ray]: make test-cluster")

import ray
from ray import serve
from test_cluster_run import BOUND, CLUSTER, Watch, idle, play, recipe, refused

from helpers import command, environment, tiny_recipe
from played import request
from rollart.backends.ray.cluster import RayCluster
from rollart.backends.ray.settings import ClusterSettings
from rollart.backends.scorers import open_scorers
from rollart.core.errors import ConfigError, ScorerFailed
from rollart.rewards.settings import CallSettings, ElasticSettings, RewardSettings
from rollart.sandbox import reason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def site(logical):
    """On the two plain hosts; whatever the test did, nothing of Serve may be left on the cluster after it."""
    cluster = RayCluster(ClusterSettings(address=logical.address))
    cluster.connect()
    yield "rollart-test", [n.id for n in cluster.nodes() if n.pool != "CPU"], 120.0
    left = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == "serve"]
    cluster.close()
    assert not left


def run(site, story, function="ray_workers:noted", **values):
    async def main():
        values.setdefault("elastic", ElasticSettings(max_instances=3, idle_seconds=1.0))
        async with asyncio.timeout(200):
            scorers = await open_scorers({"d": function}, RewardSettings(where="serve", **values), site)
            try:
                return await story(scorers)
            finally:
                await scorers.close()

    return asyncio.run(main())


async def down_to_zero(scorers, seconds=60):
    deadline = time.monotonic() + seconds
    while (figures := await scorers.figures())["instances"]:
        assert time.monotonic() < deadline, figures
        await asyncio.sleep(0.2)
    return figures


def lines(path):
    return [line.split() for line in path.read_text().splitlines()]


def test_a_burst_onto_zero_replicas_is_scored_once_each_and_they_fall_to_zero_and_rise_again(site, tmp_path):
    calls = tmp_path / "calls"

    async def story(scorers):
        began = time.monotonic()
        await down_to_zero(scorers)
        fell = time.monotonic()
        asked = [request(i, facts={"calls": str(calls)}) for i in range(60)]
        scores = await asyncio.gather(*(scorers.score_request(each) for each in asked))
        took = time.monotonic() - fell
        assert [score.value for score in scores] == [0.3] * 60
        assert not serve.status().proxies, "nothing listens"
        seen = await scorers.figures()
        assert (seen["calls"], seen["scored"], seen["attempts"], seen["retries"]) == (60, 60, 60, 0)
        assert sorted(line[0] for line in lines(calls)) == sorted(f"g{i}.0" for i in range(60)), "each once"
        assert not {line[2] for line in lines(calls)} & set(site[1]), "on the plain hosts only"
        pids = {int(line[1]) for line in lines(calls)}
        assert seen["cold_starts"] == len(pids) + 1, "and one for the probe"
        assert 1 < len(pids) <= seen["peak_instances"] <= 3
        before = time.monotonic()
        end = await down_to_zero(scorers)
        print(f"serve: first answer, then zero again {fell - began:.1f} s; 60 calls of 50 ms from zero in {took:.1f} s "
              f"on {len(pids)} replicas, zero {time.monotonic() - before:.1f} s later; 95 % within "
              f"{end['latency_p95_seconds']:.1f} s, {end['busy_seconds']:.1f} of {end['alive_seconds']:.1f} "
              "replica-seconds busy")
        assert end["alive_seconds"] > end["busy_seconds"] > 60 * 0.05
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        assert (await scorers.score_request(request(60))).value == 0.3, "and rise again"

    run(site, story)


@pytest.mark.parametrize(("mood", "values"), [
    ("exit", {}), ("hang", {"score_seconds": 6.0}), ("hang", {"score_seconds": 6.0, "call": None})])
def test_a_replica_that_dies_or_hangs_inside_a_call_is_replaced_and_the_call_is_made_again(site, tmp_path, mood,
                                                                                         values):
    """The third: with two calls inside one replica, the one beside the hung one is made again too."""
    pair = values.pop("call", 1) is None
    calls, once = tmp_path / "calls", tmp_path / "once"
    elastic = ElasticSettings(max_instances=1 if pair else 3, idle_seconds=1.0, concurrency=2 if pair else 1)

    async def story(scorers):
        bad = request(0, facts={"calls": str(calls), "mood": mood, "once": str(once)})
        good = [request(i, facts={"calls": str(calls)}) for i in range(1, 10)]
        scores = await asyncio.gather(*(scorers.score_request(each) for each in [bad, *good]))
        assert [score.value for score in scores] == [0.3] * 10
        seen = await scorers.figures()
        assert (seen["scored"], seen["failed"]) == (10, 0)
        assert seen["retries"] >= 1
        assert len([line for line in lines(calls) if line[0] == "g0.0"]) == 2, "once more, on another replica"
        assert len({line[1] for line in lines(calls) if line[0] == "g0.0"}) == 2
        assert (mood == "hang") or seen["killed"] >= 1
        await down_to_zero(scorers)

    run(site, story, retries=3, elastic=elastic, **values)


def test_a_function_that_never_answers_fails_at_its_deadline_and_holds_no_replica(site):
    async def story(scorers):
        began = time.monotonic()
        with pytest.raises(ScorerFailed, match="score in domain d at serve, attempt 2: no answer within 4 s"):
            await scorers.score_request(request(0, facts={"mood": "hang"}))
        assert time.monotonic() - began < 2 * 4.0 + 2.0
        assert (await scorers.figures())["failed"] == 1
        await down_to_zero(scorers)

    run(site, story, score_seconds=4.0, retries=1)


def test_a_function_that_raises_fails_after_its_retries_and_an_answer_above_its_limit_at_once(site):
    async def raises(scorers):
        with pytest.raises(ScorerFailed, match="attempt 3: raised: KeyError: 'target'"):
            await scorers.score_request(request(0))
        seen = await scorers.figures()
        assert (seen["attempts"], seen["retries"], seen["killed"]) == (3, 2, 0)

    run(site, raises, "reward_functions:raises", retries=2)
    with pytest.raises(ConfigError, match=r"above reward.call.answer_mb"):
        run(site, raises, "reward_functions:fine", call=CallSettings(answer_mb=0.00001))


@pytest.mark.skipif(bool(reason("bubblewrap")), reason=f"bubblewrap: {reason('bubblewrap')}")
def test_written_code_runs_in_a_sandbox_inside_the_replica(site):
    tests = {"test_add.py": "import unittest, solution\nclass T(unittest.TestCase):\n    def test(self):\n"
                            "        self.assertEqual(solution.add(2, 3), 5)\n"}
    right, ends = "def add(a, b):\n    return a + b", "import os, signal\nos.killpg(0, signal.SIGKILL)"

    async def story(scorers):
        values = [(await scorers.score_request(request(i, payload={"tests": tests}, answer=f"```\n{code}\n```"))).value
                  for i, code in enumerate((right, ends))]
        assert values == [1.0, 0.0]
        assert (await scorers.figures())["killed"] == 0

    run(site, story, "rollart.rewards.unit_tests:unit_tests")


def test_a_function_that_no_node_has_is_one_line_and_leaves_nothing(site, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(f"import os\nif os.getpid() != {os.getpid()}:\n    raise OSError('not here')"
                                           "\n\ndef reward(request): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="rewards on serve: reward only_here:reward") as refused:
        run(site, None, "only_here:reward")
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="no replica answers") as refused:
        run((*site[:2], 8.0), None, elastic=ElasticSettings(cpus=99.0))
    assert "\n" not in str(refused.value)


def test_a_start_that_is_cancelled_leaves_nothing(site):
    async def main():
        opening = asyncio.create_task(open_scorers({"d": "ray_workers:noted"}, RewardSettings(where="serve"), site))
        await asyncio.sleep(1.0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(asyncio.wait_for(main(), 100))


def test_a_run_with_the_reward_of_one_domain_on_serve(logical, tmp_path):
    settings = recipe(tmp_path, logical.address, cluster='rewards = "CPU"')
    settings = replace(settings, reward=RewardSettings(places={"calculator": "serve"}, elastic=ElasticSettings(
        max_instances=2, idle_seconds=2.0)))
    ran, counts = play(settings, tmp_path / "run", Watch())
    seen = ran.scorers.last
    assert counts["failed"] == 0
    assert seen["scored"] == seen["calls"] - seen["failed"] >= 3 * 8, "failed: cancelled at the end of the run"
    assert seen["cold_starts"] >= 1
    assert seen["peak_instances"] >= 1
    assert idle(logical)


def left_on(address):
    """Replicas by application, and how many named actors."""
    cluster = RayCluster(ClusterSettings(address=address))
    cluster.connect()
    try:
        return ({name: sum(app.deployments["reward"].replica_states.values())
                 for name, app in serve.status().applications.items()},
                len(ray.util.list_named_actors(all_namespaces=True)))
    finally:
        cluster.close()


def test_what_a_killed_run_leaves_falls_to_zero_and_ends_with_the_resumed_run(logical, tmp_path):
    path = tiny_recipe(tmp_path, steps=4000, extra=CLUSTER.format(address=logical.address, cluster="",
                                                                  folder=tmp_path / "weights", **BOUND))
    quiet = {"env": environment(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(command("train", path, "--run", tmp_path / "run", "--set", "reward.elastic.idle_seconds=2",
                                     "--set", "reward.places.calculator=serve"), **quiet)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("run/checkpoints/*")):
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.5)
    first.kill()
    first.wait()
    began = time.monotonic()
    while (left := left_on(logical.address)[0]) and any(left.values()):
        assert time.monotonic() < began + 60, left
        time.sleep(1)
    print(f"serve: {time.monotonic() - began:.0f} s after the run was killed {left}")
    assert len(left) == 1
    resumed = subprocess.Popen(command("train", "--resume", tmp_path / "run"), **quiet)
    time.sleep(20)
    resumed.send_signal(signal.SIGINT)
    assert resumed.wait(60) == 130
    assert left_on(logical.address) == ({}, 0)


@pytest.mark.parametrize(("arguments", "says"), [
    (["--set", "reward.where=serve"], "is on serve, which is on the run's Ray cluster: train with --ray ADDRESS"),
    (["--ray", "{address}", "--set", "reward.where=serve", "--set", "reward.functions.calculator=nowhere:f"],
     "reward nowhere:f needs the module nowhere"),
    (["--ray", "{address}", "--set", "reward.where=serve", "--set", "cluster.rewards=H900"],
     "pool 'H900' has no nodes in this cluster")])
def test_what_cannot_be_served_is_one_line_and_exit_code_2_before_anything_is_started(logical, tmp_path, arguments,
                                                                                    says):
    refused(logical, tmp_path, arguments, says)


def test_without_ray_serve_the_pip_line_is_told(logical, tmp_path):
    path = tiny_recipe(tmp_path, extra=CLUSTER.format(address="", cluster="", folder=tmp_path / "weights", **BOUND))
    done = subprocess.run([sys.executable, "-c", "import sys; sys.modules['fastapi'] = None\n"
                           "from rollart.cli import main; main()", "train", path, "--run", tmp_path / "run", "--ray",
                           logical.address, "--set", "reward.where=serve"], capture_output=True, text=True, timeout=240,
                          check=False, env=environment())
    assert done.returncode == 2, done.stderr
    assert "pip install 'rollart[ray]'" in done.stderr
    assert "fastapi" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "run").exists()
