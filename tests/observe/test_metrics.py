import json
import resource

import pytest
from histories import World, evaluation, make_task, make_trajectory

from rollart.algo.intervals import change_interval, wilson
from rollart.core import events as ev
from rollart.core.errors import ConfigError, RunError
from rollart.core.types import Fate, StepReport, TrajectoryId
from rollart.observe.journal import Journal
from rollart.observe.ledger import Ledger
from rollart.observe.metrics import Metrics, read_metrics
from rollart.observe.run_folder import RunFolder
from rollart.observe.summary import summarise, weight_figures, write_summary


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


class Run:
    """Ledger and metrics of one process in a folder."""

    def __init__(self, path, version=0):
        self.path, self.clock = path, Clock()
        self.ledger = Ledger(path / "run.db")
        self.restored = self.ledger.recover(version) if version else None
        self.metrics = Metrics(path / "metrics.jsonl", self.ledger.accounts, staleness_bound=1)
        self.emit = Journal([self.ledger, self.metrics], clock=self.clock).emit

    def trajectory(self, group, member, fate, tokens=6, step=0):
        id, task = TrajectoryId(group, member), make_task(group)
        self.emit(ev.TrajectoryStarted(id, task.domain))
        self.emit(ev.TrajectoryEnded(make_trajectory(id, task, tokens=tokens), Fate.IN_FLIGHT))
        if fate is not Fate.IN_FLIGHT:
            self.emit(ev.Settled((id,), fate, "because 7", step if fate in (Fate.TRAINED, Fate.FILTERED) else None))

    def step(self, version, waited=1.0, seconds=4.0, staleness=(0, 1)):
        self.clock.now += waited + seconds
        self.emit(ev.BatchTaken(version - 1, (version,), staleness, waited))
        self.emit(ev.StepEnded(version, StepReport(version, seconds, 100, {"logprob_gap": version / 100})))


def test_a_step_line_tells_waiting_staleness_and_tokens_by_fate(run):
    run.emit(ev.RunStarted(0, 10, False))
    for member, fate in enumerate([Fate.TRAINED, Fate.STALE, Fate.FILTERED, Fate.IN_FLIGHT]):
        run.trajectory(0, member, fate, tokens=10 ** member)
    run.emit(ev.WeightsPublished(None, 0.25))
    run.emit(ev.WeightsLive(1, 0.5, 2))
    run.step(1, waited=1.0, seconds=3.0, staleness=(0, 1, 1, 0))
    line = read_metrics(run.path / "metrics.jsonl")[-1]
    assert (line["version"], line["wall_seconds"], line["idle_seconds"], line["waited"]) == (1, 4.0, 1.0, 1.0)
    assert line["staleness"] == {"mean": 0.5, "max": 1, "histogram": {"0": 2, "1": 2}}
    assert line["totals"]["generated"] == 2 * 1111
    assert line["totals"]["trained"] == 2
    assert line["totals"]["wasted"] == {"filtered": 200, "stale": 20}
    assert line["share"] == {"dispatched": {"frozen_lake": 1.0}, "trained": {"frozen_lake": 1.0}}
    assert line["weights"] == {"publish_seconds": 0.25, "live_seconds": 0.5}
    assert line["stages"]["frozen_lake"]["generate"] == 0.8
    assert summarise(run.path)["trainer_idle_fraction"] == 0.25


def test_after_a_resume_lost_steps_are_gone_and_time_goes_on(run):
    run.emit(ev.RunStarted(0, 10, False))
    for version in (1, 2, 3):
        run.trajectory(version, 0, Fate.TRAINED, step=version - 1)
        run.step(version)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "vers')
    run.ledger.close()
    again = Run(run.path, version=2)
    again.emit(ev.RunStarted(2, 10, True))
    again.step(3)
    lines = read_metrics(run.path / "metrics.jsonl")
    assert [(line["kind"], line["version"]) for line in lines] == [
        ("start", 0), ("step", 1), ("step", 2), ("start", 2), ("step", 3)]
    assert [line["wall_seconds"] for line in lines] == [0.0, 5.0, 10.0, 15.0, 20.0]
    assert summarise(run.path)["trainer_idle_fraction"] == pytest.approx(4 / 20)


