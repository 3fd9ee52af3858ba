"""Every adapter on real environments of its library; those whose library is not installed are left out.

`make test-envs` installs all of them beside each other and runs this.
"""

import asyncio
import importlib.util
import io
import json
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollart.backends.process.environments import ProcessEnvironments, ProcessSettings
from rollart.core.errors import ConfigError
from rollart.core.types import Action, Outcome, Task, Trajectory, TrajectoryId, Turn
from rollart.envs.adapters import foreign, remote
from rollart.envs.domain import make_domain
from rollart.rewards.contract import request_of
from rollart.rewards.domains import own

HERE = Path(__file__).parent
GAMES = {  # case -> the module it needs, its domain's table
    "gymnasium drawn": ("gymnasium", {"class": "gymnasium", "id": "FrozenLake-v1", "actions": "left down right up",
                                      "arguments": {"render_mode": "ansi", "is_slippery": False}}),
    "gymnasium numbers": ("gymnasium", {"class": "gymnasium", "id": "Blackjack-v1"}),
    "gem guess": ("gem", {"class": "gem", "id": "game:GuessTheNumber-v0-easy", "max_turns": 8}),
    "gem minesweeper": ("gem", {"class": "gem", "id": "game:Minesweeper-v0-easy"}),
    "gem mastermind": ("gem", {"class": "gem", "id": "game:Mastermind-v0-easy"}),
    "textarena guess": ("textarena", {"class": "textarena", "id": "GuessTheNumber-v0"}),
    "textarena hanoi": ("textarena", {"class": "textarena", "id": "TowerOfHanoi-v0", "max_turns": 4}),
    "reasoning_gym sum": ("reasoning_gym", {"class": "reasoning_gym", "id": "chain_sum"}),
    "reasoning_gym letters": ("reasoning_gym", {"class": "reasoning_gym", "id": "letter_counting"}),
    "verifiers turns": ("verifiers", {"class": "verifiers", "id": "vf_guess"}),
    "verifiers tool": ("verifiers", {"class": "verifiers", "id": "vf_guess", "arguments": {"kind": "tool"}}),
    "openenv": ("openenv", {"class": "openenv", "show": "text"}),
    "mcp process": ("mcp", {"class": "mcp", "id": f"{sys.executable} {HERE / 'mcp_server.py'}"}),
    "mcp address": ("mcp", {"class": "mcp"}),
    "http": ("json", {"class": "http", "arguments": {"highest": 10}}),
}
SERVERS = {"openenv": "ws://127.0.0.1:{}", "mcp address": "http://127.0.0.1:{}/mcp", "http": "http://127.0.0.1:{}"}


def need(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: make test-envs")


@pytest.fixture
def table(request, tmp_path):
    """The domain's table of a case, its server running and its tasks written."""
    case = request.param
    module, values = GAMES[case]
    need(module)
    values = dict(values)
    if values["class"] == "mcp":
        values["tasks"] = str(tmp_path / "tasks.jsonl")
        lines = [f'{{"question": "{a} + {b}", "answer": "{a + b}"}}' for a in range(20, 28) for b in range(8)]
        Path(values["tasks"]).write_text("\n".join(lines))
    if case not in SERVERS:
        yield values
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = {"openenv": HERE / "openenv_server.py", "mcp address": HERE / "mcp_server.py",
              "http": HERE.parents[1] / "examples" / "http_environment.py"}[case]
    server = subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < until
                time.sleep(0.2)
        yield {**values, "id": SERVERS[case].format(port)}
    finally:
        server.kill()
        server.wait()


class Guesser:
    """Plays by what is said: halves a range, adds two numbers by the tool, else asks its player."""

    def __init__(self, player):
        self.low, self.high, self.player = 1, 20, player

    def act(self, observation):
        text = observation.messages[-1].content
        if found := re.search(r"between (\d+) and (\d+)|from (\d+) to (\d+)", text):
            self.low, self.high = (int(n) for n in found.groups() if n)
        middle = (self.low + self.high) // 2
        if re.search(r"(^| )higher\b", text):
            self.low = middle + 1
        elif re.search(r"(^| )lower\b", text):
            self.high = middle - 1
        if found := re.search(r"^(\d+) \+ (\d+)", text):
            return f'<add>{{"a": {found[1]}, "b": {found[2]}}}</add>'
        if observation.messages[-1].role == "tool":
            return text if self.player == "plain" else f"answer {text}"
        if self.player and self.player not in ("plain", "tool"):
            return self.player.act(observation)
        guess = (self.low + self.high) // 2
        return f"{guess}" if self.player is None else f"[{guess}] \\boxed{{{guess}}} {guess}"


def players(domain, case):
    if case in ("gem guess", "textarena guess", "verifiers turns", "openenv", "http"):
        return lambda task: Guesser("plain" if "guess" in case else None)
    if case.startswith(("mcp", "verifiers")):
        return lambda task: Guesser("tool" if case.startswith("mcp") else "plain")
    if case.startswith("reasoning"):
        return lambda task: domain.player(task, 0, 0.0)
    return (lambda task: Guesser("plain")) if case.startswith("textarena") else lambda t: domain.random_player(t, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "table"), [(case, case) for case in GAMES], indirect=["table"])
