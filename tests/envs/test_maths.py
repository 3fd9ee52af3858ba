"""The maths domain: its tool, its players, its files."""

import json

import pytest

from rollart.core.errors import ConfigError
from rollart.core.types import Action
from rollart.envs.demonstrations import play_episode
from rollart.envs.domain import make_domain
from rollart.rewards.contract import RewardRequest
from rollart.rewards.domains import reward_function
from rollart.sandbox import launch, reason

pytestmark = pytest.mark.skipif(bool(reason("bubblewrap")), reason=f"bubblewrap: {reason('bubblewrap')}")


@pytest.mark.parametrize("settings", [{}, {"smallest": 8, "largest": 8, "highest": 3}, {"highest": 10_000}])
def test_every_generated_problem_has_the_value_of_its_work(settings):
    domain = make_domain("maths", settings)
    for i in range(300):
        payload = domain.task(i, "train").payload
        assert eval(payload["work"]) == payload["answer"] > 0
        assert payload["question"].endswith("now?")


def test_the_scripted_player_solves_all_held_out_tasks_and_chance_next_to_none():
    domain = make_domain("maths")
    tasks = [domain.task(i, "eval") for i in range(200)]
    assert sum(play_episode(domain, task, domain.player(task, 0, 0.0)).success for task in tasks) >= 190
    assert sum(play_episode(domain, task, domain.random_player(task, 0)).success for task in tasks) <= 10


def test_the_tool_keeps_files_shows_errors_and_the_end_and_is_stopped():
    domain = make_domain("maths", {"tool_seconds": 2.0, "max_turns": 9})
    episode = domain.open(domain.task(0, "train"))

    def says(text):
        return episode.step(Action(text)).messages[0].content

    assert says("<python>open('x', 'w').write('7')</python>") == "no output: use print"
    assert says("Reading it <python>{\"code\": \"print(open('x').read())\"}</python>") == "7"
    assert says("<python>1 / 0</python>").endswith("ZeroDivisionError: division by zero")
    assert len(says("<python>print('x' * 5000)</python>")) == 1000
    assert says("<python>while True: pass</python>") == "stopped after 2 s"
    assert says("<pyth>1</pyth>").startswith("?")
    last = episode.step(Action("so answer 0"))
    assert last.done
    assert last.facts | {"target": 0} == {"success": False, "target": 0, "valid": 6, "actions": 7}
    episode.close()


def test_only_the_agents_own_answer_counts():
    reward = reward_function("maths")
    asked = {"id": "g1", "domain": "maths", "facts": {"target": 42, "valid": 1, "actions": 2}}
    assert reward(RewardRequest(**asked, answer="so it is\nanswer 42")).success
    for answer in ("answer 41", "<python>print(42)</python>", "answer 42 or 43", ""):
        assert reward(RewardRequest(**asked, answer=answer)).value == 0.05


def test_problems_come_from_a_file_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"What is {i} thousand?", "answer": f"It is <<{i}*1000={i}000>>so.\n#### {i},000"}
            for i in range(40)]
    path.write_text("\ufeff" + "".join(json.dumps(row) + "\n" for row in rows) + "\n")
    domain = make_domain("maths", {"path": str(path)})
    task = domain.task(0, "eval")
    assert task.payload["question"] == f"What is {task.payload['answer'] // 1000} thousand?"
    assert play_episode(domain, task, domain.player(task, 0, 0.0)).success
    for line, says in (("{", "JSONDecodeError"), ('{"question": "x"}', "KeyError: 'answer'"), ("[]", "TypeError"),
                       ('{"question": "x", "answer": "#### 1.5"}', "invalid literal")):
        path.write_text(json.dumps(rows[0]) + "\n" + line + "\n")
        with pytest.raises(ConfigError, match=f"gsm8k.jsonl line 2 must be.*{says}"):
            make_domain("maths", {"path": str(path)})
    path.write_bytes(json.dumps(rows[0]).encode() + b"\n\xff\n")
    with pytest.raises(ConfigError, match=r"line 2 must be.*UnicodeDecodeError"):
        make_domain("maths", {"path": str(path)})
    path.write_text("")
    with pytest.raises(ConfigError, match="holds no problem"):
        make_domain("maths", {"path": str(path)})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        make_domain("maths", {"path": str(tmp_path / "nowhere")})


def test_it_refuses_to_start_where_no_sandbox_works_unless_trusted(monkeypatch):
    monkeypatch.setattr(launch, "reason", lambda kind: "" if kind == "trust" else "not there")
    with pytest.raises(ConfigError, match="needs a sandbox"):
        make_domain("maths")
    assert make_domain("maths", {"sandbox": "trust"}).settings.limits().kind == "trust"


@pytest.mark.parametrize(("settings", "says"), [
    ({"sandbox": "jail"}, "a sandbox is one of auto"), ({"largest": 9}, "largest <= 8"), ({"highest": 2}, "highest"),
    ({"tool_seconds": 0.0}, "seconds must be above 0")])
def test_settings_out_of_range_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        make_domain("maths", settings)
