import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from rollart.core.errors import ConfigError
from rollart.core.types import Action
from rollart.envs.calculator import results
from rollart.envs.demonstrations import demonstrations, play_episode
from rollart.envs.domain import DOMAINS, make_domain
from rollart.envs.frozen_lake import steps_to_goal
from rollart.envs.play import play
from rollart.sandbox import reason

SANDBOXED = {"maths"}
NO_SANDBOX = pytest.mark.skipif(bool(reason("bubblewrap")), reason=f"bubblewrap: {reason('bubblewrap')}")
NAMES = [pytest.param(name, marks=[NO_SANDBOX] if name in SANDBOXED else []) for name in sorted(DOMAINS)
         if name != "swe"]  # it has tests of its own


def content(task):
    return json.dumps(task.payload, sort_keys=True)


@pytest.mark.parametrize("name", NAMES)
def test_train_and_eval_never_share_a_problem_whatever_the_seeds(name):
    train = {content(make_domain(name, {"seed": 1}).task(i, "train")) for i in range(400)}
    held_out = {content(make_domain(name, {"seed": seed}).task(i, "eval")) for i in range(100) for seed in (1, 2)}
    assert len(train) > 50
    assert len(held_out) > 20
    assert not train & held_out


@pytest.mark.parametrize("name", NAMES)
def test_a_task_is_the_same_in_every_process(name):
    script = (f"import json; from rollart.envs.domain import make_domain; d = make_domain({name!r})\n"
              "print(json.dumps([dict(d.task(i, 'eval').payload) for i in range(5)]))")
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONHASHSEED": "7"}).stdout
    domain = make_domain(name)
    assert json.loads(there) == [dict(domain.task(i, "eval").payload) for i in range(5)]


@pytest.mark.parametrize("name", NAMES)
def test_the_player_solves_all_without_error_half_with_errors_and_chance_next_to_none(name):
    domain, count = make_domain(name), 100 if name in SANDBOXED else 300

    def success(error_rate):
        return sum(d.success for d in demonstrations(domain, count, error_rate=error_rate)) / count

    tasks = [domain.task(i, "train") for i in range(1000 if name == "guess" else count)]
    random_success = sum(play_episode(domain, t, domain.random_player(t, 0)).success for t in tasks) / len(tasks)
    assert success(0.0) == 1.0
    assert 0.3 < success(0.25) < 0.7
    assert random_success < (0.20 if name == "guess" else 0.05)  # 5 blind guesses among 24 to 26 letters


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_repeat_and_their_actions_fit_the_limits(name):
    domain = make_domain(name)
    first, again = (list(demonstrations(domain, 30, seed=3, error_rate=0.4)) for _ in range(2))
    assert first == again
    assert first != list(demonstrations(domain, 30, seed=4, error_rate=0.4))
    for played in first:
        assert len(played.actions) <= played.task.max_turns
        assert all(len(action) + 1 <= played.task.max_tokens for action in played.actions)
        assert played.start.messages[0].role == "user"
        assert len(played.observations) == len(played.actions)


@pytest.mark.parametrize("name", NAMES)
def test_garbage_wastes_a_turn_and_never_succeeds(name):
    domain = make_domain(name)
    task = domain.task(0, "train")
    episode = domain.open(task)
    episode.first()
    garbage = ["", "xyz", "calc 1*", "guess", "answer", "LL", "é\n", "guess 12 13"]
    for turn in range(task.max_turns):
        observation = episode.step(Action(garbage[turn % len(garbage)]))
        assert observation.done == (turn + 1 == task.max_turns)
        assert "?" in observation.messages[0].content
    assert observation.facts["success"] is False
    assert observation.facts["valid"] == 0


def test_the_lake_is_solvable_within_its_turns_and_a_hole_ends_the_walk():
    domain = make_domain("frozen_lake", {"size": 5, "max_turns": 9})
    for i in range(50):
        rows = domain.task(i, "train").payload["map"]
        assert len(rows) == 5
        assert steps_to_goal(rows)[0, 0] <= 9
    small = make_domain("frozen_lake")
    task = next(t for t in (small.task(i, "train") for i in range(100)) if t.payload["map"][0][1] == "H")
    episode = small.open(task)
    assert episode.first().messages[0].content.startswith("AO")
    observation = episode.step(Action("R"))
    assert observation.done
    assert not observation.truncated
    assert not observation.facts["success"]


