import asyncio
import random
import statistics

import pytest

from rollart.core.clock import now
from rollart.core.errors import EnvironmentFailed
from rollart.core.types import Action, Observation, Task
from rollart.envs.latency import InjectedLatency, Latency
from rollart.sim.loop import run_virtual


class Quick:
    def __init__(self):
        self.open_now = 0

    async def open(self, task):
        self.open_now += 1
        return self

    async def first(self):
        return Observation()

    async def step(self, action):
        return Observation()

    async def close(self):
        self.open_now -= 1


TASK = Task("a", "slow")


def draws(latency, n=20_000):
    rng = random.Random(0)
    return [latency.step_delay(rng) for _ in range(n)]


@pytest.mark.parametrize(("distribution", "sigma"), [("normal", 2.0), ("lognormal", 15.0), ("exponential", 10.0),
                                                     ("constant", 0.0)])
def test_delays_have_the_stated_mean_and_deviation(distribution, sigma):
    given = sigma if distribution in ("normal", "lognormal") else 0.0
    values = draws(Latency(distribution=distribution, mean_seconds=10, sigma_seconds=given))
    assert statistics.fmean(values) == pytest.approx(10, rel=0.05)
    assert statistics.pstdev(values) == pytest.approx(sigma, rel=0.15)


def test_delays_are_cut_at_zero_and_the_tail_adds_its_share():
    assert min(draws(Latency(distribution="normal", mean_seconds=1, sigma_seconds=3))) == 0
    values = draws(Latency(mean_seconds=1, tail_probability=0.1, tail_seconds=50))
    assert set(values) == {1, 51}
    assert values.count(51) / len(values) == pytest.approx(0.1, rel=0.1)


def episode_times(order, seed=5):
    """Virtual end times of the steps of two tasks, opened in that order."""

    async def main():
        latency = Latency(distribution="lognormal", mean_seconds=5, sigma_seconds=20, open_seconds=100)
        pool = InjectedLatency(Quick(), {"slow": latency}, seed)

        async def episode(name):
            begin, times = now(), []
            environment = await pool.open(Task(name, "slow"))
            for _ in range(5):
                times.append(now() - begin)
                await environment.step(Action("x"))
            await environment.close()
            return times

        times = await asyncio.gather(*(episode(name) for name in order))
        return dict(zip(order, times, strict=True))

    return run_virtual(main())


def test_delays_depend_on_seed_task_and_opening_only():
    ab, ba, alone, other = episode_times("ab"), episode_times("ba"), episode_times("a"), episode_times("ab", seed=6)
    assert ab["a"] == pytest.approx(ba["a"])
    assert ab["a"] == pytest.approx(alone["a"])
    assert ab["b"] == pytest.approx(ba["b"])
    assert ab["a"] != ab["b"]
    assert ab["a"] != other["a"]


def test_the_second_opening_of_a_task_draws_anew():
    async def main():
        pool = InjectedLatency(Quick(), {"slow": Latency(distribution="exponential", open_seconds=9)}, 0)
        times = []
        for _ in range(2):
            begin = now()
            await pool.open(TASK)
            times.append(now() - begin)
        return times

    first, second = run_virtual(main())
    assert first != second
    assert first > 0


def test_a_hang_lasts_until_it_is_closed_or_cancelled():
    async def main():
        inner = Quick()
        pool = InjectedLatency(inner, {"slow": Latency(hang_rate=1)}, 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10_000):
                await pool.open(TASK)
        assert inner.open_now == 0
        environment = await InjectedLatency(inner, {"slow": Latency(hang_rate=0.5)}, 1).open(Task("b", "slow"))
        step = asyncio.create_task(hang(environment))
        await asyncio.sleep(10_000)
        assert not step.done()
        await environment.close()
        with pytest.raises(EnvironmentFailed, match="b: step in domain slow hung on purpose"):
            await step
        assert inner.open_now == 0

    async def hang(environment):
        while True:
            await environment.step(Action("x"))

    run_virtual(main())


def test_failures_come_at_their_rate_and_name_the_stage():
    async def main():
        inner, failures = Quick(), {}
        pool = InjectedLatency(inner, {"slow": Latency(failure_rate=0.25)}, 0)
        for i in range(400):
            try:
                await (await pool.open(Task(f"t{i}", "slow"))).close()
            except EnvironmentFailed as error:
                failures[i] = str(error)
        assert inner.open_now == 0
        return failures

    failures = run_virtual(main())
    assert 70 < len(failures) < 130
    assert all(text == f"t{i}: open in domain slow failed on purpose" for i, text in failures.items())


def test_other_domains_pass_through():
    async def main():
        inner = Quick()
        assert await InjectedLatency(inner, {"slow": Latency(hang_rate=1)}, 0).open(Task("a", "quick")) is inner

    run_virtual(main())


@pytest.mark.parametrize(("values", "says"), [
    ({"distribution": "uniform"}, "distribution must be"),
    ({"mean_seconds": -1}, "mean_seconds must be at least 0"),
    ({"hang_rate": 2}, "hang_rate must lie between 0 and 1"),
    ({"distribution": "exponential", "mean_seconds": 1, "sigma_seconds": 1}, "sigma_seconds needs"),
    ({"tail_seconds": 5}, "go together"),
])
def test_settings_that_would_do_nothing_are_refused(values, says):
    with pytest.raises(ValueError, match=says):
        Latency(**values)
