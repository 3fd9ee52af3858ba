"""The sample buffer: slots, staleness at consumption, policies abort and wait."""

from __future__ import annotations

import random

import pytest
from fakes import task, trajectory
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollart.control.sample_buffer import SampleBuffer
from rollart.control.settings import SCHEDULES
from rollart.core.errors import InvariantViolated
from rollart.core.types import Group, StalePolicy


def buffer(schedule: str = "rollart", *, batch: int = 1, alpha: int = 1, wait: bool = False, spare: int = 0,
           version: int = 0) -> SampleBuffer:
    return SampleBuffer(batch_groups=batch, alpha=alpha, schedule=SCHEDULES[schedule], spare_groups=spare,
                        stale=StalePolicy.WAIT if wait else StalePolicy.ABORT, version=version)


def group(id: int, oldest: int) -> Group:
    return Group(id, task(id), oldest, (trajectory(id, 0, oldest),))


def fill(b: SampleBuffer, id: int, oldest: int) -> bool:
    b.admit(id, oldest)
    return b.put(group(id, oldest))


def step(b: SampleBuffer) -> tuple[list[Group], list[int]]:
    """Take, train, publish, load."""
    b.take()
    gone = b.evict()
    b.advance(b.version + 1)
    b.live(b.version)
    return gone


def test_t6_consumed_at_10_with_alpha_2_the_group_of_version_8_is_kept_and_of_7_is_not() -> None:
    b = buffer(alpha=2, version=10)
    assert fill(b, 0, 8)
    assert not fill(b, 1, 7)
    assert [g.id for g in b.take()] == [0]
    assert b.free == 2  # of 3: the group of version 7 holds none


def test_t7_areal_admits_by_version_and_groups_accepted_so_far() -> None:
    """free = (alpha + version + 1) * batch - accepted - running, at any moment."""
    alpha, batch, accepted, running = 2, 4, 0, 0
    b = buffer("areal", batch=batch, alpha=alpha)
    chance, open_groups = random.Random(7), []
    for id in range(200):
        if b.free and chance.random() < 0.6:
            b.admit(id, b.version)
            open_groups.append(id)
            running += 1
        elif open_groups:
            b.put(group(open_groups.pop(0), b.version))
            running, accepted = running - 1, accepted + 1
        if not b.missing():
            step(b)
        assert b.free == (alpha + b.version + 1) * batch - accepted - running
    assert b.version > 5


def test_t7_areal_after_recovery_at_version_3_counts_12_groups_as_accepted() -> None:
    b = buffer("areal", batch=4, alpha=2, version=3)
    assert b.free == (2 + 3 + 1) * 4 - 12
    for id in range(4):
        b.admit(id, 3)
    assert b.free == 8


@pytest.mark.parametrize(("schedule", "taken", "stepped", "live"),
                         [("sync", 0, 0, 2), ("sync_plus", 0, 0, 2), ("one_off", 2, 2, 2), ("areal", 2, 4, 4),
                          ("rollart", 2, 0, 4)])
def test_slots_are_freed_when_the_schedule_says(schedule: str, taken: int, stepped: int, live: int) -> None:
    alpha = 0 if schedule.startswith("sync") else 1
    b = buffer(schedule, batch=2, alpha=alpha)
    fill(b, 0, 0)
    fill(b, 1, 0)
    b.take()
    assert b.free == taken
    b.advance(1)
    assert b.free == stepped
    b.live(1)
    assert b.free == live


def test_i4_no_group_is_admitted_beyond_the_slots() -> None:
    b = buffer(batch=2, alpha=1, spare=1)
    for id in range(5):
        b.admit(id, 0)
    with pytest.raises(InvariantViolated, match=r"I4.*group 5.*5 slots"):
        b.admit(5, 0)


def test_without_overlap_no_slot_is_free_while_the_trainer_works() -> None:
    b = buffer("sync_plus", batch=1, alpha=0, spare=1)
    fill(b, 0, 0)
    assert b.free == 1
    b.take()
    assert b.free == 0
    b.advance(1)
    assert b.free == 0
    b.live(1)
    assert b.free == 2


def test_i5_the_trainer_moves_by_one_version() -> None:
    with pytest.raises(InvariantViolated, match="I5"):
        buffer().advance(2)


def test_abort_evicts_ready_groups_and_names_open_ones_beyond_the_bound() -> None:
    b = buffer(batch=1, alpha=1, spare=2)
    for id in range(3):
        b.admit(id, 0)
    assert b.put(group(0, 0))
    assert b.put(group(1, 0))
    assert b.note(2, 0)
    assert step(b) == ([], [])  # what remains may be trained at version 1
    fill(b, 3, 0)
    b.take()
    evicted, hopeless = b.evict()
    assert ([g.id for g in evicted], hopeless) == ([3], [2])  # and no longer at version 2, the next batch's
    assert not b.note(2, 0)
    assert not fill(b, 4, 0)
    assert b.free == b.slots - 3  # all but the new ones hold theirs until version 2 is live
    b.discard(2)
    assert b.free == b.slots - 3
    b.advance(2)
    b.live(2)
    assert b.free == b.slots


def test_a_dropped_group_that_ends_after_the_next_weights_are_live_frees_its_slot_then() -> None:
    b = buffer(batch=1, alpha=1, spare=1)
    b.admit(0, 0)
    b.note(0, 0)
    fill(b, 1, 0)
    step(b)
    fill(b, 2, 0)
    assert step(b) == ([], [0])
    assert b.free == b.slots - 1
    b.discard(0)
    assert b.free == b.slots