def test_the_summary_is_of_the_whole_run_right_after_a_resume(run):
    run.emit(ev.RunStarted(0, 10, False))
    for event in evaluation(0, 0, {"guess": [False, True], "calculator": [False, False]}):
        run.emit(event)
    run.trajectory(0, 0, Fate.TRAINED)
    run.trajectory(0, 1, Fate.STALE)
    run.step(1, staleness=(0, 2))
    for event in evaluation(1, 1, {"guess": [True, True], "calculator": [False, True]}):
        run.emit(event)
    run.ledger.flush()
    run.ledger.close()
    Run(run.path, version=1).ledger.close()
    summary = write_summary(run.path)
    assert json.loads(RunFolder(run.path).summary.read_text()) == summary
    assert summary["domains"]["guess"] == {
        "eval_before": 0.5, "eval_before_interval": list(wilson(0.5, 2)), "eval_after": 1.0,
        "eval_after_interval": list(wilson(1.0, 2)), "eval_change": 0.5,
        "eval_change_interval": list(change_interval([0.0, 1.0], [1.0, 1.0], 1)), "eval_tasks": 2, "dispatched": 0,
        "trained": 0}
    assert summary["domains"]["frozen_lake"]["trained"] == 1
    assert summary["steps"] == 1
    assert summary["staleness"] == {"bound": 1, "max": 2, "mean": 1.0, "histogram": {"0": 1, "2": 1}}
    assert summary["tokens"]["generated"] == 24
    assert (summary["tokens"]["trained"], summary["tokens"]["wasted"]) == (12, 12)
    assert summary["logprob_gap_step0"] == 0.01
    assert summary["trainer_idle_fraction"] == 0.2


def test_the_exposed_part_of_weight_syncs_is_a_mean_and_a_share_of_the_run():
    steps = [{"weights": {"publish_seconds": 1.0, "fetch_seconds": 3.0, "live_seconds": 0.25}},
             {"weights": {"publish_seconds": 2.0, "live_seconds": 0.75}}, {"weights": {}}]
    assert weight_figures(steps, 10.0) == {"publish_seconds": 1.5, "fetch_seconds": 3.0, "exposed_seconds": 0.5,
                                           "exposed_fraction": 0.1}
    assert weight_figures([], 0.0) == {"publish_seconds": None, "fetch_seconds": None, "exposed_seconds": None,
                                       "exposed_fraction": 0.0}


def test_a_run_that_has_just_begun_has_a_summary(tmp_path):
    summary = summarise(tmp_path)
    assert (summary["steps"], summary["domains"], summary["logprob_gap_step0"]) == (0, {}, None)
    assert summary["ledger"]["dispatched"] == 0


def test_lines_agree_with_the_ledger_over_a_random_history(run):
    world = World(3, run.emit)
    run.emit(ev.RunStarted(0, 50, False))
    for _ in range(800):
        world.act()
    last = [line for line in read_metrics(run.path / "metrics.jsonl") if line["kind"] == "step"][-1]
    assert last["version"] == world.version > 5
    counts = last["totals"]["counts"]
    assert counts["dispatched"] == sum(counts.values()) - counts["dispatched"]
    assert last["failures"] == {"environment N hung": counts["failed"]} or counts["failed"] > last["failures"][
        "environment N hung"]


@pytest.mark.parametrize("cut", [b'{"kind": "sta', b"", b"{"])
def test_a_first_line_that_a_crash_cut_is_gone_after_a_resume(cut, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(cut)
    run = Run(tmp_path)
    run.emit(ev.RunStarted(0, 3, True))
    assert [line["kind"] for line in read_metrics(run.metrics.path)] == ["start"]


@pytest.mark.parametrize(("line", "why"), [
    ('{"kind": "step", "version": 1, "wall_seconds": 1.0}', "it has no 'waited'"),
    ('{"kind": "note", "version": "1", "wall_seconds": 1.0}', "version is '1'"),
    ('{"kind": "start", "version": 0, "wall_seconds": null}', "wall_seconds is None"),
    ('{"kind": ["step"], "version": 0, "wall_seconds": 1.0}', r"unhashable|kind is \['step'\]"), ("[]", ""), ("5", "")])
def test_a_line_that_is_json_but_none_of_ours_is_named(line, why, run):
    run.emit(ev.RunStarted(0, 3, False))
    run.step(1)
    assert len(read_metrics(run.metrics.path)) == 2
    with run.metrics.path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ConfigError, match=f"line 3 is damaged \\(.*({why})"):
        read_metrics(run.metrics.path)


def test_a_line_that_finds_no_room_is_absent_and_the_next_one_is_whole(run):
    run.emit(ev.RunStarted(0, 3, False))
    size, before = run.metrics.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, before[1]))
    try:
        with pytest.raises(RunError, match="cannot be written"):
            run.metrics.on(0.0, ev.Noted(0, "half of it finds room"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.metrics.on(0.0, ev.RunEnded(0, "failed: the disk is full"))
    assert [line["kind"] for line in read_metrics(run.metrics.path)] == ["start", "end"]
