import asyncio
import os
import signal
import time

import pytest
from troublesome import trouble_task

from rollart.backends.process.environments import ProcessEnvironments, ProcessSettings
from rollart.core.errors import ConfigError, EnvironmentFailed
from rollart.core.types import Action, Observation
from rollart.envs.domain import DOMAINS, make_domain

TROUBLE = "troublesome:Trouble"


def run(story, domains=None, **values):
    """Run `story(pool)` and check that no process is left."""
    deadlines = {name: values.pop(name) for name in list(values) if name.endswith("_seconds")}

    async def main():
        pool = ProcessEnvironments(domains or {TROUBLE: {}}, ProcessSettings(**values), **deadlines)
        try:
            async with asyncio.timeout(30):
                return await story(pool)
        finally:
            await pool.close()
            assert pool.stats().live == 0

    return asyncio.run(main())


def text(observation: Observation) -> str:
    return observation.messages[0].content


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # a zombie that its new parent has not reaped yet is dead
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except ProcessLookupError:  # it went between opening and reading
        return False
    except FileNotFoundError:
        return not os.path.isdir("/proc")


async def until_dead(*pids: int) -> None:
    async with asyncio.timeout(5):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.01)


async def pid_of(environment) -> int:
    return int(text(await environment.first()))


def test_one_hung_environment_of_16_does_not_slow_the_others_and_its_error_names_it():
    async def story(pool):
        environments = await asyncio.gather(*(pool.open(trouble_task(f"t{i}")) for i in range(16)))

        async def episode(i):
            begin = time.monotonic()
            for turn in range(5):
                await environments[i].step(Action("hang" if (i, turn) == (7, 2) else f"turn {turn}"))
            return time.monotonic() - begin

        results = await asyncio.gather(*(episode(i) for i in range(16)), return_exceptions=True)
        hung = results.pop(7)
        assert isinstance(hung, EnvironmentFailed)
        assert str(hung) == "t7: step in domain troublesome:Trouble: no answer within 2 s, its process was killed"
        assert max(results) < 1.5
        for environment in environments:
            await environment.close()
        stats = pool.stats()
        assert (stats.opened, stats.failed, stats.killed, stats.idle) == (16, 1, 1, 15)

    run(story, call_seconds=2)


@pytest.mark.parametrize(("action", "says"), [
    ("exit 3", "ended with code 3"),
    ("raise x", "KeyError: 'x'"),
    ("eat 900", "MemoryError"),
    ("long 3000000", "above the limit of 2000000"),
    ("object", "TypeError: Object of type object is not JSON serializable"),
    ("nothing", "TypeError: step must give an Observation; got None"),
    ("says 'wizard', 'x'", "TypeError: step must give messages of system, user, assistant, tool with a text"),
    ("says 'user', 5", "TypeError: step must give messages of .* with a text"),
    ("ends 'no'", "TypeError: step must give done .* as true or false .*'no'"),
    ("pays '1'", "TypeError: step must give .* a finite reward; .*'1'"),
    ("pays 1e300", "TypeError: step must give .* a finite reward; .*1e.300"),
    ("pays 10**400", "TypeError: step must give .* a finite reward; .*1000"),
    ("facts 'count', __import__('numpy').int64(3)", "TypeError: Object of type int64 is not JSON serializable"),
    ("facts 'score', float('nan')", "ValueError: Out of range float values are not JSON compliant"),
    ("facts 'deep', __import__('json').loads('[' * 900 + ']' * 900)", "its answer cannot be read: it is nested more"),
    ("pays float('nan')", "TypeError: step must give .* a finite reward; .*nan"),
])
def test_a_failing_environment_is_one_error_and_its_process_is_not_used_again(action, says):
    async def story(pool):
        environment = await pool.open(trouble_task())
        pid = await pid_of(environment)
        with pytest.raises(EnvironmentFailed, match=says):
            await environment.step(Action(action))
        with pytest.raises(EnvironmentFailed, match="has failed before"):
            await environment.step(Action("again"))
        await environment.close()
        await until_dead(pid)
        other = await pool.open(trouble_task())
        assert await pid_of(other) != pid
        assert text(await other.step(Action("hello"))) == "hello"
        await other.close()

    run(story, memory_mb=200, message_mb=2)


def test_text_that_cannot_be_encoded_is_replaced():
    """An agent can bring it into an observation: its call's JSON has any character."""
    async def story(pool):
        environment = await pool.open(trouble_task())
        assert text(await environment.step(Action("says 'tool', 'a\\ud800b'"))) == "a?b"
        assert (await environment.step(Action("facts 'why', 'a\\ud800b'"))).facts == {"why": "a?b"}
        await environment.close()

    run(story)


def test_a_process_is_reused_after_a_clean_close_and_idle_ones_are_limited():
    async def story(pool):
        first, second = [await pool.open(trouble_task()) for _ in range(2)]
        pids = [await pid_of(first), await pid_of(second)]
        await first.close()
        await second.close()
        await until_dead(pids[1])
        again = await pool.open(trouble_task())
        assert await pid_of(again) == pids[0]
        await again.close()

    run(story, idle_processes=1)