def test_nothing_is_admitted_between_a_step_and_its_weights_where_these_free_the_slots() -> None:
    """It would have old weights, and be one batch late: a group lost at each step, for ever."""
    b = buffer(batch=2, alpha=1)
    for id in range(3):
        fill(b, id, 0)
    b.take()
    assert b.free == 1
    b.advance(1)
    assert b.free == 0
    b.live(1)
    assert b.free == 3


def test_s9_surplus_groups_stay_for_the_next_batch_oldest_first() -> None:
    b = buffer(batch=2, alpha=2, version=2)
    for id, oldest in enumerate([2, 1, 2, 0, 2]):
        assert fill(b, id, oldest)
    assert [g.id for g in b.take()] == [3, 1]
    b.advance(3)
    assert [g.id for g in b.take()] == [0, 2]
    assert list(b.ready) == [4]


def test_take_of_a_short_batch_is_refused() -> None:
    b = buffer(batch=2)
    fill(b, 0, 0)
    assert b.missing() == 1
    with pytest.raises(InvariantViolated, match="take called with 1 ready"):
        b.take()


def test_wait_holds_the_batch_back_while_it_would_leave_more_due_groups_than_later_steps_can_take() -> None:
    """The docstring's example: batch 1, alpha 2, deadlines open {2, 2}, ready {3}, n = 1."""
    b = buffer(batch=1, alpha=2, wait=True, version=1)
    b.admit(0, 0)
    b.admit(1, 0)
    b.note(0, 0)
    b.note(1, 0)
    fill(b, 2, 1)
    assert b.missing() == 1
    b.put(group(0, 0))
    assert b.missing() == 0
    assert [g.id for g in b.take()] == [0]


def test_wait_refuses_spare_groups() -> None:
    with pytest.raises(ValueError, match="spare_groups must be 0; got 1"):
        buffer(wait=True, spare=1)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"alpha": -1}, {"spare": -1}])
def test_sizes_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*got"):
        buffer(**wrong)  # type: ignore[arg-type]


class Waiting:
    """Groups under policy wait, driven by chance as the pipeline drives them; one member's tokens stand for a group.

    A group samples its oldest token at the served version, and the buffer learns of it later, when the turn ends.
    """

    def __init__(self, chance: random.Random, schedule: str, batch: int, alpha: int, *, late: bool) -> None:
        self.chance, self.late = chance, late
        self.b = buffer(schedule, batch=batch, alpha=alpha, wait=True)
        self.served = 0
        self.ids = 0
        self.sampled: dict[int, int] = {}  # what open groups really sampled, told or not
        self.trained = 0
        self.busy = self.publishing = False

    def moves(self) -> list[str]:
        b = self.b
        found = []
        if b.free:
            found += ["admit"] * 3
        if b.open:
            found += ["sample", "tell", "complete", "complete", "member fails", "group fails"]
        if not self.busy and not b.missing():
            found += ["take"] * 4
        if self.busy and not self.publishing:
            found += ["step"] * 4
        if self.publishing:
            found += ["live"] * 2
        return found

    def play(self, move: str) -> None:
        b, chance = self.b, self.chance
        some = chance.choice(list(b.open)) if b.open else -1
        match move:
            case "admit":
                b.admit(self.ids, self.served)
                self.ids += 1
            case "sample":
                self.sampled.setdefault(some, self.served)
                if not self.late:
                    assert b.note(some, self.sampled[some])
            case "tell" if some in self.sampled:
                assert b.note(some, self.sampled[some]), "a group missed its bound"
            case "member fails":  # its replacement samples on what is served then
                self.sampled.pop(some, None)
                assert b.note(some, None)
            case "group fails":
                self.sampled.pop(some, None)
                b.discard(some)
            case "complete":
                oldest = self.sampled.pop(some, self.served)
                assert b.put(Group(some, task(), oldest, (trajectory(some, 0, oldest),))), "a group missed its bound"
            case "take":
                taken = b.take()
                self.trained += len(taken)
                assert all(b.version - g.oldest <= b.alpha for g in taken)
                assert b.evict() == ([], [])
                self.busy = True
            case "step":  # the publish of the version before is over
                self.busy = False
                b.advance(b.version + 1)
                self.publishing = True
            case "live":
                self.served = b.version
                b.live(self.served)
                self.publishing = False
        b.check()


def test_wait_counts_an_open_group_as_due_from_the_version_it_was_admitted_at() -> None:
    """A long first turn has sampled at version 0 already; the buffer hears of it when the turn ends."""
    b = buffer(batch=1, alpha=1, wait=True)
    fill(b, 0, 0)
    b.admit(1, 0)
    step(b)
    fill(b, 2, 1)
    if not b.missing():
        step(b)
    assert b.note(1, 0), "the group missed its bound"


@pytest.mark.parametrize("late", [False, True])
def test_wait_never_lets_a_group_miss_its_bound_and_never_dead_locks(late: bool) -> None:
    @settings(max_examples=200, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(seed=st.integers(0, 2**32), batch=st.integers(1, 3), alpha=st.integers(0, 3), moves=st.integers(20, 150))
    def check(seed: int, batch: int, alpha: int, moves: int) -> None:
        game = Waiting(random.Random(seed), "rollart", batch, alpha, late=late)
        for _ in range(moves):
            possible = game.moves()
            assert possible, f"dead lock: {game.b.__dict__}"
            game.play(game.chance.choice(possible))
        version = game.b.version
        for _ in range(1000):  # whatever the state, it goes on when groups only complete
            if game.b.version > version + alpha:
                break
            possible = [m for m in game.moves() if m in ("admit", "complete", "take", "step", "live")]
            assert possible, f"dead lock: {game.b.__dict__}"
            game.play(possible[-1])
        assert game.b.version > version + alpha

    check()
