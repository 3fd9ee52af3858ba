"""Play one task of a domain in the terminal: a person, the scripted player or the random one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rollart.core.errors import ConfigError
from rollart.core.types import Action, Observation, Task
from rollart.envs.domain import Domain, Player, Plays, Split

Who = Literal["person", "script", "random"]


def play(domain: Domain, index: int, *, split: Split = "train", who: Who = "person", seed: int = 0,
         error_rate: float = 0.0, read: Callable[[str], str] = input, write: Callable[[str], object] = print) -> bool:
    """Play task `index` to its end and return whether it was solved. End of input (Ctrl-D) gives it up."""
    task = domain.task(index, split)
    player = _player(who, domain, task, seed, error_rate, read)
    write(f"{task.id}: at most {task.max_turns} actions")
    if who == "person":
        write("An action that is not understood is answered with ? and counts. Ctrl-D gives up.")
    if who == "person" and not domain.settings.instructions:
        write(domain.rules)
    episode = domain.open(task)
    try:
        observation = episode.first()
        _show(observation, write)
        while not observation.done:
            try:
                action = player.act(observation)
            except EOFError:
                write("given up")
                return False
            if who != "person":
                write(f"assistant: {action}")
            observation = episode.step(Action(action))
            _show(observation, write)
    finally:
        episode.close()
    solved = bool(observation.facts["success"])
    write(f"{'solved' if solved else 'not solved'} in {observation.facts['actions']} actions")
    return solved


def _player(who: str, domain: Domain, task: Task, seed: int, error_rate: float,
            read: Callable[[str], str]) -> Player:
    if who == "person":
        return Plays(lambda _: read("> "))
    if who == "script":
        return domain.player(task, seed, error_rate)
    if who == "random":
        return domain.random_player(task, seed)
    raise ConfigError(f"--who must be person, script or random; got {who!r}")


def _show(observation: Observation, write: Callable[[str], object]) -> None:
    for message in observation.messages:
        text = str(message.content)
        write(f"{message.role}:\n{text}" if "\n" in text else f"{message.role}: {text}")
