"""An environment package of verifiers: many turns, and one with a tool."""

import random

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["secret"], state["solved"] = int(state["answer"]), False

    @vf.stop
    async def found(self, state):
        return state["solved"]

    async def env_response(self, messages, state, **_):
        said = [int(word) for word in str(messages[-1]["content"]).split() if word.isdigit()]
        guess = said[-1] if said else 0
        if guess == state["secret"]:
            state["solved"] = True
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if guess < state["secret"] else "lower"}]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return int(a) + int(b)


def load_environment(kind="guess", rows=50):
    chance = random.Random(0)
    if kind == "tool":
        pairs = [(chance.randint(1, 99), chance.randint(1, 99)) for _ in range(rows)]
        data = Dataset.from_list([{"question": f"{a} + {b}", "answer": str(a + b)} for a, b in pairs])

        def right(completion, answer, **_):
            return float(str(completion[-1]["content"]).strip() == answer)

        return vf.ToolEnv(dataset=data, tools=[add], max_turns=4, rubric=vf.Rubric(funcs=[right]))
    data = Dataset.from_list([{"question": "Find a number from 1 to 10.", "answer": str(chance.randint(1, 10))}
                              for _ in range(rows)])

    def solved(state, **_):
        return float(state["solved"])

    return Guess(dataset=data, max_turns=6, system_prompt="You guess.", rubric=vf.Rubric(funcs=[solved]))
