"""Bug-fix tasks: find and mend a bug in a package, with a shell, a viewer and an editor; tests decide.

Keeps true: a fix is scored in a fresh sandbox that holds the package as it was given, tests and settings included, and
of the agent's work only the source files that were there before; so tests that it changed, files that it added and
processes that it left count for nothing. An action is one call:

    <bash>grep -rn needle .</bash>                          <view>{"path": "a/b.py", "start": 10, "end": 40}</view>
    <edit>{"path": "a/b.py", "old": "x", "new": "y"}</edit>     <submit></submit>     (`old` stands once in the file)
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.core.clock import stream
from rollart.core.errors import ConfigError
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import Domain, DomainSettings, Episode, Player
from rollart.envs.swe.task_set import SHIPPED, BugTask, TaskSet, opened, read_set, run_tests, test_files
from rollart.envs.tool_calls import ToolCall, parse, render
from rollart.sandbox import SandboxSettings


@dataclass(frozen=True, kw_only=True)
class BugFixSettings(DomainSettings):
    """path: folder of a task set (`rollart envs make-swe`); empty: the small one that ships.

    hints: 2 names the file and the function, 1 the file, 0 neither. bugs: only tasks with so many mutations (0: all).
    call_seconds, test_seconds: deadline of a tool call, and of the tests that score. output_chars: most of an
    answer (characters; the first and the last half). sandbox: kind, see SandboxSettings; memory_mb: its (10^6 bytes).
    """

    path: str = ""
    hints: int = 2
    bugs: int = 0
    call_seconds: float = 20.0
    test_seconds: float = 40.0
    output_chars: int = 4000
    sandbox: str = "auto"
    memory_mb: int = 512
    max_turns: int = 20
    max_tokens: int = 1024
    instructions: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hints not in (0, 1, 2) or self.bugs < 0:
            raise ValueError(f"hints must be 0, 1 or 2 and bugs at least 0; got {self.hints} and {self.bugs}")
        if min(self.call_seconds, self.test_seconds, self.output_chars) <= 0:
            raise ValueError("call_seconds, test_seconds and output_chars must be above 0")
        SandboxSettings(kind=self.sandbox, memory_mb=self.memory_mb)


class BugFix(Domain):
    """Payload: the task's `id` in the set."""

    name = "swe"
    reward = "swe"
    rules = ("Mend the bug in the Python package in your working folder. Each action is one call:\n"
             "<bash>COMMAND</bash> runs a shell command; python and pytest are there, the network is not.\n"
             '<view>{"path": "FILE", "start": 1, "end": 40}</view> shows lines of a file.\n'
             '<edit>{"path": "FILE", "old": "TEXT", "new": "TEXT"}</edit> replaces text that stands once in the file.\n'
             "<submit></submit> ends your work. Then the package's own tests decide: only your changes of source files "
             "that were there before count; tests, settings and new files are put back first.")
    Settings = BugFixSettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        s = self.settings
        self.set: TaskSet = read_set(Path(s.path) if s.path else SHIPPED)
        self._ids = [t.id for t in self.set.tasks.values() if s.bugs in (0, len(t.kinds))]
        if not self._ids:
            raise ConfigError(f"domain swe: {s.path or 'the shipped set'} has no task with bugs = {s.bugs}")
        self.box = SandboxSettings(kind=s.sandbox, seconds=s.call_seconds, memory_mb=s.memory_mb)

    def problem(self, rng: random.Random) -> dict[str, Any]:
        return {"id": rng.choice(self._ids)}

    def open(self, task: Task) -> Episode:
        return _Work(self, task)

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return _Fixer(self.set.tasks[task.payload["id"]], stream(seed, "player", task.id), error_rate)

    def random_player(self, task: Task, seed: int) -> Player:
        return _Tinker(self.set, stream(seed, "random", task.id))


