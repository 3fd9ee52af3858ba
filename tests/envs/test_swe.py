"""Bug-fix tasks. What needs a sandbox is left out where none works."""

import ast
import json
import shutil
from dataclasses import replace

import pytest

from helpers import rollart
from rollart.core.errors import ConfigError
from rollart.core.types import Action
from rollart.envs.demonstrations import play_episode
from rollart.envs.domain import make_domain
from rollart.envs.swe.make import MakeSettings, make_set, shortest_edit
from rollart.envs.swe.mutate import mutate, mutations
from rollart.envs.swe.task_set import SHIPPED, opened, read_set, run_tests
from rollart.envs.tool_calls import ToolCall, render
from rollart.sandbox import SandboxSettings, choose

try:
    choose("auto")
    WHY = ""
except ConfigError as refused:
    WHY = str(refused)
sandboxed = pytest.mark.skipif(bool(WHY), reason=WHY)

SOURCE = '''\
@decorate(1 + 1)
def outer(a: int = 3, *, deep=False):
    """Left alone: 1 < 2."""
    x = a + 1  # a comment
    def inner(b):
        return b < x and not b
    return [f"{a + 1}", inner(x)[x:], range(a), min(a, x)]

class C:
    k = 5
    def m(self, q):
        if q == "ü" and q in self:
            q += 1
        self.go(q, 2)
        raise ValueError
'''


FOUND = mutations(SOURCE.encode())


def test_each_mutation_is_one_splice_that_parses_and_means_something_else():
    for text in (SOURCE, *(path.read_text() for path in (SHIPPED / "template/pocket").glob("*.py"))):
        for one in mutations(text.encode()):
            mutated = mutate(text, one)
            data = text.encode()
            assert mutated is not None
            assert mutated.encode() == data[:one.start] + one.text.encode() + data[one.end:]
            assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))
            good, bad = shortest_edit(text, mutated)
            assert text.count(good) == 1 == mutated.count(bad)
            assert text.replace(good, bad) == mutated
            assert mutated.replace(bad, good) == text


def test_mutations_name_the_innermost_function_and_leave_the_rest_alone():
    data = SOURCE.encode()
    found = {(one.function, data[one.start:one.end].decode().strip(), one.text.strip()) for one in FOUND}
    assert {name for name, _, _ in found} == {"outer", "outer.<locals>.inner", "C.m"}
    assert {("outer", "3", "4"), ("outer", "False", "True"), ("outer", "+", "-"), ("outer", "x = a + 1", "pass"),
            ("outer.<locals>.inner", "<", "<="), ("outer.<locals>.inner", "and", "or"), ("outer", "x", "x + 1"),
            ("outer.<locals>.inner", "not b", "b"), ("outer", "a", "a - 1"), ("outer", "min", "max"),
            ("outer", "a, x", "x, a"), ("C.m", "==", "!="), ("C.m", "in", "not in"), ("C.m", "+=", "-="),
            ("C.m", 'q == "ü" and q in self', 'not (q == "ü" and q in self)'), ("C.m", "self.go(q, 2)", "pass"),
            ("C.m", "raise ValueError", "pass")} <= found
    first_lines = SOURCE.encode().index(b"x = a + 1")
    assert all(one.text in ("4", "2", "True") for one in FOUND if one.start < first_lines)
    assert not any(b'f"' in data[one.start:one.end] for one in FOUND)


def test_two_mutations_go_together_unless_they_overlap():
    plus, three = (next(m for m in FOUND if m.text.strip() == text) for text in ("-", "4"))
    both = mutate(SOURCE, plus, three)
    assert "a: int = 4" in both
    assert "x = a - 1" in both
    assert mutate(SOURCE, plus, next(m for m in FOUND if m.text == "pass")) is None


@pytest.fixture(scope="module")
def domain():
    return make_domain("swe", {"max_turns": 6})


def call(name, **arguments):
    return Action(render(ToolCall(name, arguments), "tags"))


def played(domain, task, *actions):
    """The last observation after these actions and a submit."""
    episode = domain.open(task)
    try:
        episode.first()
        for action in actions:
            assert not episode.step(action).done
        return episode.step(call("submit", input=""))
    finally:
        episode.close()


@sandboxed
def test_the_reference_patch_solves_and_no_patch_does_not(domain):
    for index in range(3):
        task = domain.task(index, "eval")
        solved = play_episode(domain, task, domain.player(task, 0, 0.0))
        assert solved.success
        assert solved == play_episode(domain, task, domain.player(task, 0, 0.0))
        nothing = played(domain, task)
        assert not nothing.facts["success"]
        assert nothing.facts["fail_to_pass"] == [0, len(domain.set.tasks[task.payload["id"]].FAIL_TO_PASS)]
        kept, of = nothing.facts["pass_to_pass"]
        assert kept == of
        assert not play_episode(domain, task, domain.random_player(task, 0)).success


