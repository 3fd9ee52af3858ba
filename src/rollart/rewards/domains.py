"""Rewards of the domains that ship here: plain functions of a request, called in any process, as often as one likes.

Keeps true: an answer is read from the agent's own actions, never from what an environment or a tool said; the format
part is paid only to a failure and stays below a success: value 1 if solved, else 0.1 x the valid share of the actions
(webshop has its own reward instead).
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import replace
from typing import cast

from rollart.core.errors import ConfigError
from rollart.core.types import Score
from rollart.rewards.contract import RewardFunction, RewardRequest, Unscorable

FORMAT_WEIGHT = 0.1

_GUESS = re.compile(r"(?:^|\s)guess ([a-z])$")
_ANSWER = re.compile(r"(?:^|\s)answer (-?\d{1,12})$")


def solved(request: RewardRequest) -> Score:
    """Solved where the environment says so: the walk ended on the goal (frozen_lake); the database is as it should be,
    the reply says what it must and nothing else, no rule was broken (service_desk); every test that the bug broke
    passes again, and every other one still does (swe)."""
    return _score(request, bool(request.facts.get("success")))


def guess(request: RewardRequest) -> Score:
    """Solved: the last action's guess is the secret. What it wrote before the guess counts for nothing."""
    found = _GUESS.search(request.answer.strip())
    return _score(request, found is not None and found[1] == request.facts.get("secret"))


def calculator(request: RewardRequest) -> Score:
    """Solved: the last action is `answer` with the target. A right tool result alone is not."""
    found = _ANSWER.search(request.answer.strip())
    return _score(request, found is not None and int(found[1]) == request.facts.get("target"))


def search_qa(request: RewardRequest) -> Score:
    """Solved: the answer is the expected one, exactly, after SQuAD's normalisation; `f1` of its words is a part."""
    score = solved(request)
    return replace(score, parts={**score.parts, "f1": request.facts.get("f1") or 0.0})


def webshop(request: RewardRequest) -> Score:
    """WebShop's own reward of the purchase, from 0 to 1 (`rollart.envs.catalogue`); solved: all of it."""
    parts = {name: request.facts.get(name) or 0.0 for name in ("reward", "type", "attributes", "options", "price")}
    return Score(parts["reward"], bool(request.facts.get("success")), parts)


def own(request: RewardRequest) -> Score:
    """What the environment itself paid: the sum of its rewards, and whether it calls that solved."""
    paid, success = request.facts.get("return"), bool(request.facts.get("success"))
    if not isinstance(paid, int | float):
        raise Unscorable("the environment told no reward")
    return Score(float(paid), success, {"success": float(success)})


REWARDS: dict[str, RewardFunction] = {
    "calculator": calculator, "frozen_lake": solved, "guess": guess, "maths": calculator, "own": own,
    "search_qa": search_qa, "service_desk": solved, "swe": solved, "webshop": webshop}


def reward_function(name: str) -> RewardFunction:
    """The function of that name or `module:function`, ready to be called. Raises ConfigError."""
    if name in REWARDS:
        return REWARDS[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"no reward {name!r}: there are {', '.join(sorted(REWARDS))}; your own is named "
                          "module:function")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ConfigError(f"reward {name} needs the module {error.name}: install it or set PYTHONPATH") from None
    except Exception as error:  # noqa: BLE001  foreign code, run by the import: whatever it raises is the user's
        raise ConfigError(f"reward {name} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(function):
        raise ConfigError(f"{name} is not a function")
    try:
        inspect.signature(function).bind(RewardRequest(id="", domain=""))
    except TypeError as error:
        raise ConfigError(f"reward {name} must take one argument, the RewardRequest: {error}") from None
    if getattr(function, "executes_output", False):
        from rollart.sandbox import SandboxSettings, choose  # packages carry no sandbox: such a function is not packed

        choose(getattr(function, "sandbox", SandboxSettings()).kind)
    return cast(RewardFunction, function)


def _score(request: RewardRequest, success: bool) -> Score:
    valid, actions = request.facts.get("valid"), request.facts.get("actions")
    share = valid / actions if isinstance(valid, int) and isinstance(actions, int) and actions else 0.0
    return Score(1.0 if success else FORMAT_WEIGHT * share, success, {"success": float(success), "format": share})