def test_global_random_numbers_depend_on_the_task_only():
    async def story(pool):
        alone = await pool.open(trouble_task("a"))
        expected = [text(await alone.step(Action("random"))) for _ in range(3)]
        await alone.close()  # its process, with its random state, serves the next
        one, two, other = [await pool.open(trouble_task(id)) for id in ("a", "a", "b")]
        mixed = []
        for _ in range(3):
            mixed.append(text(await one.step(Action("random"))))
            assert text(await other.step(Action("random"))) not in expected
        assert mixed == expected
        assert [text(await two.step(Action("random"))) for _ in range(3)] == expected

    run(story)


def test_a_cancelled_open_or_step_leaves_no_process():
    async def story(pool):
        warm = await pool.open(trouble_task())  # the fork server is up
        opening = asyncio.create_task(pool.open(trouble_task(open="hang")))
        await asyncio.sleep(0.2)
        assert pool.stats().live == 2
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        pid = await pid_of(warm)
        step = asyncio.create_task(warm.step(Action("hang")))
        await asyncio.sleep(0.05)
        step.cancel()
        await asyncio.wait([step])
        await warm.close()
        await until_dead(pid)
        async with asyncio.timeout(5):
            while pool.stats().live:
                await asyncio.sleep(0.01)

    run(story)


def test_what_an_environment_started_dies_with_it():
    async def story(pool):
        environment = await pool.open(trouble_task())
        child = int(text(await environment.step(Action("child"))))
        assert alive(child)
        with pytest.raises(EnvironmentFailed):
            await environment.step(Action("exit 1"))
        await environment.close()
        await until_dead(child)

    run(story)


def test_open_waits_for_a_free_process_until_its_deadline():
    async def story(pool):
        first = await pool.open(trouble_task("t1"))
        with pytest.raises(EnvironmentFailed, match=r"t2: open in domain troublesome:Trouble: none of 1 processes was "
                                                    r"free within 0.2 s: allow more \(max_processes\)"):
            await pool.open(trouble_task("t2"))
        waiting = asyncio.create_task(pool.open(trouble_task("t3")))
        await asyncio.sleep(0.05)
        await first.close()
        await (await waiting).close()

    run(story, max_processes=1, wait_seconds=0.2)


def test_a_failed_opening_says_why_and_the_next_one_works(tmp_path):
    flag = tmp_path / "fails"
    flag.touch()

    async def story(pool):
        with pytest.raises(EnvironmentFailed, match="t: open in domain troublesome:Trouble: OSError: not yet"):
            await pool.open(trouble_task())
        await (await pool.open(trouble_task())).close()
        assert pool.stats().failed == 1

    run(story, domains={TROUBLE: {"open_fails": str(flag)}})


def test_workers_die_when_the_fork_server_is_killed_and_the_next_open_starts_another():
    async def story(pool):
        environment = await pool.open(trouble_task())
        pid = await pid_of(environment)
        step = asyncio.create_task(environment.step(Action("hang")))
        await asyncio.sleep(0.05)
        os.kill(pool._workers._server.pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match="its process ended with its fork server"):
            await step
        await environment.close()
        await until_dead(pid)
        again = await pool.open(trouble_task())
        assert text(await again.step(Action("x"))) == "x"

    run(story)


def test_an_interrupt_is_left_to_the_main_process():
    async def story(pool):
        environment = await pool.open(trouble_task())
        for pid in (await pid_of(environment), pool._workers._server.pid):
            os.kill(pid, signal.SIGINT)
        assert text(await environment.step(Action("x"))) == "x"
        await (await pool.open(trouble_task())).close()
        await environment.close()
        assert pool.stats().failed == 0

    run(story)


