"""Requests, and episodes of the shipped domains played by players that err, as a run records them."""

from dataclasses import replace

from rollart.core.tokens import floats, ids
from rollart.core.types import Completion, Finish, Outcome, Trajectory, TrajectoryId, Turn
from rollart.envs.demonstrations import demonstrations
from rollart.envs.domain import make_domain
from rollart.rewards.contract import RewardRequest, content_key, request_of
from rollart.rewards.domains import reward_function


def request(number=0, **values):
    made = RewardRequest(id=f"g{number}.0", **{"domain": "d", "answer": "yes", **values})
    return replace(made, key=content_key(made))


def asked(episode, number=0):
    """The request of a played episode."""
    turns = tuple(Turn(Completion(ids([1]), floats([0.0]), ((0, 0),), Finish.STOP), text, seen, ids())
                  for text, seen in zip(episode.actions, episode.observations, strict=True))
    return request_of(Trajectory(TrajectoryId(number, 0), episode.task, ids([1]), episode.start, turns,
                                 Outcome.FINISHED), 30)


def played(count):
    """(request, the score it has in this process) of so many episodes, a third of each domain."""
    out = []
    for name in ("calculator", "frozen_lake", "guess"):
        domain = make_domain(name)
        for i, episode in enumerate(demonstrations(domain, -(-count // 3), error_rate=0.4)):
            out.append((asked(episode, i), reward_function(domain.reward)(asked(episode, i))))
    return out[:count]
