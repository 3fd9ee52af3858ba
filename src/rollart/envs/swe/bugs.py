"""Bug-fix tasks: find and mend a bug in a Python package, with a shell, a viewer and an editor; its tests decide.

Keeps true: a fix is scored in a fresh sandbox that holds the package as it was given, tests and settings included, and
of the agent's work only the source files that were there before; so tests that it changed, files that it added and
processes that it left count for nothing. An action is one call, of which the first in a text counts (see `rules`).
"""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollart.core.clock import stream
from rollart.core.errors import ConfigError
from rollart.core.ranges import above, at_least
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import CountedEpisode, Domain, DomainSettings, Episode, Player, Plays
from rollart.envs.swe.task_set import SHIPPED, TaskSet, files_of, opened, read_set, run_tests
from rollart.envs.tool_calls import ToolCall, parse, render
from rollart.sandbox import SandboxSettings, choose

_SUBMIT = ToolCall("submit", {"input": ""})


@dataclass(frozen=True, kw_only=True)
class BugFixSettings(DomainSettings):
    """path: folder of a task set (`rollart envs make-swe`); empty: the small one that ships.

    hints: 2 names the file and the function, 1 the file, 0 neither. bugs: only tasks with so many mutations (0: all).
    call_seconds, test_seconds: deadline of a tool call, and of the tests that score; a last step may take both.
    output_chars: most of an answer (characters; its first and last half). sandbox, memory_mb: see SandboxSettings.
    """

    path: str = ""
    hints: Literal[0, 1, 2] = 2
    bugs: int = 0
    call_seconds: float = 15.0
    test_seconds: float = 40.0
    output_chars: int = 4000
    sandbox: str = "auto"
    memory_mb: int = 512
    max_turns: int = 20
    max_tokens: int = 1024
    instructions: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "bugs")
        above(self, 0, "call_seconds", "test_seconds", "output_chars")
        SandboxSettings(kind=self.sandbox, memory_mb=self.memory_mb)


class BugFix(Domain):
    """Payload: the task's `id` in its set."""

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
        choose(s.sandbox)
        self.box = SandboxSettings(kind=s.sandbox, seconds=s.call_seconds, memory_mb=s.memory_mb)

    def problem(self, rng: random.Random) -> dict[str, Any]:
        return {"id": rng.choice(self._ids)}

    def open(self, task: Task) -> Episode:
        return _Work(self, task)

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        """Looks, puts in the reference patch, submits; errs by submitting at once."""
        bug, rng = self.set.tasks[task.payload["id"]], stream(seed, "player", task.id)
        calls = [ToolCall("bash", {"input": f"grep -n 'def ' {bug.file}"}),
                 ToolCall("edit", {"path": bug.file, "old": bug.bad, "new": bug.good}), _SUBMIT]
        return Plays(lambda _: render(_SUBMIT if rng.random() < error_rate else calls.pop(0), "tags"))

    def random_player(self, task: Task, seed: int) -> Player:
        """Valid calls on any source file: looks, takes a line out, submits in the end."""
        rng = stream(seed, "random", task.id)

        def act(_: Observation) -> str:
            path = rng.choice(self.set.sources)
            lines = self.set.files[path].decode().splitlines() or [""]
            at = rng.randrange(len(lines))
            calls = [ToolCall("bash", {"input": f"wc -l {path}"}), _SUBMIT,
                     ToolCall("view", {"path": path, "start": at, "end": at + 9}),
                     ToolCall("edit", {"path": path, "old": lines[at], "new": ""})]
            return render(rng.choice(calls), "tags")

        return Plays(act)


