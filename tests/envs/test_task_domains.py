"""The shop, the library and the service desk: the same everywhere, solvable, and not by chance."""

import asyncio
import json
from itertools import zip_longest

import pytest

from played import asked
from rollart.backends.process.environments import ProcessEnvironments, ProcessSettings
from rollart.core.errors import ConfigError
from rollart.core.types import Action
from rollart.envs.demonstrations import demonstrations, play_episode
from rollart.envs.domain import make_domain
from rollart.rewards.domains import reward_function

TINY = {"webshop": {"difficulty": 0, "max_turns": 5, "max_tokens": 24},
        "search_qa": {"difficulty": 0, "max_turns": 3, "max_tokens": 32},
        "service_desk": {"difficulty": 0, "max_turns": 4, "max_tokens": 32}}
HARD = {"webshop": {"difficulty": 2}, "search_qa": {"difficulty": 2}, "service_desk": {"difficulty": 2, "max_turns": 8}}
SETTINGS = [(name, {**settings, "seed": 3}) for table in (TINY, HARD) for name, settings in table.items()]


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_the_player_solves_200_held_out_tasks_and_chance_next_to_none(name, settings):
    domain = make_domain(name, settings)
    tasks = [domain.task(i, "eval") for i in range(200)]
    assert sum(play_episode(domain, t, domain.player(t, 0, 0.0)).success for t in tasks) == 200
    assert sum(play_episode(domain, t, domain.random_player(t, 0)).success for t in tasks) <= 10


@pytest.mark.parametrize(("name", "settings"), TINY.items())
def test_the_easiest_tasks_are_short(name, settings):
    for played in demonstrations(make_domain(name, settings), 200, error_rate=0.25):
        answers = [m for o in (played.start, *played.observations) for m in o.messages]
        assert all(len(message.content) <= 66 for message in answers)
        assert all(len(action) + 1 <= settings["max_tokens"] for action in played.actions)


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_16_episodes_turn_by_turn_are_those_played_alone(name, settings):
    domain = make_domain(name, settings)
    tasks = [domain.task(i, "eval") for i in range(16)]
    alone = [play_episode(domain, task, domain.player(task, 1, 0.4)) for task in tasks]
    episodes = [domain.open(task) for task in tasks]
    assert [episode.first() for episode in episodes] == [played.start for played in alone]
    for turn in zip_longest(*([*zip(p.actions, p.observations, strict=True)] for p in alone)):
        for episode, said in zip(episodes, turn, strict=True):
            assert said is None or episode.step(Action(said[0])) == said[1]


def test_16_processes_at_once_play_the_same_episodes_as_this_one():
    domains = {name: make_domain(name, settings) for name, settings in TINY.items()}
    tasks = [domains[name].task(i, "eval") for i in range(6) for name in TINY][:16]

    async def there(pool, task):
        player = domains[task.domain].player(task, 1, 0.4)
        environment = await pool.open(task)
        seen = [await environment.first()]
        while not seen[-1].done:
            seen.append(await environment.step(Action(player.act(seen[-1]))))
        await environment.close()
        return seen

    async def main():
        pool = ProcessEnvironments(TINY, ProcessSettings(max_processes=16))
        try:
            return await asyncio.gather(*(there(pool, task) for task in tasks))
        finally:
            await pool.close()

    for task, seen in zip(tasks, asyncio.run(main()), strict=True):
        played = play_episode(domains[task.domain], task, domains[task.domain].player(task, 1, 0.4))
        assert seen == [played.start, *played.observations]


def test_a_task_of_another_difficulty_opens_as_it_is():
    for name in TINY:
        task = make_domain(name, TINY[name]).task(0, "train")
        first = make_domain(name, HARD[name]).open(task).first()
        assert first == make_domain(name, TINY[name]).open(task).first()


class Mute:
    def act(self, observation):
        return "nothing"


@pytest.mark.parametrize("name", TINY)
def test_the_reward_of_a_solved_episode_is_1_and_an_idle_one_earns_nothing(name):
    domain = make_domain(name, TINY[name])
    task = domain.task(0, "eval")
    good, idle = (reward_function(name)(asked(play_episode(domain, task, player)))
                  for player in (domain.player(task, 0, 0.0), Mute()))
    assert (good.value, good.success) == (1.0, True)
    assert (idle.value, idle.success) == (0.0, False)
    assert good.parts["f1" if name == "search_qa" else "attributes" if name == "webshop" else "success"] == 1.0


@pytest.mark.parametrize(("name", "settings", "says"), [
    ("webshop", {"difficulty": 3}, "difficulty must be 0, 1 or 2"),
    ("webshop", {"goals": "x.json"}, "set products"),
    ("webshop", {"products": "nowhere.jsonl"}, "nowhere.jsonl cannot be read: No such file"),
    ("search_qa", {"questions": "nowhere.json"}, "nowhere.json cannot be read: No such file"),
    ("search_qa", {"passages": 0}, "passages"),
    ("service_desk", {"difficulty": 2, "max_turns": 5}, "difficulty 2 takes 6 turns; got max_turns 5"),
    ("service_desk", {"dificulty": 2}, "did you mean 'difficulty'"),
])
def test_a_mistake_is_one_line(name, settings, says):
    with pytest.raises(ConfigError) as raised:
        make_domain(name, settings)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


GOOD = {"asin": "B01", "Title": "t", "query": "q", "product_category": "c", "pricing": [1.0], "Price": "$1",
        "Description": "", "BulletPoints": [], "Attributes": ["soft"], "options": {}}


@pytest.mark.parametrize(("name", "key", "lines", "says"), [
    ("webshop", "products", [json.dumps(GOOD), "{"], "data:2 is no product of WebShop: Expecting"),
    ("webshop", "products", [json.dumps(GOOD), "", "{}"], "data:3 is no product of WebShop: no key 'pricing'"),
    ("webshop", "products", [json.dumps({**GOOD, "pricing": []})], "data:1 is no product of WebShop"),
    ("webshop", "products", [json.dumps({**GOOD, "Attributes": []})], "no product with attributes"),
    ("search_qa", "questions", ["[", "{]"], "data:2 is not JSON"),
    ("search_qa", "questions", ['[{"question": "q"}]'], "question 1 is not in HotpotQA's format: KeyError('context')"),
    ("search_qa", "questions", ["[]"], "has no questions"),
    ("search_qa", "questions", ["7"], "question 1 is not in HotpotQA's format"),
])
def test_a_malformed_file_is_named_with_the_place(tmp_path, name, key, lines, says):
    path = tmp_path / "data"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as raised:
        make_domain(name, {key: str(path)})
    assert says in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ['["x"]', '{"B01": 3}', "{", '{"B01": {"instruction": "x"}}'])
def test_a_malformed_file_of_goals_is_named(tmp_path, text):
    (tmp_path / "p").write_text(json.dumps(GOOD))
    (tmp_path / "goals").write_text(text)
    with pytest.raises(ConfigError, match="goals"):
        make_domain("webshop", {"products": str(tmp_path / "p"), "goals": str(tmp_path / "goals")})
