"""Domains and rewards that go wrong in every way, for the worker processes."""

import os
import random
import subprocess
import time
from dataclasses import dataclass

from rollart.core.types import Message, Observation, Score, Task
from rollart.envs.domain import Domain, DomainSettings, Episode


@dataclass(frozen=True, kw_only=True)
class TroubleSettings(DomainSettings):
    open_fails: str = ""  # path: the opening fails as long as this file exists, and removes it


class Trouble(Domain):
    name = "trouble"
    reward = "troublesome:fine"
    Settings = TroubleSettings

    def problem(self, rng):
        return {"n": rng.randrange(1000)}

    def open(self, task):
        if self.settings.open_fails and os.path.exists(self.settings.open_fails):
            os.remove(self.settings.open_fails)
            raise OSError("not yet")
        if task.payload.get("open") == "hang":
            time.sleep(600)
        time.sleep(task.payload.get("open_seconds", 0))
        return _Episode()

    def player(self, task, seed, error_rate):
        raise NotImplementedError

    random_player = player


class _Episode(Episode):
    def first(self):
        return Observation((Message("user", str(os.getpid())),))

    def step(self, action):
        word, _, rest = action.text.partition(" ")
        match word:
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(int(rest))
            case "raise":
                raise KeyError(rest)
            case "eat":
                return Observation(facts={"n": len(bytearray(int(rest) * 1_000_000))})
            case "long":
                return Observation((Message("user", "x" * int(rest)),))
            case "object":
                return Observation(facts={"x": object()})
            case "nothing":
                return None
            case "says":
                return Observation((Message(*eval(rest)),))
            case "ends":
                return Observation(done=eval(rest))
            case "pays":
                return Observation(reward=eval(rest))
            case "facts":
                return Observation(facts=dict([eval(rest)]))
            case "child":
                return Observation((Message("user", str(subprocess.Popen(["sleep", "600"]).pid)),))
            case "random":
                return Observation((Message("user", str(random.random())),))
        return Observation((Message("user", action.text),), facts={"success": True})

    def close(self):
        pass


def fine(request):
    return Score(1.0, True, {"pid": float(os.getpid())})


def moody(request):
    """Hangs, crashes or gives no number, as the task says; `once`: only as long as that file is not there."""
    payload = request.payload
    if "once" in payload:
        if os.path.exists(payload["once"]):
            return Score(0.5)
        open(payload["once"], "w").close()
    match payload["mood"]:
        case "hang":
            time.sleep(600)
        case "crash":
            os._exit(3)
        case "nan":
            return Score(float("nan"))
    return fine(request)


def raises(request):
    raise KeyError("target")


def nan(request):
    return Score(float("nan"))


def none(request):
    return None


def exits(request):
    os._exit(4)


def hangs(request):
    time.sleep(600)


def trouble_task(id="t", **payload):
    return Task(id, "troublesome:Trouble", payload)