class _Work(CountedEpisode):
    def __init__(self, domain: BugFix, task: Task) -> None:
        super().__init__(domain, task)
        known = domain.set.tasks
        if task.payload["id"] not in known:
            raise ConfigError(f"{task.id}: the set has no task {task.payload['id']}; was it made anew?")
        self._bug = known[task.payload["id"]]
        self._given = domain.set.with_bug(self._bug)
        self._sandbox = opened(domain.box, self._given)

    def first(self) -> Observation:
        return Observation(self._domain.start(Message("user", self._bug.statement(self._domain.settings.hints))))

    def step(self, action: Action) -> Observation:
        call = next(iter(parse(str(action.text), "tags")), None)
        text = self._used(call) if call else "? one call: <bash>, <view>, <edit> or <submit>"
        submitted = call is not None and call.name == "submit"
        done = submitted or self._actions + 1 >= self._task.max_turns
        return self._answer(*([] if submitted else [Message("tool", text)]), valid=not text.startswith("? "),
                            ended=submitted, **(self._score() if done else {"success": False}))

    def close(self) -> None:
        self._sandbox.close()

    def _used(self, call: ToolCall) -> str:
        """It begins with `? ` where the call does not have the form that it should."""
        given = call.arguments
        try:
            match call.name:
                case "bash":
                    command = str(given["input"] if "input" in given else given["command"])
                    ran = self._sandbox.run(command, env={"PYTHONDONTWRITEBYTECODE": "1"})  # two edits in a second
                    end = f"[no end within {ran.seconds:.0f} s]" if ran.timed_out else f"[exit code {ran.code}]"
                    return self._clip(ran.stdout + ran.stderr) + (end if ran.code or ran.timed_out else "")
                case "view":
                    lines = self._read(given["input"] if "input" in given else given["path"]).splitlines()
                    first, last = int(given.get("start", 1)), int(given.get("end", len(lines)))
                    shown = list(enumerate(lines, 1))[max(first - 1, 0):max(last, 0)]
                    return self._clip("\n".join(f"{number:5} {line}" for number, line in shown))
                case "edit":
                    path, old, new = (str(given[key]) for key in ("path", "old", "new"))
                    text = self._read(path)
                    if not old or text.count(old) != 1:
                        return f"? old must stand once in {path}; it stands there {text.count(old) if old else 0} times"
                    self._sandbox.write(path, text.replace(old, new))
                    return f"edited {path}"
                case "submit":
                    return ""
        except KeyError as missing:
            return f"? {call.name} needs {missing}, as JSON"
        except (OSError, ValueError, TypeError, OverflowError) as error:
            return f"? {call.name}: {error}"
        return f"? no tool {call.name}: there are bash, view, edit and submit"

    def _read(self, path: object) -> str:
        return self._sandbox.read(str(path)).decode()

    def _clip(self, text: str) -> str:
        half = self._domain.settings.output_chars // 2
        more = len(text) - 2 * half
        return text if more <= 0 else f"{text[:half]}\n... {more} characters ...\n{text[-half:]}"

    def _score(self) -> dict[str, Any]:
        bug, domain = self._bug, self._domain
        with opened(domain.box, {**self._given, **self._changed()}) as fresh:
            tested = run_tests(fresh, files_of(bug.FAIL_TO_PASS), domain.settings.test_seconds)[-1]
        fixed, kept = tested.passed(bug.FAIL_TO_PASS), tested.passed(bug.PASS_TO_PASS)
        return {"success": fixed == len(bug.FAIL_TO_PASS) and kept == len(bug.PASS_TO_PASS), "tests": tested.end,
                "fail_to_pass": [fixed, len(bug.FAIL_TO_PASS)], "pass_to_pass": [kept, len(bug.PASS_TO_PASS)]}

    def _changed(self) -> Mapping[str, bytes]:
        """The source files as the agent left them; all as they were where its folder cannot be read."""
        try:
            with tarfile.open(fileobj=io.BytesIO(self._sandbox.snapshot())) as tar:
                left = {name: tar.extractfile(entry) for entry in tar if entry.isreg()
                        and (name := entry.name.removeprefix("./")) in self._domain.set.sources}
                return {name: file.read() for name, file in left.items() if file}
        except (OSError, tarfile.TarError):
            return {}
