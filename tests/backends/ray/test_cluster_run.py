"""Whole runs over actors on logical nodes: placement, domains on their pools, and what dies on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

pytest.importorskip("ray", reason="needs rollart[ray]: make test-cluster")

import ray

from helpers import rollart, tiny_recipe
from rollart.build import open_run
from rollart.config.recipe import load_recipe
from rollart.core.errors import ConfigError
from rollart.core.events import (
    BatchTaken,
    CheckpointSaved,
    EngineDown,
    EngineUp,
    StepEnded,
    TrajectoryStarted,
    TurnEnded,
)
from rollart.observe.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CLUSTER = """
[cluster]
address = "{address}"
train = "H800"
environments = "CPU"
start_seconds = 120
{cluster}
[pools.prefill]
hardware = "H800"
{prefill}
[pools.decode]
hardware = "H20"
{decode}
[engine]
threads = 1
[learner]
threads = 1
[weights]
carrier = "file"
folder = "{folder}"
"""
BOUND = {"prefill": 'domains = ["frozen_lake"]', "decode": 'domains = ["calculator"]'}


def recipe(tmp_path, address, steps=3, cluster="", **pools):
    extra = CLUSTER.format(address=address, cluster=cluster, folder=tmp_path / "weights",
                           **{**BOUND, **pools})
    return load_recipe(tiny_recipe(tmp_path, steps=steps, extra=extra), ["pipeline.checkpoint_every=2"])


class Watch:
    """What happened, and what to do when it does: `on` is called with the run and each event."""

    def __init__(self, act=lambda run, event: None):
        self.rows, self.act, self.run = [], act, None

    def on(self, at, event):
        self.rows.append((at, event))
        if self.run:
            self.act(self.run, event)

    def of(self, kind):
        return [(at, event) for at, event in self.rows if isinstance(event, kind)]

    def engines(self):
        """Domain to the engines that served it."""
        domains = {event.id: event.domain for _, event in self.of(TrajectoryStarted)}
        out = {}
        for _, event in self.of(TurnEnded):
            out.setdefault(domains[event.id], set()).add(event.engine)
        return out


def play(settings, folder, watch, *, ends=True):
    """The run to its end, or until `watch` stops it; the ledger checks its identity at each step."""
    async def main():
        with RunFolder(folder).create(settings.to_json()) as run_folder:
            async with open_run(settings, run_folder, resume=False, subscribers=lambda _: [watch]) as run:
                watch.run = run
                async with asyncio.timeout(300):
                    assert await run.train() == ends
                counts = run.ledger.accounts.counts()
                assert not ends or counts["in_flight"] == 0
                assert counts["dispatched"] == sum(n for name, n in counts.items() if name != "dispatched")
                return run, counts
    return asyncio.run(main())


def idle(logical):
    """Nothing is held on the cluster: what was reserved there was given back."""
    ray.init(address=logical.address, log_to_driver=False, logging_level="ERROR")
    try:
        until = time.monotonic() + 30
        while (held := {k: v for k, v in ray.cluster_resources().items() if k in ("H800", "H20", "CPU")
                        and ray.available_resources().get(k, 0) < v}) and time.monotonic() < until:
            time.sleep(0.3)
        return not held
    finally:
        ray.shutdown()


def test_roles_and_domains_land_on_their_pools_and_everything_is_given_back(logical, tmp_path):
    watch = Watch()
    run, _ = play(recipe(tmp_path, logical.address), tmp_path / "run", watch)
    assert watch.engines() == {"frozen_lake": {"prefill-0"}, "calculator": {"decode-0"}}
    assert watch.of(StepEnded)[0][1].report.metrics["logprob_gap"] < 1e-4, "the engines have the learner's weights"
    assert run.parts.environments.stats().nodes == 0, "closed"
    assert idle(logical)


def test_a_full_pool_falls_back_to_its_kind_and_hw_mapping_binds_domains(logical, tmp_path):
    """Two engines prefer H20, which has room for one; the worker's own decorator says which domain goes where."""
    settings = recipe(tmp_path, logical.address, cluster='workers = { ActorGen = "ray_workers:MappedEngine" }',
                      prefill="", decode="replicas = 1", steps=2)
    watch = Watch()
    play(settings, tmp_path / "run", watch)
    assert watch.engines() == {"frozen_lake": {"prefill-0"}, "calculator": {"decode-0"}}
    more = recipe(tmp_path, logical.address, steps=2)
    more = replace(more, pools={name: replace(pool, hardware="H20") for name, pool in more.pools.items()})
    from rollart.backends.ray.cluster import RayCluster
    from rollart.build_ray import plan

    cluster = RayCluster(more.cluster)
    cluster.connect()
    try:
        placed, lines = plan(more, cluster.nodes())
    finally:
        cluster.close()
    assert [(i.need.name, i.node.pool, i.fallback) for i in placed][:3] == [
        ("learner", "H800", False), ("prefill-0", "H20", False), ("decode-0", "H800", True)]
    assert "fallback: H20 is full" in lines[2]
    play(more, tmp_path / "run2", Watch())
    assert idle(logical)