def test_twenty_episodes_of_a_real_environment_in_worker_processes(case, table, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(sys, "path", [*sys.path])
    domain = make_domain("mine", table)
    make, scores = players(domain, case), []

    async def main():
        pool = ProcessEnvironments({"mine": table}, ProcessSettings(memory_mb=4096), open_seconds=120)
        try:
            for index in range(20):
                task = domain.task(index, "train")
                environment, player, turns = await pool.open(task), make(task), []
                observation = start = await environment.first()
                while not observation.done and len(turns) < task.max_turns:
                    text = player.act(observation)
                    observation = await environment.step(Action(text))
                    turns.append(Turn(None, text, observation, ()))
                await environment.close()
                scores.append(own(request_of(Trajectory(TrajectoryId(0, index), task, (), start, tuple(turns),
                                                        Outcome.FINISHED), 1.0)))
                assert observation.facts["actions"] == len(turns) > 0
                assert scores[-1].value == pytest.approx(sum(turn.observation.reward for turn in turns))
            assert pool.stats().killed == 0
        finally:
            await pool.close()

    asyncio.run(main())
    blind = case in ("textarena hanoi", "gem minesweeper", "gem mastermind", "gymnasium drawn", "gymnasium numbers")
    solved = sum(score.success for score in scores)
    assert solved < 20 if blind else solved == 20


@pytest.mark.parametrize("case", ["gymnasium drawn", "gem minesweeper", "gem guess", "reasoning_gym letters"])
def test_sixteen_interleaved_episodes_are_those_played_alone_and_their_host_s_chance_stays(case):
    module, values = GAMES[case]
    need(module)
    domain = make_domain("mine", values)
    alone = [list(_play(domain, index)) for index in range(16)]
    random.seed(5)
    want = random.Random(5).random()
    open_ones = [_play(domain, index) for index in range(16)]
    together = [[] for _ in open_ones]
    for _ in range(7):
        for seen, one in zip(together, open_ones, strict=True):
            seen.append(next(one))
    assert together == alone
    assert random.random() == want


def _play(domain, index, moves=6):
    task = domain.task(index, "train")
    episode, player = domain.open(task), domain.random_player(task, 1)
    observation = episode.first()
    yield observation
    for _ in range(moves):
        if not observation.done:
            observation = episode.step(Action(player.act(observation)))
        yield observation


@pytest.mark.parametrize(("module", "values", "message"), [
    ("gymnasium", {"class": "gymnasium", "id": "FrozenLak-v1"}, "no id 'FrozenLak-v1': did you mean 'FrozenLake-v1'"),
    ("gymnasium", {"class": "gymnasium", "id": "Pendulum-v1"}, "its actions are Box"),
    ("gymnasium", {"class": "gymnasium", "id": "Taxi-v4", "actions": "a b"}, "a word for each, can be played; got 2"),
    ("gymnasium", {"class": "gymnasium", "id": "Taxi-v4", "arguments": {"x": 1}}, "unexpected keyword argument 'x'"),
    ("gymnasium", {"class": "gymnasium", "id": "Taxi-v4", "arguments": 3}, "arguments must be dict; got 3"),
    ("gem", {"class": "gem", "id": "game:Sudoku-v9"}, "did you mean 'game:Sudoku-v0"),
    ("textarena", {"class": "textarena"}, "no id '': there are "),
    ("reasoning_gym", {"class": "reasoning_gym", "id": "codeio"}, "does not repeat itself"),
    ("reasoning_gym", {"class": "reasoning_gym", "id": "chain_sum", "arguments": {"min_terms": 0}}, "must be positive"),
    ("verifiers", {"class": "verifiers", "id": "no-such-package"}, "Could not import 'no-such-package'"),
    ("mcp", {"class": "mcp", "id": "x", "tasks": "/nowhere"}, "No such file or directory: '/nowhere'"),
    ("websockets", {"class": "openenv", "id": "http://x"}, "must be an address that begins with ws://"),
    ("json", {"class": "http", "id": "x"}, "must be an address that begins with http://"),
    ("json", {"class": "gen"}, "no domain 'gen': did you mean 'gem'"),
])
def test_what_cannot_be_is_one_line_that_says_so(module, values, message):
    need(module)
    with pytest.raises(ConfigError) as told:
        make_domain("mine", values)
    assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_a_task_file_s_bad_line_is_named(tmp_path):
    need("mcp")
    (tmp_path / "t.jsonl").write_text('{"question": "1", "answer": 1}\n{"question": "1"}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl:2: a line must be"):
        make_domain("mine", {"class": "mcp", "id": "x", "tasks": str(tmp_path / "t.jsonl")})


def test_a_library_that_is_not_there_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(ConfigError, match=r"needs the module gem: pip install 'rollart\[gem\]'"):
        make_domain("mine", {"class": "gem", "id": "game:Sudoku-v0-easy"})


@pytest.mark.parametrize(("reset", "step", "message"), [
    (3, None, "odd: reset must give a text; got int 3"),
    ("a", foreign.Reply(None), "odd: step must give a text; got NoneType None"),
    ("a", foreign.Reply("b", "much"), "odd: step must give a finite number as reward; got str 'much'"),
    ("a", foreign.Reply("b", float("nan")), "odd: step must give a finite number as reward; got float nan"),
])
def test_an_answer_of_a_wrong_type_names_the_environment_and_the_call(reset, step, message):
    class Odd(foreign.Session):
        def reset(self):
            return foreign.Reply(reset)

        def step(self, text):
            return step

    class Domain(foreign.Foreign):
        name, Session = "odd", Odd

    domain = Domain(foreign.ForeignSettings(id="odd"))
    episode = domain.open(domain.task(0, "train"))
    with pytest.raises(TypeError, match=message):
        (episode.first(), episode.step(Action("x")))


def test_an_environment_without_a_player_refuses_to_demonstrate():
    domain = make_domain("mine", {"class": "http", "id": "http://x"})
    with pytest.raises(ConfigError, match="domain mine: http://x comes without a player"):
        domain.player(domain.task(0, "train"), 0, 0.1)
    with pytest.raises(ConfigError, match="no random player"):
        domain.random_player(domain.task(0, "train"), 0)


@pytest.mark.parametrize(("answer", "says"), [
    ([1], r"step must answer with a JSON object; got b'\[1\]'"),
    ({"text": "x"}, r"step must answer with done as true or false; got None"),
    ({"text": "x", "done": "false"}, r"step must answer with done as true or false; got 'false'"),
    ({"text": "x", "done": True, "success": "false"}, r"step must answer with success as true or false; got 'false'"),
])
def test_an_http_server_that_answers_with_another_type_is_named(monkeypatch, answer, says):
    monkeypatch.setattr(remote._DIRECT, "open", lambda *_, **__: io.BytesIO(json.dumps(answer).encode()))
    session = remote._Http(make_domain("mine", {"class": "http", "id": "http://x"}).settings,
                           Task("mine/0", "mine", {"seed": 1}, 3, 8))
    with pytest.raises(TypeError, match=f"http://x: {says}"):
        session.step("go")


def test_the_reference_server_of_the_docs_is_the_example_and_short():
    server = (HERE.parents[1] / "examples" / "http_environment.py").read_text()
    assert f"```python\n{server}```" in (HERE.parents[1] / "docs" / "environments.md").read_text()
    assert len(server.splitlines()) <= 60
