import random

import pytest

from rollart.algo.intervals import change_interval, success_interval, wilson


@pytest.mark.parametrize(("successes", "n", "low", "high"), [
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_wilsons_interval_is_that_of_newcombes_table(successes, n, low, high):
    assert wilson(successes / n, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1 - successes / n, n) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_nothing_is_known_without_trials_and_all_solved_is_not_certain():
    assert wilson(0.0, 0) == success_interval([], 3) == (0.0, 1.0)
    assert change_interval([], [], 1) == (-1.0, 1.0)
    assert success_interval([1.0] * 20, 4) == pytest.approx((0.8389, 1.0), abs=5e-5)


def test_attempts_at_one_task_count_as_far_as_they_differ():
    alike, spread = [1.0, 0.0] * 16, [0.5] * 32
    assert success_interval(alike, 4) == success_interval(alike, 1) == wilson(0.5, 32)
    assert success_interval(spread, 4) == wilson(0.5, 128)
    assert success_interval([0.5], 4) == wilson(0.5, 1)
    low, high = success_interval([1.0, 0.75, 0.25, 0.0] * 8, 4)
    assert wilson(0.5, 32)[0] < low < wilson(0.5, 128)[0] < 0.5 < wilson(0.5, 128)[1] < high < wilson(0.5, 32)[1]


def test_the_change_of_the_same_tasks_is_surer_than_of_others_and_turns_round():
    before, after = [1.0] * 10 + [0.0] * 22, [1.0] * 20 + [0.0] * 12
    low, high = change_interval(before, after, 1)
    assert 0 < low < 10 / 32 < high
    other = change_interval(before, after[::-1], 1)
    assert other[0] < low < high < other[1]
    assert change_interval(after, before, 1) == pytest.approx((-high, -low))
    assert change_interval([1.0] * 8, [1.0] * 8, 1)[0] < 0 < change_interval([1.0] * 8, [1.0] * 8, 1)[1]


@pytest.mark.parametrize("attempts", [1, 4])
def test_it_holds_the_truth_in_95_of_100_cases(attempts):
    """Tasks of uneven difficulty, played before and after: the intervals cover what is true of all tasks."""
    chance, cases, covered, changed = random.Random(5), 1500, 0, 0

    def played(p: float) -> float:
        return sum(chance.random() < p for _ in range(attempts)) / attempts

    for _ in range(cases):
        hard = [chance.betavariate(0.8, 1.2) for _ in range(48)]  # 0.4 on average, and then half as often wrong: 0.7
        before, after = [played(p) for p in hard], [played((1 + p) / 2) for p in hard]
        low, high = success_interval(before, attempts)
        covered += low <= 0.4 <= high
        low, high = change_interval(before, after, attempts)
        changed += low <= 0.3 <= high
    assert 0.93 < covered / cases < 0.97
    assert 0.93 < changed / cases < 0.985