def test_an_engine_killed_in_a_turn_is_started_again_in_place_and_the_run_goes_on(logical, tmp_path):
    story = []

    def act(run, event):
        if isinstance(event, TurnEnded) and event.engine == "prefill-0" and run.pipeline.buffer.version:
            if not story:
                story.append("killed")
                os.kill(run.parts.engines[0].remote.pid, signal.SIGKILL)
            elif story[-1] == "up":
                story.append("serves")
                run.pipeline.stop()
        if isinstance(event, EngineDown | EngineUp) and event.engine == "prefill-0" and story:
            story.append("down" if isinstance(event, EngineDown) else "up")

    watch = Watch(act)
    run, _ = play(recipe(tmp_path, logical.address, steps=4000), tmp_path / "run", watch, ends=False)
    assert story == ["killed", "down", "up", "serves"]
    down, up = watch.of(EngineDown)[0][0], watch.of(EngineUp)[-1][0]
    meanwhile = {e.engine for at, e in watch.of(TurnEnded) if down < at < up}
    assert meanwhile == {"decode-0"}, "its turns went on elsewhere"
    print(f"engine: serves again {up - down:.2f} s after it was lost, {run.proxy.moved} turns moved, "
          f"{sum(down < at < up for at, _ in watch.of(StepEnded))} steps meanwhile")


def test_domains_of_a_pool_whose_node_leaves_are_served_by_another_pool(logical, tmp_path):
    did = []

    def act(run, event):
        if isinstance(event, StepEnded) and not did:
            did.append("removed")
            logical.remove("H20")
        if isinstance(event, EngineDown) and event.engine == "decode-0":
            did.append("down")
        moved = isinstance(event, StepEnded) and "down" in did and "prefill-0" in watch.engines()["calculator"]
        if moved:
            run.pipeline.stop()

    watch = Watch(act)
    try:
        run, _ = play(recipe(tmp_path, logical.address, steps=4000), tmp_path / "run", watch, ends=False)
    finally:
        logical.add("H20")
        logical.cluster.wait_for_nodes()
    assert run.proxy.routing.fallbacks > 0
    assert watch.engines()["frozen_lake"] == {"prefill-0"}


def test_a_learner_killed_in_a_step_starts_again_and_does_its_steps_once_more(logical, tmp_path):
    killed = []

    def act(run, event):
        if isinstance(event, BatchTaken) and event.version == 3 and not killed:
            asyncio.get_running_loop().call_later(0.3, lambda: os.kill(run.parts.trainer.inner.remotes[0].pid, 9))
            killed.append(event.version)

    slow = 'workers = { ActorTrain = "ray_workers:SlowLearner" }'
    watch = Watch(act)
    run, _ = play(recipe(tmp_path, logical.address, steps=6, cluster=slow), tmp_path / "run", watch)
    assert killed == [3]
    assert len(run.parts.trainer.recoveries) == 1
    assert [e.version for _, e in watch.of(StepEnded)] == [1, 2, 3, 4, 5, 6], "each step ended once"
    assert [e.version for _, e in watch.of(CheckpointSaved)] == [2, 4, 6]
    assert not watch.of(EngineDown), "rollout went on"
    print(f"learner: at version 3 again {run.parts.trainer.recoveries[0]:.2f} s after its loss was noticed")


