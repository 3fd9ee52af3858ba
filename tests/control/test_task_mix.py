"""Task mixing: seeded, weighted, resumable."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest
from fakes import mix, task
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.task_mix import Share, TaskMix
from rollart.core.events import StepEnded
from rollart.core.types import StepReport


def test_the_stream_depends_on_the_seed_only() -> None:
    def first(seed: int) -> list[str]:
        m = mix(seed, math=1.0, game=1.0)
        return [m.next().id for _ in range(50)]

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_put_backs_do_not_shift_the_draws_of_new_tasks() -> None:
    plain, returning = mix(1, math=1.0, game=2.0), mix(1, math=1.0, game=2.0)
    new = []
    for n in range(60):
        drawn = returning.next()
        new.append(drawn.id)
        if n % 5 == 0:
            returning.put_back(drawn)
            assert returning.next() == drawn
    assert new == [plain.next().id for _ in range(60)]


def test_weights_are_respected_and_each_domain_counts_on_its_own() -> None:
    m, weights = mix(2, math=1.0, game=2.0, code=5.0, never=0.0), {"math": 1 / 8, "game": 2 / 8, "code": 5 / 8}
    drawn = [m.next() for _ in range(4000)]
    counts = Counter(t.domain for t in drawn)
    chi_square = sum((counts[d] - 4000 * share) ** 2 / (4000 * share) for d, share in weights.items())
    assert chi_square < 13.8  # 2 degrees of freedom, p = 0.001
    assert counts["never"] == 0
    for domain in weights:
        assert [t.id for t in drawn if t.domain == domain] == [f"{domain}/{n}" for n in range(counts[domain])]


def test_what_was_put_back_comes_first_in_its_order_also_after_a_restore() -> None:
    m = mix(5, math=1.0, game=1.0)
    drawn = [m.next() for _ in range(6)]
    for back in (drawn[4], drawn[1]):
        m.put_back(back)
    later = mix(5, math=1.0, game=1.0)
    later.restore(json.loads(json.dumps(m.state())))
    for source in (m, later):
        assert [source.next() for _ in range(2)] == [drawn[4], drawn[1]]
    assert [later.next() for _ in range(20)] == [m.next() for _ in range(20)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(moves=st.lists(st.sampled_from(["next", "next", "back", "crash"]), max_size=60), seed=st.integers(0, 99))
def test_restore_repeats_nothing_and_loses_nothing(moves: list[str], seed: int) -> None:
    m, out, done = mix(seed, math=1.0, game=3.0), [], []
    for move in moves:
        if move == "next":
            out.append(m.next())
        elif move == "back" and out:
            m.put_back(out.pop(0))
        elif move == "crash":
            state = json.loads(json.dumps(m.state()))
            m = mix(seed, math=1.0, game=3.0)
            m.restore(state)
        done = out
    rest = [m.next() for _ in range(len(moves))]
    every = [t.id for t in done + rest]
    assert len(every) == len(set(every))
    for domain in ("math", "game"):  # no hole: 0, 1, 2, ... of each domain
        numbers = sorted(int(i.split("/")[1]) for i in every if i.startswith(domain))
        assert numbers == list(range(len(numbers)))


def test_a_domain_that_left_the_recipe_is_forgotten_and_a_new_one_begins_at_0() -> None:
    old = mix(0, math=1.0, game=1.0)
    drawn = [old.next() for _ in range(10)]
    old.put_back(next(t for t in drawn if t.domain == "math"))
    new = mix(0, game=1.0, code=1.0)
    new.restore(old.state())
    later = [new.next() for _ in range(20)]
    assert {t.domain for t in later} == {"game", "code"}
    assert min(int(t.id.split("/")[1]) for t in later if t.domain == "code") == 0
    assert not {t.id for t in later} & {t.id for t in drawn}


def test_a_task_of_other_settings_is_refused_when_it_comes_back() -> None:
    m = TaskMix({"game": Share(1.0, lambda n: task(n + 1000))}, 0)
    with pytest.raises(ValueError, match="task game/3 is not number 3 of game"):
        m.put_back(task(3))


@pytest.mark.parametrize("weights", [{"game": 0.0}, {"game": -1.0, "math": 2.0}])
def test_weights_that_draw_nothing_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weights >= 0 that do not sum to 0; got"):
        mix(0, **weights)


def test_a_mix_without_domains_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got \{\}"):
        TaskMix({}, 0)


def step(**successes: float) -> StepEnded:
    return StepEnded(1, StepReport(1, 1.0, 1), {}, successes)


def levels(m: TaskMix, count: int = 200) -> Counter[int]:
    """How many of the next new tasks have which level of three."""
    return Counter(int(m.next().id.split("/")[1]) % 3 for _ in range(count))


def test_a_curriculum_moves_with_success_and_each_level_counts_on_its_own() -> None:
    m = TaskMix({"game": Share(1.0, task, levels=3), "math": Share(0.0, lambda n: task(n, "math"))}, 0)
    assert levels(m) == {0: 200}
    m.on(0.0, step(game=0.7, math=1.0))
    quarter = levels(m)
    assert quarter[2] == 0
    assert 30 < quarter[1] < 70
    m.on(0.0, step(game=0.5, math=1.0))  # neither: the stage stays
    m.on(0.0, step(math=1.0))
    assert 30 < levels(m)[1] < 70
    m.on(0.0, step(game=0.29))
    assert levels(m) == {0: 200}
    for _ in range(20):
        m.on(0.0, step(game=1.0))
    numbers = [int(m.next().id.split("/")[1]) for _ in range(10)]
    assert numbers == [2 + 3 * i for i in range(10)]  # the last level, from its beginning


def test_a_curriculum_goes_on_where_it_stood_after_a_restore() -> None:
    def make(count: int) -> TaskMix:
        return TaskMix({"game": Share(1.0, task, levels=count)}, 4)

    m = make(3)
    for _ in range(5):
        m.on(0.0, step(game=0.9))
        m.next()
    back = m.next()
    m.put_back(back)
    later = make(3)
    later.restore(json.loads(json.dumps(m.state())))
    assert [later.next() for _ in range(40)] == [m.next() for _ in range(40)]
    fewer = make(2)  # levels were taken away: it stands at the last one
    fewer.restore(json.loads(json.dumps({**m.state(), "returned": []})))
    assert int(fewer.next().id.split("/")[1]) % 2 == 1


def test_peek_names_the_tasks_that_come_next_and_changes_nothing() -> None:
    m = mix(4, math=1.0, game=2.0)
    back = [m.next() for _ in range(3)][1]
    m.put_back(back)
    before, ahead = dict(m.state()), list(islice(m.peek(), 20))
    assert m.state() == before
    assert ahead == [m.next() for _ in range(20)]
    assert ahead[0] == back