def test_no_process_outlives_a_killed_main_process(tmp_path):
    """The fork server sees the end of file, and kills a hung worker too."""
    script = tmp_path / "main.py"
    script.write_text(
        "import asyncio, os, signal, sys\n"
        "from rollart.backends.process.environments import *\n"
        "from troublesome import trouble_task\n"
        "async def main():\n"
        "    pool = ProcessEnvironments({'troublesome:Trouble': {}}, ProcessSettings())\n"
        "    environment = await pool.open(trouble_task())\n"
        "    print((await environment.first()).messages[0].content, pool._workers._server.pid, flush=True)\n"
        "    asyncio.create_task(environment.step(Action('hang')))\n"
        "    await asyncio.sleep(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n")

    async def story():
        here = os.path.dirname(os.path.abspath(__file__))
        process = await asyncio.create_subprocess_exec(
            os.sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": here})
        line = await process.stdout.readline()
        await process.wait()
        await until_dead(*map(int, line.split()))

    asyncio.run(story())


@pytest.mark.parametrize("name", sorted(DOMAINS))
def test_a_domain_plays_the_same_in_a_process_as_here(name):
    try:
        domain = make_domain(name)
    except ConfigError as refused:
        if "needs a sandbox" not in str(refused):
            raise
        pytest.skip(str(refused))

    async def story(pool):
        task = domain.task(3, "eval")
        here = domain.open(task)
        environment = await pool.open(task)
        player = domain.player(task, 0, 0.3)
        there = await environment.first()
        assert there == here.first()
        while not there.done:
            action = Action(player.act(there))
            there = await environment.step(action)
            assert there == here.step(action)
        here.close()
        await environment.close()

    run(story, domains={name: {}})


def slow(*ids, seconds=0.4):
    return [trouble_task(id, open_seconds=seconds) for id in ids]


async def opened(pool, task):
    begin = time.monotonic()
    return await pool.open(task), time.monotonic() - begin


def test_what_comes_next_is_opened_while_the_present_runs_and_used_once_by_its_own_task():
    async def story(pool):
        left = slow("a", "b", "b", "c")
        pool.upcoming = lambda: iter(left)
        _, waited = await opened(pool, left.pop(0))
        assert waited > 0.4
        ready = [opening for opening, _ in pool._ahead["b"]]
        await asyncio.wait(ready)
        pids = set()
        for opening in ready:
            environment = await pool.open(left.pop(0))
            assert environment is opening.result()
            pids.add(await pid_of(environment))
        assert len(pids) == 2
        _, waited = await opened(pool, trouble_task("b", open_seconds=0.4))  # one more than was foreseen
        assert waited > 0.4
        for _ in range(2):
            await environment.step(Action("turn"))
        await environment.close()
        stats = pool.stats()
        assert (stats.ahead, stats.failed) == (2, 0)
        assert stats.live <= 4 + 2

    run(story, max_processes=4, preopen=2)


def test_what_was_foreseen_wrongly_or_failed_ahead_costs_no_more_than_opening_anew(tmp_path):
    flag = tmp_path / "fails"
    flag.touch()

    async def story(pool):
        pool.upcoming = lambda: iter([trouble_task("x")])
        pool._open_ahead()
        while flag.exists():  # it is tried, and fails
            await asyncio.sleep(0.01)
        environment = await pool.open(trouble_task("x"))
        assert pool.stats().ahead == 0
        await environment.close()
        pool._open_ahead()
        await asyncio.sleep(0.3)
        ahead = (await pool._ahead["x"][0][0])._first
        os.kill(int(text(ahead)), signal.SIGKILL)
        await until_dead(int(text(ahead)))
        await asyncio.sleep(0.2)
        environment = await pool.open(trouble_task("x"))
        assert text(await environment.first()) != text(ahead)

    run(story, domains={TROUBLE: {"open_fails": str(flag)}}, preopen=1)


def test_a_cancelled_or_forgotten_opening_ahead_leaves_no_process(monkeypatch):
    monkeypatch.setattr("rollart.backends.process.environments._AHEAD_SECONDS", 0.2)

    async def story(pool):
        pool.upcoming = lambda: iter(slow("x", "y", seconds=60))
        pool._open_ahead()
        asking = asyncio.create_task(pool.open(slow("x")[0]))
        await asyncio.sleep(0.3)
        asking.cancel()
        await asyncio.wait([asking])
        pool.upcoming = lambda: iter(())
        await asyncio.sleep(0.3)
        pool._open_ahead()
        async with asyncio.timeout(5):
            while pool.stats().live:
                await asyncio.sleep(0.01)
        assert not pool._ahead

    run(story, preopen=2)


def test_an_unknown_domain_is_refused():
    async def story(pool):
        with pytest.raises(EnvironmentFailed, match=r"no domain .troublesome:Trouble."):
            await pool.open(trouble_task())

    run(story, domains={"guess": {}})
    with pytest.raises(ConfigError, match="did you mean 'guess'"):
        ProcessEnvironments({"gues": {}}, ProcessSettings())


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="memory_mb must be above 0; got 0"):
        ProcessSettings(memory_mb=0)
    with pytest.raises(ValueError, match="max_processes must be at least 0; got -1"):
        ProcessSettings(max_processes=-1)


def test_a_burst_of_openings_beyond_the_socket_buffer_is_served():
    async def story(pool):
        await (await pool.open(trouble_task())).close()
        os.kill(pool._workers._server.pid, signal.SIGSTOP)
        opening = [asyncio.create_task(pool.open(trouble_task(f"t{i}"))) for i in range(300)]
        await asyncio.sleep(0.3)
        for task in opening[20:]:
            task.cancel()
        await asyncio.sleep(0.1)
        os.kill(pool._workers._server.pid, signal.SIGCONT)
        for environment in await asyncio.gather(*opening[:20]):
            assert text(await environment.step(Action("x"))) == "x"
            await environment.close()
        assert pool.stats().failed == 0

    run(story, max_processes=300)
