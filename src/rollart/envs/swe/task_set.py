"""A set of bug-fix tasks on disk, and how its tests are run.

    set.json        {"version", "source", "seed", "bugs", "sources": [file], "passing": {test file: [test]}, "reached"}
    template/       the package as it should be, tests and all
    tasks.jsonl     a line a task: {"id", "file", "function", "kinds", "good", "bad", "problem_statement",
                    "FAIL_TO_PASS": [test], "PASS_TO_PASS": [test]}
    tried.jsonl     (while it is made) a line a mutant: {"mutant", "verdict"}

Keeps true: `good` stands exactly once in `file`, and `bad` exactly once after it has been put there, so the reference
patch is the edit from `bad` to `good`. No sandbox that an agent sees ever holds the file as it should be.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.core.errors import ConfigError
from rollart.sandbox import Sandbox, SandboxSettings, open_sandbox

FORMAT = 1
SHIPPED = Path(__file__).parent / "shipped"

_PROBE = (Path(__file__).parent / "probe.py").read_text()
_OUT = ".rollart-tests.json"
_ENV = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class BugTask:
    """One task; see the module's docstring. kinds: of its mutations, one a bug."""

    id: str
    file: str
    function: str
    kinds: tuple[str, ...]
    good: str
    bad: str
    problem_statement: str
    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...]

    def statement(self, hints: int) -> str:
        """The problem in words. hints: 2 names file and function, 1 the file, 0 neither; a failing test always."""
        where = f"There is a bug in {self.file if hints else 'this package'}.\n\n"
        return self.problem_statement if hints > 1 else where + self.problem_statement.partition("\n\n")[2]


@dataclass(frozen=True)
class TaskSet:
    """A set that was read. files: the template's. sources: those a fix may change. tasks: by id."""

    files: Files
    sources: tuple[str, ...]
    tasks: Mapping[str, BugTask]

    def with_bug(self, task: BugTask) -> Files:
        return {**self.files, task.file: self.files[task.file].replace(task.good.encode(), task.bad.encode(), 1)}


def read_set(folder: Path) -> TaskSet:
    """Raises ConfigError, with the line of what is wrong."""
    meta, tasks, path = read_meta(folder), {}, folder / "tasks.jsonl"
    files = read_files(folder / "template")
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            plain = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(line).items()}
            task = tasks[plain["id"]] = BugTask(**plain)
            if files[task.file].count(task.good.encode()) != 1:
                raise ValueError(f"`good` does not stand once in {task.file}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} line {number} is not a task of this set: {error}") from None
    if not tasks:
        raise ConfigError(f"{folder} has no tasks yet: rollart envs make-swe with --out {folder} goes on with it")
    return TaskSet(files, tuple(meta["sources"]), tasks)


def read_meta(folder: Path) -> dict[str, Any]:
    """set.json. Raises ConfigError."""
    try:
        meta: dict[str, Any] = json.loads((folder / "set.json").read_text())
        if meta["version"] != FORMAT:
            raise ValueError(f"version {meta['version']}, not {FORMAT}")
        return meta
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} is no set of bug-fix tasks (rollart envs make-swe makes one): {error}") from None


def read_files(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts}


def opened(settings: SandboxSettings, files: Files) -> Sandbox:
    """A sandbox whose work folder holds these files. Raises SandboxFailed, and ConfigError where none works."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    sandbox = open_sandbox(settings)
    try:
        sandbox.restore(data.getvalue())
    except BaseException:
        sandbox.close()
        raise
    return sandbox


@dataclass(frozen=True)
class Tested:
    """How tests ended. end: whole, or why there is no result: slow, broken (pytest could not run them), crashed.

    outcomes: passed, failed or skipped, by test. messages: of what failed. reached: by test file, the [file, function]
    that its tests called, where it was traced. output: what was printed.
    """

    end: str
    output: str
    outcomes: Mapping[str, str]
    messages: Mapping[str, str]
    reached: Mapping[str, list[list[str]]]

    def passed(self, tests: Iterable[str]) -> int:
        return sum(self.outcomes.get(test) == "passed" for test in tests)


def run_tests(sandbox: Sandbox, files: Iterable[str], seconds: float, *, runs: int = 1,
              trace: bool = False) -> list[Tested]:
    """Run the tests in some files, so often at most; see probe. The last one may not be whole. Raises SandboxFailed."""
    arguments = json.dumps({"files": list(files), "out": _OUT, "runs": runs, "trace": trace})
    ran = sandbox.run(["python", "-c", _PROBE, arguments], seconds=seconds, env=_ENV)
    out: list[Tested] = []
    try:
        for line in sandbox.read(_OUT).decode().splitlines():
            plain = json.loads(line)
            out.append(Tested("whole" if plain.pop("code") in (0, 1) else "broken", ran.stdout + ran.stderr, **plain))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if ran.timed_out or not out:
        out.append(Tested("slow" if ran.timed_out else "crashed", ran.stdout + ran.stderr, {}, {}, {}))
    return out


def files_of(tests: Iterable[str]) -> list[str]:
    return sorted({test.split("::")[0] for test in tests})