PASS_ALL = """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome = "passed"
    return report
"""


@sandboxed
@pytest.mark.parametrize("trick", [
    [call("bash", input="sed -i 's/assert .*/assert True/; s/with pytest.*:/if True:/' tests/*.py")],
    [call("bash", input="rm -rf tests; mkdir tests; touch tests/test_lists.py tests/test_words.py")],
    [call("bash", input=f"cat > conftest.py <<'E'{PASS_ALL}E"), call("bash", input="cp conftest.py tests/")],
    [call("bash", input="printf '[pytest]\\npython_files = none\\n' > pytest.ini; echo 'raise SystemExit' > json.py")],
    [call("bash", input="rm -rf pocket; chmod 000 .; sleep 100 & true")],
], ids=["asserts", "no tests", "conftest", "settings", "ruin"])
def test_what_is_done_to_the_tests_earns_nothing(domain, trick):
    facts = played(domain, domain.task(1, "eval"), *trick).facts
    assert not facts["success"]
    assert facts["fail_to_pass"][0] == 0
    assert facts["tests"] == "whole"


@sandboxed
def test_a_fix_that_breaks_another_test_is_not_paid(domain):
    task = domain.task(0, "eval")
    bug = domain.set.tasks[task.payload["id"]]
    spoil = call("bash", input=f"echo 'del {next(f for f in FUNCTIONS[bug.file] if f != bug.function)}' >> {bug.file}")
    facts = played(domain, task, spoil, call("edit", path=bug.file, old=bug.bad, new=bug.good)).facts
    assert not facts["success"]


FUNCTIONS = {"pocket/lists.py": ("rotate", "runs"), "pocket/words.py": ("wrap", "caesar"),
             "pocket/numbers.py": ("roman", "median")}


@sandboxed
def test_the_tools_answer_and_what_is_no_call_costs_a_turn(domain):
    task = domain.task(0, "train")
    bug = domain.set.tasks[task.payload["id"]]
    episode = domain.open(task)
    try:
        assert [m.role for m in episode.first().messages] == ["system", "user"]
        assert bug.FAIL_TO_PASS[0] in episode.first().messages[-1].content
        asked = ["ls", call("edit", path=bug.file, old="no such text", new="").text, "<view>nowhere.py</view>",
                 "<fly>up</fly>", call("bash", input=f"grep -c . {bug.file}; exit 3").text]
        answers = [episode.step(Action(text)).messages[0].content for text in asked]
        assert all(answer.startswith("? ") for answer in answers[:4])
        assert answers[4].endswith("[exit code 3]")
        last = episode.step(call("view", path=bug.file, start=2, end=3))
        lines = domain.set.with_bug(bug)[bug.file].decode().splitlines()
        assert last.messages[0].content == f"    2 {lines[1]}\n    3 {lines[2]}"
        assert (last.done, last.truncated) == (True, True)
        assert (last.facts["actions"], last.facts["valid"], last.facts["success"]) == (6, 2, False)
        assert last.facts["tests"] == "whole"
    finally:
        episode.close()


@sandboxed
def test_the_agent_finds_the_bug_and_not_the_answer_in_its_sandbox(domain):
    bug = domain.set.tasks[domain.task(0, "train").payload["id"]]
    source = str(SHIPPED.parents[3])  # as where rollart is installed beside the Python that the sandbox shows
    with opened(SandboxSettings(warm=0, read_only=(source,)), domain.set.with_bug(bug)) as sandbox:
        assert sandbox.read(bug.file).decode().count(bug.bad) == 1
        assert not sandbox.run(["ls", f"{source}/rollart"]).stdout  # it is there, and covered
        name = bug.file.split("/")[1]
        found = sandbox.run(f"find / -path /proc -prune -o -name {name} -print", seconds=60).stdout.split()
        assert [path for path in found if path.endswith(bug.file)] == [f"{sandbox.work}/{bug.file}"]


PACKAGE = {
    "nums.py": "def double(a):\n    return a * 2\n\n\ndef untested(a):\n    return a + 1\n\n\ndef top(a):\n"
               "    best = a[0]\n    for one in a:\n        if one > best:\n            best = one\n    return best\n",
    "test_nums.py": "from nums import double, top\n\ndef test_double():\n    assert double(4) == 8\n\ndef test_top():\n"
                    "    assert top([1, 3, 2]) == 3\n\n\ndef test_broken():\n    assert double(1) == 3\n"}


