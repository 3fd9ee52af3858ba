from dataclasses import replace

import pytest
from histories import make_task, make_trajectory

from rollart.core.tokens import ids
from rollart.core.types import Outcome, TrajectoryId
from rollart.observe.payload import decode, encode


@pytest.mark.parametrize("changes", [
    {}, {"counted": True}, {"turns": 0}, {"outcome": Outcome.FAILED, "error": "hung \udc80 'x'"},
    {"tokens": 3000, "turns": 5}])
def test_a_trajectory_comes_back_exactly(changes):
    trajectory = make_trajectory(TrajectoryId(3, 1, "e"), make_task(3), **changes)
    assert decode(encode(trajectory)) == trajectory


def test_a_rewritten_history_and_the_experts_of_a_mixture_come_back():
    plain = make_trajectory(TrajectoryId(3, 1), make_task(3))
    first, second = plain.turns
    turns = (replace(first, fork=ids([4, 5, 6])),
             replace(second, completion=replace(second.completion, routes=bytes(range(250)))))
    trajectory = replace(plain, turns=turns)
    assert decode(encode(trajectory)) == trajectory
    assert trajectory.length == plain.length + 3


def test_tokens_cost_four_bytes_each_and_little_else():
    small, large = (make_trajectory(TrajectoryId(0, 0), make_task(0), turns=1, tokens=n) for n in (1, 10_001))
    assert 80_000 <= len(encode(large)) - len(encode(small)) < 80_100


def test_what_is_not_a_trajectory_is_refused():
    body = encode(make_trajectory(TrajectoryId(0, 0), make_task(0)))
    with pytest.raises(ValueError, match="this version reads 2"):
        decode(b"\x07" + body[1:])
    with pytest.raises(ValueError, match="its header says"):
        decode(body + b"....")


def test_whatever_byte_of_it_is_another_it_is_a_trajectory_or_refused():
    """Nothing but a ValueError: a reader says that the ledger is damaged, in one line."""
    body = encode(make_trajectory(TrajectoryId(0, 0), make_task(0)))
    refused = 0
    for at in range(len(body)):
        for other in (0x00, 0x20, 0x22, 0x30, 0x5D, 0xFF):
            try:
                decode(body[:at] + bytes([other]) + body[at + 1:])
            except ValueError:
                refused += 1
    assert refused > len(body)