class _Work(Episode):
    def __init__(self, domain: BugFix, task: Task) -> None:
        self._domain, self._max_turns = domain, task.max_turns
        if task.payload["id"] not in domain.set.tasks:
            raise ConfigError(f"{task.id}: no task {task.payload['id']} in the set: was it made anew?")
        self._bug: BugTask = domain.set.tasks[task.payload["id"]]
        self._given = domain.set.with_bug(self._bug)
        self._actions = self._valid = 0
        self._sandbox = opened(domain.box, self._given)

    def first(self) -> Observation:
        return Observation(self._domain.start(Message("user", self._bug.statement(self._domain.settings.hints))))

    def step(self, action: Action) -> Observation:
        calls = parse(str(action.text), "tags")
        self._actions += 1
        text = self._call(calls[0]) if calls else "? one call: <bash>, <view>, <edit> or <submit>"
        self._valid += not text.startswith("? ")
        submitted = bool(calls) and calls[0].name == "submit"
        done = submitted or self._actions >= self._max_turns
        facts: dict[str, Any] = {"success": False, "valid": self._valid, "actions": self._actions}
        if done:
            facts |= self._score()
        return Observation(() if submitted else (Message("tool", text),), done=done, truncated=done and not submitted,
                           reward=float(facts["success"]), facts=facts)

    def close(self) -> None:
        self._sandbox.close()

    def _call(self, call: ToolCall) -> str:
        """The answer; it begins with `? ` where the call is not of the form that it should have."""
        given = call.arguments
        try:
            match call.name:
                case "bash":
                    ran = self._sandbox.run(str(given.get("command", given.get("input", ""))))
                    end = f"\n[no end within {ran.seconds:.0f} s]" if ran.timed_out else f"\n[exit code {ran.code}]"
                    return self._clip(ran.stdout + ran.stderr) + (end if ran.code or ran.timed_out else "")
                case "view":
                    lines = self._read(given.get("path", given.get("input"))).splitlines()
                    first, last = int(given.get("start", 1)), int(given.get("end", len(lines)))
                    shown = list(enumerate(lines, 1))[max(first - 1, 0):last]
                    return self._clip("\n".join(f"{number:5} {line}" for number, line in shown))
                case "edit":
                    path, old, new = (str(given[key]) for key in ("path", "old", "new"))
                    if (count := (text := self._read(path)).count(old)) != 1 or not old:
                        return f"? old stands {count} times in {path}, not once"
                    self._sandbox.write(path, text.replace(old, new))
                    return f"edited {path}"
                case "submit":
                    return ""
        except KeyError as missing:
            return f"? {call.name} needs {missing}, as JSON"
        except (OSError, ValueError, TypeError) as error:
            return f"? {call.name}: {error}"
        return f"? no tool {call.name}: there are bash, view, edit, submit"

    def _read(self, path: object) -> str:
        return self._sandbox.read(str(path)).decode()

    def _clip(self, text: str) -> str:
        half = self._domain.settings.output_chars // 2
        left_out = len(text) - 2 * half
        return text if left_out <= 0 else f"{text[:half]}\n... {left_out} characters ...\n{text[-half:]}"

    def _score(self) -> dict[str, Any]:
        bug, domain = self._bug, self._domain
        with opened(domain.box, {**self._given, **self._changed()}) as fresh:
            tested = run_tests(fresh, test_files(bug.FAIL_TO_PASS), domain.settings.test_seconds)
        fixed, kept = tested.passed(bug.FAIL_TO_PASS), tested.passed(bug.PASS_TO_PASS)
        return {"success": fixed == len(bug.FAIL_TO_PASS) and kept == len(bug.PASS_TO_PASS), "tests": tested.end,
                "fail_to_pass": [fixed, len(bug.FAIL_TO_PASS)], "pass_to_pass": [kept, len(bug.PASS_TO_PASS)]}

    def _changed(self) -> Mapping[str, bytes]:
        """The source files as the agent left them; what cannot be read is as it was."""
        try:
            with tarfile.open(fileobj=io.BytesIO(self._sandbox.snapshot().data)) as tar:
                entries = {entry.name.removeprefix("./"): entry for entry in tar if entry.isreg()}
                return {name: tar.extractfile(entries[name]).read()  # type: ignore[union-attr]
                        for name in self._domain.set.sources if name in entries}
        except (OSError, tarfile.TarError):
            return {}


class _Fixer:
    """Looks at the function, puts in the reference patch, submits. Errs by submitting at once."""

    def __init__(self, bug: BugTask, rng: random.Random, error_rate: float) -> None:
        self._calls = [ToolCall("bash", {"input": f"grep -n 'def ' {bug.file}"}),
                       ToolCall("edit", {"path": bug.file, "old": bug.bad, "new": bug.good}), ToolCall("submit", {"input": ""})]
        self._rng, self._error_rate = rng, error_rate

    def act(self, observation: Observation) -> str:
        call = self._calls.pop(0)
        return render(ToolCall("submit", {"input": ""}) if self._rng.random() < self._error_rate else call, "tags")


class _Tinker:
    """Valid calls on any source file: looks, runs, and takes lines out; submits in the end."""

    def __init__(self, tasks: TaskSet, rng: random.Random) -> None:
        self._tasks, self._rng = tasks, rng

    def act(self, observation: Observation) -> str:
        path = self._rng.choice(self._tasks.sources)
        lines = self._tasks.files[path].decode().splitlines() or [""]
        at = self._rng.randrange(len(lines))
        return render(self._rng.choice([
            ToolCall("bash", {"input": f"wc -l {path}"}), ToolCall("view", {"path": path, "start": at, "end": at + 9}),
            ToolCall("edit", {"path": path, "old": lines[at], "new": ""}), ToolCall("submit", {"input": ""})]), "tags")
