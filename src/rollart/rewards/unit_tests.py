"""A reward that runs a task's unit tests on the code that the agent wrote, in a sandbox.

Keeps true: the tests are the task's own, whatever the agent wrote in their place; code that ends the process, hangs or
prints a result of its own passes nothing; a sandbox that fails is no score, never 0. It does not hold against code that
takes the test library apart from inside: tests and code share a process, as they do everywhere.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from rollart.core.errors import SandboxFailed
from rollart.core.types import Score
from rollart.rewards.contract import RewardRequest, Unavailable, Unscorable
from rollart.sandbox import SandboxSettings, open_sandbox

_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_RUNNER = """
import importlib.util, os, sys, unittest
key, suite = sys.stdin.readline().strip(), unittest.TestSuite()
sys.path.insert(0, os.getcwd())
for i, path in enumerate(sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(f"the_tests_{i}", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
result = unittest.TextTestRunner(stream=sys.stderr).run(suite)
bad = result.failures + result.errors + result.unexpectedSuccesses
print(f"\\n{key} {result.testsRun} {len(bad)}", flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class UnitTests:
    """A reward function: value is the share of the tests that pass, success that all do.

    The payload's `tests` are files, text by path; those named test*.py hold unittest's cases. What is tested: the
    facts' `files` (text by path), or else the last code block of the agent's last action, as `file`.
    sandbox: its limits, and the deadline of all tests together.
    """

    file: str = "solution.py"
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    executes_output: ClassVar[bool] = True

    def __call__(self, request: RewardRequest) -> Score:
        files, tests = request.facts.get("files"), request.payload.get("tests")
        paths = [str(path) for path in tests or () if re.search(r"(^|/)test[^/]*\.py$", str(path))]
        if not isinstance(tests, Mapping) or not paths:
            raise Unscorable("the task's payload has no `tests` with a file test*.py")
        blocks = _BLOCK.findall(request.answer)
        written = files if isinstance(files, Mapping) else {self.file: blocks[-1] if blocks else ""}
        key, seconds = secrets.token_hex(16), min(self.sandbox.seconds, max(1.0, request.deadline_seconds * 0.8))
        try:
            with open_sandbox(self.sandbox) as sandbox:
                for path, text in [*tests.items(), *written.items(), *tests.items()]:
                    try:
                        sandbox.write(path, str(text))
                    except OSError:  # a name of the agent's that cannot be: as if it had not written it
                        if path in tests:
                            raise
                ran = sandbox.run(["python3", "-I", "-X", "pycache_prefix=/tmp/pyc", "-c", _RUNNER, *paths],
                                  seconds=seconds, stdin=key + "\n")
        except (SandboxFailed, OSError) as failed:
            raise Unavailable(str(failed)) from None
        found = re.search(rf"^{key} (\d+) (\d+)$", ran.stdout, re.MULTILINE)
        if not found or ran.code or int(found[1]) == 0:
            said = ["did not come to their end", *ran.stderr.strip().splitlines()]
            return Score(0.0, False, {"passed": 0.0}, f"the tests: {'timed out' if ran.timed_out else said[-1]}")
        share = 1 - int(found[2]) / int(found[1])
        return Score(share, share == 1, {"passed": share}, f"{found[2]} of {found[1]} tests fail")


unit_tests = UnitTests()