def test_guess_tells_the_part_that_holds_the_secret_and_ends_without_guesses():
    domain = make_domain("guess", {"fewest": 3, "letters": 3, "max_turns": 2})
    task = replace(domain.task(0, "train"), payload={"low": "y", "high": "a", "secret": "z"})
    episode = domain.open(task)
    assert episode.first().messages[0].content == "y-a"
    assert episode.step(Action("guess y")).messages[0].content == "z-a"
    last = episode.step(Action("whatever guess a"))
    assert last.messages[0].content == "z-z"
    assert last.done
    assert not last.facts["success"]
    given_up = domain.open(task).step(Action("stop"))
    assert given_up.done
    assert not given_up.facts["success"]


@pytest.mark.parametrize(("numbers", "operators", "value"), [
    ([3, 4, 2], "+*", 11), ([9, 3, 2, 2], "-+*", 10), ([2, 3, 4], "**", 24), ([9, 4, 3], "--", 2)])
def test_the_solution_multiplies_first_and_goes_left_to_right(numbers, operators, value):
    expression = "".join(f"{n}{o}" for n, o in zip(numbers, operators + " ", strict=True))
    assert results(numbers, operators)[-1] == value == eval(expression)


def test_the_calculator_does_the_operation_it_is_asked_for_and_evaluates_no_text():
    domain = make_domain("calculator", {"max_turns": 9})
    task = replace(domain.task(0, "train"), payload={"numbers": [3, 4, 2], "operators": "-*"})
    episode = domain.open(task)
    assert episode.first().messages[0].content == "3-4*2"
    for text in ("calc 3", "calc 0", "calc 4*2", "calc __import__('os')", "calc", "calc 11"):
        assert episode.step(Action(text)).messages[0].content == "? 3-4*2"
    assert episode.step(Action("calc 1")).messages[0].content == "-1*2"
    assert episode.step(Action("calc 1")).messages[0].content == "-2"
    assert not episode.step(Action("answer -2")).facts["success"]


@pytest.mark.parametrize(("name", "settings", "says"), [
    ("frozen_lak", {}, "no domain 'frozen_lak': did you mean 'frozen_lake'"),
    ("guess", {"letter": 3}, "domain guess has no setting 'letter': did you mean 'letters'"),
    ("guess", {"letters": "3"}, "domain guess: letters must be int; got '3'"),
    ("guess", {"fewest": 2, "letters": 16, "max_turns": 4}, "16 letters need 5 guesses; got max_turns 4"),
    ("frozen_lake", {"size": 5, "max_turns": 7}, "size 5 takes at least 8 moves; got max_turns 7"),
    ("calculator", {"largest": 6}, "largest 6 needs as many turns; got max_turns 5"),
    ("nowhere.at_all:X", {}, "needs the module nowhere"),
    ("json:loads", {}, "json:loads is not a Domain class"),
])
def test_a_mistake_in_a_domain_is_one_line_that_says_what_to_set(name, settings, says):
    with pytest.raises(ConfigError) as raised:
        make_domain(name, settings)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_split_without_a_problem_is_an_error_and_does_not_hang():
    with pytest.raises(ConfigError, match="no problem for split eval"):
        make_domain("calculator", {"highest": 1, "smallest": 2, "largest": 2, "eval_share": 1e-4}).task(0, "eval")


def test_instructions_come_before_the_first_observation():
    domain = make_domain("guess", {"instructions": True})
    first = domain.open(domain.task(0, "train")).first()
    assert [message.role for message in first.messages] == ["system", "user"]


def test_a_person_can_play_and_give_up():
    domain = make_domain("guess")
    lines = []
    secret = domain.task(0, "train").payload["secret"]
    assert play(domain, 0, read=lambda _: f"guess {secret}", write=lines.append)
    assert lines[-1] == "solved in 1 actions"

    def end_of_input(_):
        raise EOFError

    assert not play(domain, 0, read=end_of_input, write=lines.append)
    assert play(domain, 0, who="script", write=lines.append)
    with pytest.raises(ConfigError, match="person, script or random"):
        play(domain, 0, who="robot")


def test_errors_while_a_domain_is_made_name_it_as_the_recipe_does(tmp_path, monkeypatch):
    (tmp_path / "picky.py").write_text(
        "from rollart.core.errors import ConfigError\nfrom rollart.envs.calculator import Calculator\n\n\n"
        "class Picky(Calculator):\n    def __init__(self, settings=None):\n        super().__init__(settings)\n"
        "        raise ConfigError(f'domain {self.name}: no id')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^domain g: no id$"):
        make_domain("g", {"class": "picky:Picky"})
