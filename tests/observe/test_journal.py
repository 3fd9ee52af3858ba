import asyncio
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from histories import World, make_task, make_trajectory

from rollart.core import events as ev
from rollart.core.tokens import ids
from rollart.core.types import Fate, TrajectoryId
from rollart.observe.journal import Digest, Journal, canonical


class Seen:
    def __init__(self):
        self.events = []

    def on(self, at, event):
        self.events.append((at, event))


def digest_of(seed: int, actions: int = 300) -> str:
    digest = Digest()
    times = iter(range(10**6))
    world = World(seed, Journal([digest], clock=lambda: next(times) / 3).emit)
    for _ in range(actions):
        world.act()
    return digest.hexdigest()


def test_subscribers_see_every_event_in_order_with_the_loops_time():
    first, second = Seen(), Seen()

    async def run():
        journal = Journal([first, second])
        journal.emit(ev.EngineDown("a", "gone"))
        await asyncio.sleep(0.01)
        journal.emit(ev.EngineUp("a", 3))
        return journal.sequence

    assert asyncio.run(run()) == 2
    assert first.events == second.events
    assert [type(event).__name__ for _, event in first.events] == ["EngineDown", "EngineUp"]
    assert 0.005 < first.events[1][0] - first.events[0][0] < 1


def test_the_digest_is_equal_in_another_process_with_another_hash_seed():
    code = "from test_journal import digest_of; print(digest_of(5))"
    other = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True,
                           env={"PYTHONHASHSEED": "77", "PATH": ""}, check=True)
    assert other.stdout.strip() == digest_of(5)
    assert digest_of(6) != digest_of(5)


def test_the_digest_sees_one_changed_token_and_one_changed_microsecond():
    def digest(at, tokens):
        digest = Digest()
        t = make_trajectory(TrajectoryId(1, 1), make_task(1))
        event = ev.TrajectoryEnded(t, Fate.IN_FLIGHT)
        object.__setattr__(t, "prompt", ids(tokens))
        digest.on(at, event)
        return digest.hexdigest()

    assert digest(1.0, [1, 2, 3]) == digest(1.0000001, [1, 2, 3])
    assert len({digest(1.0, [1, 2, 3]), digest(1.0, [1, 2, 4]), digest(1.000001, [1, 2, 3])}) == 3


def test_a_mappings_order_does_not_count_and_a_set_is_refused():
    assert canonical({"b": 1, "a": (2.5, None, True)}) == canonical({"a": (2.5, None, True), "b": 1})
    assert len({canonical(b""), canonical(b"ab"), canonical(b"ba"), canonical("ab")}) == 4
    with pytest.raises(TypeError, match="holds a set"):
        canonical({1, 2})


@dataclass(frozen=True)
class One:
    x: int


def test_types_of_the_same_content_differ():
    assert len({canonical(One(1)), canonical((1,)), canonical(1), canonical("1"), canonical(1.0)}) == 5