@sandboxed
@pytest.mark.slow
def test_a_set_is_made_verified_and_gone_on_with(tmp_path):
    source, told = tmp_path / "package", []
    source.mkdir()
    for name, text in PACKAGE.items():
        (source / name).write_text(text)

    def make(out, count, seed=0):
        settings = MakeSettings(count=count, workers=1, seed=seed)
        return make_set(str(source), tmp_path / out, settings, lambda *said: told.append(said))

    assert make("whole", 2)["kept"] == 2
    assert make("parts", 1)["kept"] == 1
    assert make("parts", 2)["kept"] == 2
    whole, parts = ((tmp_path / name / "tasks.jsonl").read_text() for name in ("whole", "parts"))
    assert whole == parts
    made = read_set(tmp_path / "whole")
    assert {task.function for task in made.tasks.values()} == {"double", "top"}
    for task in made.tasks.values():
        assert "test_nums.py::test_broken" not in task.FAIL_TO_PASS + task.PASS_TO_PASS
        with opened(SandboxSettings(warm=0), made.with_bug(task)) as sandbox:
            tested = run_tests(sandbox, ["test_nums.py"], 20)[-1]
        assert not tested.passed(task.FAIL_TO_PASS)
        assert tested.passed(task.PASS_TO_PASS) == len(task.PASS_TO_PASS)
        assert task.function in task.statement(2)
        assert task.file in task.statement(1).splitlines()[0]
        assert task.statement(0).splitlines()[0] == "There is a bug in this package."
    with pytest.raises(ConfigError, match=r"was begun with .* --seed 0"):
        make("whole", 3, seed=1)
    assert told[-1][1:] == (2, told[-1][2])


@sandboxed
def test_a_package_whose_tests_do_not_pass_is_refused_in_one_line(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "test_a.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ConfigError, match=r"no test of .* passes.*nowhere_at_all") as raised:
        make_set(str(tmp_path / "package"), tmp_path / "out", MakeSettings(count=1), lambda *_: None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda folder: (folder / "set.json").unlink(), "is no set of bug-fix tasks"),
    (lambda folder: (folder / "set.json").write_text('{"version": 9}'), "version 9, not 1"),
    (lambda folder: (folder / "tasks.jsonl").write_text(""), "has no tasks yet"),
    (lambda folder: (folder / "tasks.jsonl").write_text('{"id": "x"}\n'), "tasks.jsonl line 1 is not a task"),
    (lambda folder: (folder / "template/pocket/lists.py").write_text(""), "does not stand once in pocket/lists.py"),
])
def test_a_set_that_is_broken_is_one_line_that_says_where(tmp_path, spoil, says):
    shutil.copytree(SHIPPED, tmp_path / "set")
    spoil(tmp_path / "set")
    with pytest.raises(ConfigError, match=says):
        make_domain("swe", {"path": str(tmp_path / "set")})


@pytest.mark.parametrize(("settings", "says"), [
    ({"hints": 3}, "hints must be 0, 1 or 2"), ({"sandbox": "jail"}, "a sandbox is one of"),
    ({"bugs": 7}, "no task with bugs = 7"), ({"call_seconds": 0.0}, "must be above 0")])
def test_settings_are_checked(settings, says):
    with pytest.raises(ConfigError, match=says):
        make_domain("swe", settings)


@sandboxed
def test_a_task_that_is_not_in_the_set_any_more_is_refused(domain):
    with pytest.raises(ConfigError, match="the set has no task gone"):
        domain.open(replace(domain.task(0, "train"), payload={"id": "gone"}))


@sandboxed
def test_the_shipped_set_is_whole_and_both_splits_have_tasks(domain):
    assert len(domain.set.tasks) >= 120
    for line in (SHIPPED / "tasks.jsonl").read_text().splitlines():
        assert json.loads(line)["FAIL_TO_PASS"]
    assert len({domain.task(i, "eval").payload["id"] for i in range(200)}) >= 25


@pytest.mark.parametrize(("arguments", "says"), [
    (["no/such/folder"], "no/such/folder is no folder"),
    (["toolz", "--count", "0"], "count must be above 0; got 0"),
    (["toolz", "--sandbox", "jail"], "a sandbox is one of"),
    ([".", "--out", "src"], "src holds something else")])
def test_a_mistake_in_make_swe_is_one_line(tmp_path, arguments, says):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").touch()
    done = rollart("envs", "make-swe", "--out", "new", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert says in done.stderr
