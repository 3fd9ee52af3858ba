"""Rewards of the domains that ship here: plain functions of a trajectory, called in any process, as often as one likes.

Keeps true: an answer is read from the agent's own actions, never from what an environment or a tool said; the format
part is paid only to a failure and stays below a success: value 1 if solved, else 0.1 x the valid share of the actions.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

from rollart.core.errors import ConfigError
from rollart.core.types import Score, Trajectory

RewardFunction = Callable[[Trajectory], Score]

FORMAT_WEIGHT = 0.1

_GUESS = re.compile(r"(?:^|\s)guess ([a-z])$")
_ANSWER = re.compile(r"(?:^|\s)answer (-?\d{1,12})$")


def frozen_lake(trajectory: Trajectory) -> Score:
    """Solved: the walk ended on the goal."""
    return _score(trajectory, bool(_fact(trajectory, "success")))


def guess(trajectory: Trajectory) -> Score:
    """Solved: the last action's guess is the secret. What it wrote before the guess counts for nothing."""
    found = _GUESS.search(_last_action(trajectory))
    return _score(trajectory, found is not None and found[1] == _fact(trajectory, "secret"))


def calculator(trajectory: Trajectory) -> Score:
    """Solved: the last action is `answer` with the value of the expression. A right tool result alone is not."""
    found = _ANSWER.search(_last_action(trajectory))
    return _score(trajectory, found is not None and int(found[1]) == _fact(trajectory, "target"))


REWARDS: dict[str, RewardFunction] = {"calculator": calculator, "frozen_lake": frozen_lake, "guess": guess}


def reward_function(name: str) -> RewardFunction:
    """The function of that name or `module:function`. Raises ConfigError."""
    if name in REWARDS:
        return REWARDS[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"no reward {name!r}: there are {', '.join(REWARDS)}; your own is named module:function")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ConfigError(f"reward {name} needs the module {error.name}: install it or set PYTHONPATH") from None
    if not callable(function):
        raise ConfigError(f"{name} is not a function")
    return function


def _last_action(trajectory: Trajectory) -> str:
    return str(trajectory.turns[-1].text).strip() if trajectory.turns else ""


def _fact(trajectory: Trajectory, name: str) -> object:
    return trajectory.turns[-1].observation.facts.get(name) if trajectory.turns else None


def _score(trajectory: Trajectory, success: bool) -> Score:
    valid, actions = _fact(trajectory, "valid"), _fact(trajectory, "actions")
    share = valid / actions if isinstance(valid, int) and isinstance(actions, int) and actions else 0.0
    return Score(1.0 if success else FORMAT_WEIGHT * share, success, {"success": float(success), "format": share})
