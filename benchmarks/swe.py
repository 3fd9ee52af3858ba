"""Bug-fix tasks of a set: success of the reference patch, of no patch and of chance, and times to open, step and score.

    python benchmarks/swe.py                                    # 200 held-out tasks of the set that ships
    python benchmarks/swe.py --path sets/toolz --all --players oracle,empty
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from rollart.core.types import Action
from rollart.envs.domain import make_domain


class Empty:
    def act(self, observation):
        return "<submit></submit>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--all", action="store_true", help="each task of the set once, of both splits")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of them at the beginning")
    parser.add_argument("--players", default="oracle,empty,random")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting episodes after so long")
    options = parser.parse_args()
    domain = make_domain("swe", {"path": options.path})
    tasks = [domain.task(i, "eval") for i in range(options.tasks)]
    if options.all:
        tasks = [replace(tasks[0], id=f"swe/all/{i}", payload={"id": i}) for i in domain.set.tasks]
    tasks = tasks[options.skip:]
    began, times = time.monotonic(), {"open": [], "step": [], "score": []}
    for name in options.players.split(","):
        solved = []
        for task in tasks:
            if time.monotonic() - began > options.seconds:
                break
            player = {"oracle": lambda t: domain.player(t, 0, 0.0), "random": lambda t: domain.random_player(t, 0),
                      "empty": lambda t: Empty()}[name](task)
            at = time.monotonic()
            episode = domain.open(task)
            seen = episode.first()
            times["open"].append(time.monotonic() - at)
            while not seen.done:
                at = time.monotonic()
                seen = episode.step(Action(player.act(seen)))
                times["score" if seen.done else "step"].append(time.monotonic() - at)
            episode.close()
            solved.append(seen.facts["success"])
            if name == "oracle" and not solved[-1]:
                print("not solved:", task.payload["id"], seen.facts, flush=True)
        distinct = len({str(task.payload) for task in tasks[:len(solved)]})
        print(f"{name:7} {sum(solved)} of {len(solved)} solved ({distinct} different tasks)", flush=True)
    for name, values in times.items():
        if values:
            late = sorted(values)[int(len(values) * 0.95)]
            print(f"{name:7} median {statistics.median(values):.3f} s, 95 % within {late:.3f} s")


if __name__ == "__main__":
    main()
