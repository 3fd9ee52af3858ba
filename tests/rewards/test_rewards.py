import pytest

from rollart.core.errors import ConfigError
from rollart.core.tokens import floats, ids
from rollart.core.types import (
    Completion,
    Finish,
    Message,
    Observation,
    Outcome,
    Score,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)
from rollart.rewards.contract import request_of
from rollart.rewards.domains import REWARDS, calculator, guess, reward_function, solved


def trajectory(*turns):
    """From (action, facts, tool message) a turn."""
    made = tuple(Turn(Completion(ids([1]), floats([0]), ((0, 0),), Finish.STOP), action,
                      Observation((Message("tool", said),), facts=facts), ids()) for action, facts, said in turns)
    return request_of(Trajectory(TrajectoryId(0, 0), Task("t", "d"), ids([1]), Observation(), made, Outcome.FINISHED),
                      30)


def facts(valid, actions, **more):
    return {"valid": valid, "actions": actions, "success": False, **more}


def test_a_correct_answer_in_bad_format_beats_a_wrong_one_in_perfect_format():
    correct = calculator(trajectory(("x", facts(0, 9, target=4), "?"), ("answer 4", facts(1, 10, target=4), "")))
    wrong = calculator(trajectory(("answer 5", facts(1, 1, target=4), "")))
    assert (correct.success, wrong.success) == (True, False)
    assert correct.value == 1.0
    assert wrong.value == pytest.approx(0.1)
    assert wrong.parts == {"success": 0.0, "format": 1.0}


def test_the_echo_of_a_tool_earns_nothing():
    echo = calculator(trajectory(("calc 2+2", facts(1, 1, target=4), "4")))
    spoken_by_tool = calculator(trajectory(("x", facts(0, 1, target=4), "answer 4")))
    assert not echo.success
    assert spoken_by_tool == Score(0.0, False, {"success": 0.0, "format": 0.0})


@pytest.mark.parametrize(("text", "solved"), [
    ("klm n opq guess n", True), ("guess n", True), ("guess n guess m", False), ("guess no", False),
    ("unguess n", False), ("n", False), ("", False)])
def test_a_guess_is_read_from_the_end_of_the_last_action(text, solved):
    assert guess(trajectory((text, facts(1, 1, secret="n"), "yes"))).success is solved


def test_only_the_last_action_counts():
    said = trajectory(("answer 4", facts(1, 1, target=4), ""), ("answer 5", facts(2, 2, target=4), ""))
    assert not calculator(said).success


def test_the_walk_is_solved_where_it_ended_on_the_goal():
    assert solved(trajectory(("R", facts(1, 1) | {"success": True}, "G"))).value == 1.0
    assert solved(trajectory(("R", facts(1, 2), ""))).value == pytest.approx(0.05)


@pytest.mark.parametrize("name", sorted(REWARDS.keys() - {"own"}))
def test_a_trajectory_without_turns_has_the_score_zero(name):
    assert reward_function(name)(trajectory()).value == 0.0


def test_a_reward_of_ones_own_is_named_by_its_path_and_a_mistake_is_told():
    assert reward_function("rollart.rewards.domains:guess") is guess
    for name, says in [("gues", "no reward 'gues': there are calculator"), ("no.where:f", "needs the module no"),
                       ("json:nothing", "is not a function")]:
        with pytest.raises(ConfigError, match=says):
            reward_function(name)
