"""Write a run folder that looks like a real one, to look at its report: `python tests/observe/fake_run.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from histories import DOMAINS, make_trajectory

from rollart.core import events as ev
from rollart.core.types import EvalResult, Fate, Manifest, Outcome, StepReport, Task, TrajectoryId
from rollart.observe.journal import Journal
from rollart.observe.ledger import Ledger
from rollart.observe.metrics import Metrics
from rollart.observe.report import write_report
from rollart.observe.run_folder import RunFolder
from rollart.observe.summary import write_summary

SKILL = {"frozen_lake": (0.25, 0.72), "calculator": (0.1, 0.93), "guess": (0.4, 0.8)}
SECONDS = {"frozen_lake": (0.4, 2.2, 0.3), "calculator": (0.05, 0.9, 0.02), "guess": (0.2, 1.4, 1.1)}
LINES = {
    "frozen_lake": (("right", "You slid right.\n  S F F F\n  F H[P]H\n  F F F H\n  H F F G"),
                    ("down", "You moved down.\n  S F F F\n  F H F H\n  F F[P]H\n  H F F G")),
    "calculator": (("<tool>17*23</tool>", "391"), ("The answer is 391 & <b>nothing</b> else.", "Right.")),
    "guess": (("50", "Higher."), ("75", "Lower.")),
}


class Fake:
    def __init__(self, path: Path, seed: int = 0) -> None:
        self.random, self.now, self.group = Random(seed), 0.0, 0
        self.folder = RunFolder(path).create({
            "seed": 7, "schedule": {"name": "rollart", "alpha": 1}, "rollout": {"batch_groups": 6, "group_size": 8},
            "model": {"name": "tiny", "layers": 4, "width": 128}, "tasks": {d: {"weight": 1.0} for d in DOMAINS}})
        self.ledger = Ledger(self.folder.database)
        metrics = Metrics(self.folder.metrics, self.ledger.accounts, staleness_bound=1)
        self.emit = Journal([self.ledger, metrics], clock=lambda: self.now).emit

    def skill(self, domain: str, version: int, steps: int) -> float:
        low, high = SKILL[domain]
        return low + (high - low) * (1 - 2.7 ** (-3.5 * version / steps))

    def episode(self, id: TrajectoryId, domain: str, version: int, success: bool, index: int) -> None:
        task = Task(f"{domain}:{index}", domain, {"seed": index})
        return self.varied(make_trajectory(id, task, version=version, success=success, turns=2, tokens=8,
                                           say=lambda turn: LINES[domain][turn]), domain)

    def varied(self, trajectory, domain):
        opened, generate, environment = (s * self.random.lognormvariate(0, 0.3) for s in SECONDS[domain])
        object.__setattr__(trajectory, "seconds", {"open": opened, "generate": generate, "environment": environment,
                                                   "score": 0.02})
        return trajectory

    def evaluate(self, number: int, version: int, steps: int) -> None:
        self.emit(ev.EvalStarted(number, version, 96))
        results = []
        for d, domain in enumerate(DOMAINS):
            wins = [self.random.random() < self.skill(domain, version, steps) for _ in range(32)]
            for i, won in enumerate(wins):
                t = self.episode(TrajectoryId(number, d * 32 + i, "e"), domain, version, won, 10**6 + i)
                self.emit(ev.EvalTrajectory(number, version, t))
            results.append(EvalResult(domain, version, 32, sum(wins) / 32, sum(wins) / 32, 0))
        self.emit(ev.EvalEnded(number, version, tuple(results), 11.0))

    def step(self, version: int, steps: int) -> None:
        rewards: dict[str, list[float]] = {d: [] for d in DOMAINS}
        trained, stale = [], []
        for _ in range(6):
            domain, group = self.random.choice(DOMAINS), self.group
            self.group += 1
            self.emit(ev.GroupOpened(group, Task(f"{domain}:{group}", domain), version, {"drawn": group}))
            for member in range(9):
                id = TrajectoryId(group, member)
                self.emit(ev.TrajectoryStarted(id, domain))
                won = self.random.random() < self.skill(domain, version, steps)
                t = self.episode(id, domain, max(0, version - self.random.choice([0, 0, 1])), won, group)
                if member == 8:
                    self.emit(ev.TrajectoryEnded(t, Fate.CANCELLED))
                elif self.random.random() < 0.03:
                    failed = make_trajectory(id, t.task, outcome=Outcome.FAILED, error=self.random.choice([
                        f"environment {group} gave no answer within 60 s", "scorer <sandbox> is out of memory"]))
                    self.emit(ev.TrajectoryEnded(failed, Fate.FAILED))
                else:
                    self.emit(ev.TrajectoryEnded(t, Fate.IN_FLIGHT))
                    if self.random.random() < 0.04:
                        self.emit(ev.Settled((id,), Fate.STALE, "beyond the staleness bound"))
                    else:
                        trained.append(id)
                        stale.append(version - (t.oldest or 0))
                        rewards[domain].append(float(won))
            self.emit(ev.GroupEnded(group, True, "", {"drawn": group}))
        waited, busy = self.random.expovariate(0.8), self.random.uniform(3, 4)
        self.now += waited
        self.emit(ev.BatchTaken(version, (), tuple(stale), waited))
        self.now += busy
        self.emit(ev.Settled(tuple(trained), Fate.TRAINED, "", version))
        means = {d: sum(r) / len(r) for d, r in rewards.items() if r}
        report = StepReport(version + 1, busy, 9000, {"loss": 0.1, "grad_norm": 0.5, "logprob_gap": 2e-7})
        self.emit(ev.StepEnded(version + 1, report, means, means, {"open": 6, "ready": 3, "training": 3}))
        self.emit(ev.WeightsPublished(Manifest(version + 1, "memory"), self.random.uniform(0.2, 0.5)))
        self.emit(ev.WeightsLive(version + 1, self.random.uniform(0.05, 0.2), 2))


def write_run(path: Path, steps: int = 120, ended: bool = True) -> RunFolder:
    fake = Fake(path)
    fake.emit(ev.RunStarted(0, steps, False))
    fake.evaluate(0, 0, steps)
    for version in range(steps):
        fake.step(version, steps)
        if (version + 1) % max(1, steps // 6) == 0:
            fake.evaluate(version + 1, version + 1, steps)
            fake.emit(ev.CheckpointSaved(version + 1, "", 0.2))
    if ended:
        fake.emit(ev.RunEnded(steps, "finished"))
    fake.ledger.close()
    fake.folder.close()
    return fake.folder


if __name__ == "__main__":
    run = write_run(Path(sys.argv[1]))
    write_summary(run.path)
    print(write_report(run.path))