def test_a_rank_of_the_learner_killed_in_a_step_brings_all_ranks_back_at_the_same_version(logical, tmp_path):
    killed = []

    def act(run, event):
        if isinstance(event, BatchTaken) and event.version == 3 and not killed:
            killed.append(run.parts.trainer.inner.ranks[1].remote.pid)
            asyncio.get_running_loop().call_later(0.02, lambda: os.kill(killed[0], signal.SIGKILL))

    settings = recipe(tmp_path, logical.address, steps=6)
    settings = replace(settings, learner=replace(settings.learner, ranks=2, rank_seconds=120.0))
    watch = Watch(act)
    run, _ = play(settings, tmp_path / "run", watch)
    assert [e.version for _, e in watch.of(StepEnded)] == [1, 2, 3, 4, 5, 6]
    assert len(run.parts.trainer.recoveries) == 1
    assert not watch.of(EngineDown)
    print(f"a rank of two: all at version 3 again {run.parts.trainer.recoveries[0]:.2f} s after the loss was noticed")


def test_an_environment_node_that_leaves_costs_its_episodes_and_is_used_again_when_it_returns(logical, tmp_path):
    did = []

    def act(run, event):
        if isinstance(event, StepEnded) and event.version == 2 and not did:
            did.append("removed")
            logical.remove("CPU-0")
        if isinstance(event, StepEnded) and did == ["removed"] and run.parts.environments.stats().nodes == 1:
            did.append("added")
            logical.add("CPU-0")
        if isinstance(event, StepEnded) and did[1:] == ["added"] and run.parts.environments.stats().nodes == 2:
            did.append("back")
            run.pipeline.stop()

    run, counts = play(recipe(tmp_path, logical.address, steps=4000), tmp_path / "run", Watch(act), ends=False)
    assert did == ["removed", "added", "back"]
    assert counts["failed"] < counts["dispatched"]
    assert run.parts.environments.lost_nodes == 1
    print(f"environments: {counts['failed']} of {counts['dispatched']} episodes failed with their node and were "
          "replaced")


def test_a_role_that_cannot_start_ends_the_start_and_leaves_nothing(logical, tmp_path):
    broken = recipe(tmp_path, logical.address, cluster='workers = { ActorGen = "ray_workers:Broken" }')
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        play(broken, tmp_path / "run", Watch())
    errors = caught.value.exceptions if isinstance(caught.value, BaseExceptionGroup) else [caught.value]
    assert any(isinstance(e, ConfigError) and "does not want to" in str(e) for e in errors)
    assert idle(logical)


def refused(logical, tmp_path, arguments, words):
    """One line with these words, exit code 2, nothing left behind."""
    path = tiny_recipe(tmp_path, extra=CLUSTER.format(address="", cluster="", folder=tmp_path / "weights", **BOUND))
    given = [str(a).replace("{address}", logical.address) for a in arguments]
    done = rollart("train", path, "--run", tmp_path / "run", *given)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("arguments", "words"), [
    (["--ray", "127.0.0.1:1"], "no Ray cluster at '127.0.0.1:1'"),
    (["--ray", "ray://head:10001"], "ray:// clients are not supported"),
    (["--ray", "{address}", "--set", "cluster.train=H900"], "pool 'H900' has no nodes in this cluster"),
    (["--ray", "{address}", "--set", "pools.decode.engine=vllm", "--set", "vllm.tensor_parallel=3"],
     "must divide the model's 2"),
    (["--ray", "{address}", "--set", "weights.carrier=memory"], "weights.carrier = 'memory' stays inside one process"),
    (["--ray", "{address}", "--set", "pools.decode.replicas=9"], "no node has 1 free units for decode-"),
])
def test_bad_input_is_one_line_and_exit_code_2_before_anything_is_started(logical, tmp_path, arguments, words):
    refused(logical, tmp_path, arguments, words)
