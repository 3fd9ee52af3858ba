"""An environment of OpenEnv, served as OpenEnv serves it: find a number by higher and lower."""

import random
import sys

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Hint(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.secret, self.left = random.Random(seed).randint(1, 10), 5
        return Hint(text="Find a number from 1 to 10.")

    def step(self, action, **_):
        self.left -= 1
        guess = int(action.message)
        text = "yes" if guess == self.secret else "higher" if guess < self.secret else "lower"
        return Hint(text=text, done=text == "yes" or not self.left, reward=float(text == "yes"))

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
