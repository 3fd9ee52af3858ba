"""Reward functions for the tests, well-behaved and not; each notes its calls in $REWARD_CALLS if that is set."""

import os
import time

from rollart.core.types import Score
from rollart.rewards.contract import Unavailable, Unscorable, batched, executes_output, register_serverless
from rollart.rewards.judge import Judge


def note(request):
    if "REWARD_CALLS" in os.environ:
        with open(os.environ["REWARD_CALLS"], "a") as file:
            file.write(f"{request.id} {os.getpid()}\n")


def fine(request):
    note(request)
    return Score(len(request.answer) / 10, "yes" in request.answer, {"length": float(len(request.answer))}, "counted")


def slow(request):
    time.sleep(0.05)
    return fine(request)


def moody(request):
    """As its facts say: hang or exit; with `once`, only as long as that file is not there."""
    mood, once = request.facts.get("mood"), request.facts.get("once")
    if mood and (not once or not os.path.exists(once)):
        if once:
            open(once, "w").close()
        if mood == "exit":
            os._exit(3)
        if mood == "hang":
            time.sleep(600)
    return fine(request)


@batched
def together(requests):
    return [Score(float(len(requests)), True) for _ in requests]


def nan(request):
    return Score(float("nan"))


def nothing(request):
    return None


def raises(request):
    raise KeyError("target")


def never(request):
    raise Unscorable("it is empty")


def later(request):
    raise Unavailable("the judge is away")


def two_arguments(request, other):
    return Score(0.0)


@executes_output
def unit_tests(request):
    raise AssertionError("must never run")


@register_serverless("elastic")
def bound(request):
    return fine(request)


@register_serverless("cloud")
def bound_to_nowhere(request):
    return fine(request)


letter_judge = Judge(url_env="JUDGE_URL", model="tiny", template="{answer}", attempts=2, seconds=30.0, max_tokens=12)
