"""A whole run whose learner is two processes of this machine, one of which is killed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from helpers import tiny_recipe
from rollart.build import open_run
from rollart.config.recipe import load_recipe
from rollart.core.events import BatchTaken, StepEnded
from rollart.observe.run_folder import RunFolder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rank_costs_time_and_no_step(tmp_path):
    extra = (f'\n[learner]\nranks = 2\nrank_seconds = 120.0\n[weights]\ncarrier = "file"\n'
             f'folder = "{tmp_path}/weights"\n')
    settings = load_recipe(tiny_recipe(tmp_path, steps=5, extra=extra), ["pipeline.checkpoint_every=2"])

    class Kill:
        run, pid, steps = None, 0, ()

        def on(self, at, event):
            if isinstance(event, StepEnded):
                self.steps = (*self.steps, event.version)
            if isinstance(event, BatchTaken) and event.version == 3 and not self.pid:
                self.pid = self.run.parts.trainer.inner.ranks[1].pid
                asyncio.get_running_loop().call_later(0.02, lambda: os.kill(self.pid, signal.SIGKILL))

    async def main(kill):
        with RunFolder(tmp_path / "run").create(settings.to_json()) as folder:
            async with open_run(settings, folder, resume=False, subscribers=lambda _: [kill]) as kill.run:
                assert await kill.run.train()
                return kill.run.parts.trainer.recoveries

    kill = Kill()
    assert len(asyncio.run(main(kill))) == 1
    assert kill.steps == (1, 2, 3, 4, 5)
    assert not list((tmp_path / "weights").glob("w*")), "the weights went with their writers"
