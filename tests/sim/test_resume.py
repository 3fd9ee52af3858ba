"""kill -9 at any moment, then resume from the newest checkpoint and the ledger: each task is trained once (I2)."""

import asyncio
from dataclasses import replace

import pytest

from rollart.core.clock import stream
from rollart.core.events import CheckpointSaved
from rollart.observe.ledger import Ledger
from rollart.sim.loop import run_virtual
from rollart.sim.swarm import draw_world
from rollart.sim.world import SimRun

SEEDS = 24
KILLS = 2


class Killed(Exception):
    """The process is gone."""


class UntilKilled:
    """Passes events on until the kill: what a dying process would still say is not heard."""

    def __init__(self, ledger):
        self.ledger, self.alive, self.checkpoint = ledger, True, 0

    def on(self, at, event):
        if self.alive:
            self.ledger.on(at, event)
            if isinstance(event, CheckpointSaved):
                self.checkpoint = event.version

    def kill(self):
        self.alive = False
        raise Killed


def life(world, seed, ledger, *, resume, version, kill_at):
    """One process. Returns (how it ended or None if it was killed, newest checkpoint)."""
    record = UntilKilled(ledger)
    record.checkpoint = version

    async def main():
        if kill_at is not None:
            asyncio.get_running_loop().call_later(kill_at, record.kill)
        restored = ledger.recover(version) if resume else None
        return await SimRun(world, seed, subscribers=[record], version=version, restored=restored).main()

    try:
        return run_virtual(main())[0], record.checkpoint
    except Killed:
        return None, record.checkpoint


def check_tasks(ledger, steps):
    """Each task of the source was trained once, or failed with its group, or is still to come."""
    rows = ledger._db.execute(
        "SELECT g.id, json_extract(g.task, '$.id'), g.reason, max(coalesce(t.fate, '') IN ('trained', 'filtered')) "
        "FROM groups g LEFT JOIN trajectories t ON t.grp = g.id GROUP BY g.id").fetchall()
    trained = [task for _, task, _, consumed in rows if consumed]
    failed = [task for _, task, reason, consumed in rows if reason.startswith("quarantined") and not consumed]
    left = ledger.recover(steps)  # as if the run were given more steps
    coming = [group.task.id for group in left.groups] + [f"{name}/{index}" for name, index in left.source["returned"]]
    drawn = [f"{name}/{index}" for name, (n,) in left.source["next"].items() for index in range(n)]
    assert sorted([*trained, *failed, *coming]) == sorted(drawn)


@pytest.mark.parametrize("block", range(4))
def test_a_run_killed_twice_at_random_moments_trains_each_task_once(tmp_path, block):
    finished = resumed = 0
    for seed in range(block, SEEDS, 4):
        chance = stream(seed, "kill")
        world = draw_world(seed)
        pipeline = replace(world.pipeline, checkpoint_every=chance.choice([1, 2]), steps=4)
        world = replace(world, pipeline=pipeline, faults=replace(world.faults, trainer_fails=0.0))
        path, version, ended = tmp_path / f"{seed}.db", 0, None
        for process in range(KILLS + 1):
            ledger = Ledger(path, commit_seconds=chance.choice([0.0, 1e9]))
            kill_at = chance.uniform(0.0, 500.0) if process < KILLS else None
            ended, version = life(world, seed + 1000 * process, ledger, resume=process > 0, version=version,
                                  kill_at=kill_at)
            if ended is not None:
                break
            ledger._db.close()  # what was not committed is gone
            if version == pipeline.steps:
                break
            resumed += 1
        else:
            pytest.fail(f"seed {seed} did not finish")
        if ended is not None:
            assert (seed, ended, ledger.accounts.counts()["in_flight"]) == (seed, "finished", 0)
            finished += 1
            ledger._db.close()
        ledger = Ledger(path)
        check_tasks(ledger, pipeline.steps)
        ledger.close()
    assert finished >= 2
    assert resumed >= 2
