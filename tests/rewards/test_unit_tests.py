"""Unit tests as a reward: what passes, and what does not pass for passing."""

import pytest

from rollart.core.errors import ConfigError
from rollart.rewards.contract import RewardRequest, Unscorable
from rollart.rewards.domains import reward_function
from rollart.rewards.unit_tests import UnitTests, unit_tests
from rollart.sandbox import SandboxSettings, launch, reason

pytestmark = pytest.mark.skipif(bool(reason("bubblewrap")), reason=f"bubblewrap: {reason('bubblewrap')}")
TESTS = {"tests/test_add.py": "import unittest\nfrom solution import add\nclass T(unittest.TestCase):\n"
                              "    def test_two(self): self.assertEqual(add(2, 3), 5)\n"
                              "    def test_below(self): self.assertEqual(add(-2, -3), -5)\n"}


def asked(answer="", payload=None, **facts):
    return RewardRequest(id="g1", domain="d", answer=answer, payload={"tests": TESTS} if payload is None else payload,
                         facts=facts)


def test_the_share_of_the_tests_that_pass_is_the_value():
    good = unit_tests(asked(f"I think:\n```python\nadd = None\n```\nbetter:\n```python\n{RIGHT}```"))
    assert (good.value, good.success, good.reason) == (1.0, True, "0 of 2 tests fail")
    half = unit_tests(asked("```\ndef add(a, b):\n    return abs(a) + abs(b)\n```"))
    assert (half.value, half.success, half.parts) == (0.5, False, {"passed": 0.5})
    assert "No module named 'solution'" not in unit_tests(asked("no code")).reason
    assert unit_tests(asked("no code")).value == 0


RIGHT = "def add(a, b):\n    return a + b\n"
CHEATS = {
    "ends the process": {"solution.py": "import os\nos._exit(0)"},
    "ends it softly": {"solution.py": "raise SystemExit(0)"},
    "prints a result": {"solution.py": "print('\\n' + '0' * 32 + ' 2 0', flush=True)\nimport os\nos._exit(0)"},
    "hangs": {"solution.py": "while True: pass"},
    "fills the memory": {"solution.py": "x = bytearray(10**10)"},
    "edits the tests": {"solution.py": "add = None", "tests/test_add.py": "", "./tests/../tests/test_add.py": ""},
    "a file for their folder": {"solution.py": "add = None", "tests": "x", "tests/test_add.py/x": ""},
    "tests of its own": {"solution.py": "add = None", "test_mine.py": "import unittest\nclass T(unittest.TestCase):\n"
                                                                     "    def test(self): pass\n"},
    "a test library of its own": {"solution.py": "add = None", "unittest.py": "class TestCase: pass",
                                  "unittest/__init__.py": "class TestCase: pass",
                                  "sitecustomize.py": "import os; os._exit(0)"},
}


@pytest.mark.parametrize("what", CHEATS)
def test_a_cheat_earns_nothing(what):
    score = UnitTests(sandbox=SandboxSettings(seconds=2, disk_mb=8))(asked(files=CHEATS[what]))
    assert (score.value, score.success) == (0.0, False), score
    assert score.reason


def test_files_that_cannot_be_written_are_as_if_not_written():
    assert unit_tests(asked(files={"solution.py": RIGHT, "/usr/lib/x.py": "", "a/../../../etc/x": "", "": ""})).success


@pytest.mark.parametrize("payload", [{}, {"tests": {}}, {"tests": {"README": ""}}, {"tests": "x"}])
def test_a_task_without_tests_has_no_score(payload):
    with pytest.raises(Unscorable, match="no `tests`"):
        unit_tests(asked(RIGHT, payload))


def test_it_is_refused_only_where_no_sandbox_works(monkeypatch):
    assert reward_function("rollart.rewards.unit_tests:unit_tests") is unit_tests
    monkeypatch.setattr(launch, "reason", lambda kind: "not there")
    with pytest.raises(ConfigError, match="needs a sandbox"):
        reward_function("rollart.rewards.unit_tests:unit_tests")
