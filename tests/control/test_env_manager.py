"""One episode: exact ids, deadlines, failures, and an environment that is closed exactly once."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from fakes import FOREVER, STOP, FakeEngine, FakePool, FakeRenderer, FakeScorer, Log, hang, task

from rollart.algo.samples import make_batch
from rollart.algo.settings import AlgoSettings
from rollart.control.env_manager import EnvManager, Services
from rollart.control.llm_proxy import LLMProxy
from rollart.control.settings import RolloutSettings
from rollart.core.changed import Changed
from rollart.core.clock import now
from rollart.core.errors import ConfigError, EnvironmentFailed
from rollart.core.events import EnvironmentClosed, EnvironmentOpened, TurnEnded
from rollart.core.tokens import ids
from rollart.core.types import Finish, Group, Manifest, Message, Observation, Outcome, Task, Trajectory, TrajectoryId
from rollart.sim.loop import run_virtual

ID = TrajectoryId(3, 1)


class Episode:
    """One episode over fakes; `settings` are RolloutSettings. Make it inside the loop."""

    def __init__(self, *, pool: FakePool | None = None, scorer: FakeScorer | None = None,
                 engine: FakeEngine | None = None, playing: Task | None = None, renderer: Any = None, seed: int = 0,
                 **settings: Any) -> None:
        self.log, self.pool, self.scorer = Log(), pool or FakePool(), scorer or FakeScorer()
        self.engine = engine or FakeEngine()
        self.proxy = LLMProxy([self.engine], {}, journal=self.log, changed=Changed())
        self.heard: list[int | None] = []
        services = Services(proxy=self.proxy, environments=self.pool, renderer=renderer or FakeRenderer(),
                            scorer=self.scorer, journal=self.log, settings=RolloutSettings(**settings), seed=seed)
        self.manager = EnvManager(ID, playing or task(), services, lambda manager: self.heard.append(manager.oldest))

    async def start(self) -> None:
        await self.proxy.update(Manifest(7, ""))

    async def run(self) -> Trajectory:
        await self.start()
        result = await self.manager.run()
        self.check_clean()
        return result

    def check_clean(self) -> None:
        """Whatever happened, nothing of it is left."""
        self.pool.check_closed()
        assert len(self.log.of(EnvironmentClosed)) == len(self.log.of(EnvironmentOpened)) == len(self.pool.made)
        assert self.proxy.routing.seats[self.engine.id].load == 0
        assert self.engine.running == 0


def play(**parts: Any) -> tuple[Episode, Trajectory]:
    episodes: list[Episode] = []

    async def main() -> Trajectory:
        episodes.append(Episode(**parts))
        return await episodes[0].run()

    result = run_virtual(main(), time_limit=10 * FOREVER)
    return episodes[0], result


# -- the story that goes well ----------------------------------------------------------------------------------------


def test_t1_the_prompt_of_turn_n_plus_1_is_that_of_turn_n_the_sampled_ids_and_the_reply() -> None:
    e, t = play(pool=FakePool(turns=4))
    assert len(t.turns) == 4
    requests = e.engine.requests
    for before, turn, after in zip(requests, t.turns, requests[1:], strict=False):
        assert list(after.context) == [*before.context, *turn.completion.tokens, *turn.reply]
    assert list(requests[0].context) == list(t.prompt) == [1, 2, 3]
    assert list(t.turns[0].completion.tokens) == [103, 104, STOP]
    assert [list(turn.reply) for turn in t.turns] == [[7, 8]] * 3 + [[]]
    assert t.length == len(requests[-1].context) + len(t.turns[-1].completion.tokens)
    assert len({r.seed for r in requests}) == 4


def test_an_episode_ends_scored_with_its_times_by_stage() -> None:
    e, t = play()
    assert (t.outcome, t.score is not None, t.error, t.good) == (Outcome.FINISHED, True, "", True)
    assert t.seconds == {"open": 1.0, "environment": 3.0, "generate": 6.0, "score": 1.0}
    assert t.oldest == t.newest == 7
    assert e.heard == [7, 7]
    assert [x.turn for x in e.log.of(TurnEnded)] == [0, 1]
    assert e.scorer.scored == [ID]
    assert e.manager.stage == "ended"
    assert e.engine.released == [ID]


def test_the_environment_is_closed_before_the_reward_is_asked_for() -> None:
    closed: list[int] = []
    pool = FakePool()
    play(pool=pool, scorer=FakeScorer(trouble=lambda _: closed.append(sum(pool.closed.values())) or ""))
    assert closed == [1]


def test_a_length_cut_completion_gets_no_stop_token_and_says_so_to_the_environment() -> None:
    e, t = play(engine=FakeEngine(tokens=9, finish=Finish.LENGTH), playing=task(max_tokens=4))
    assert t.outcome is Outcome.FINISHED
    for turn in t.turns:
        assert turn.completion.finish is Finish.LENGTH
        assert len(turn.completion.tokens) == 4
        assert STOP not in turn.completion.tokens
    assert [a.truncated for a in e.pool.made[0].actions] == [True, True]
    assert list(t.turns[0].reply) == [7, 8, 9]  # the renderer closes the cut turn; the mask there is 0
    _, stopped = play()
    assert [turn.completion.finish for turn in stopped.turns] == [Finish.STOP] * 2


def test_the_limit_on_turns_truncates_and_leaves_no_reply_behind() -> None:
    e, t = play(pool=FakePool(turns=9), playing=task(max_turns=3))
    assert (t.outcome, len(t.turns), t.good) == (Outcome.TRUNCATED, 3, True)
    assert not len(t.turns[-1].reply)
    assert len(e.engine.requests) == 3


def test_t1_a_rewritten_history_is_the_next_context_and_forks_the_trajectory() -> None:
    class Rewriting(FakeRenderer):
        seen: ClassVar[list[list[str]]] = []

        def fork(self, history: Any, context: Any) -> Any:
            self.seen.append([message.role for message in history])
            return ids([1, 2, 9, 9]) if len(self.seen) == 1 else None

    e, t = play(pool=FakePool(turns=3), renderer=Rewriting())
    assert [list(r.context)[:4] for r in e.engine.requests] == [[1, 2, 3], [1, 2, 9, 9], [1, 2, 9, 9]]
    assert [None if turn.fork is None else list(turn.fork) for turn in t.turns] == [[1, 2, 9, 9], None, None]
    assert not len(t.turns[0].reply)
    assert Rewriting.seen[1] == ["user", "assistant", "user", "assistant", "user"]
    assert t.length == len(t.prompt) + 4 + t.sampled + len(t.turns[1].reply)


def test_only_the_last_turn_before_a_fork_or_the_end_keeps_the_experts_that_were_taken() -> None:
    class Mixture(FakeEngine):
        async def generate(self, request: Any) -> Any:
            return replace(await super().generate(request), routes=bytes(len(request.context)))

    _, t = play(pool=FakePool(turns=3), engine=Mixture())
    assert [bool(turn.completion.routes) for turn in t.turns] == [False, False, True]


def test_a_prompt_too_long_for_the_context_ends_the_episode_as_truncated_and_says_so() -> None:
    e, t = play(playing=task(max_tokens=10), context_tokens=12)
    assert (t.outcome, len(t.turns), e.engine.requests) == (Outcome.TRUNCATED, 0, [])
    assert t.error == "the prompt left no room for an action in 12 tokens"
    made = make_batch(7, [Group(3, t.task, 7, (t,))], AlgoSettings())
    assert made.filtered == ((ID, t.error),)
    _, later = play(playing=task(max_tokens=10), context_tokens=14)
    assert (later.outcome, len(later.turns)) == (Outcome.TRUNCATED, 1)
    assert later.error == "the context left no room for an action in 14 tokens"


def test_the_environments_own_limit_truncates() -> None:
    pool = FakePool()

    async def step(action: object) -> Observation:
        return Observation((Message("user", "too late"),), done=True, truncated=True)

    made = pool.open

    async def opened(t: Task) -> Any:
        environment = await made(t)
        environment.step = step
        return environment

    pool.open = opened  # type: ignore[method-assign]
    _, t = play(pool=pool)
    assert (t.outcome, len(t.turns)) == (Outcome.TRUNCATED, 1)


@pytest.mark.parametrize(("limit", "turns"), [(3 + 4, 1), (3 + 3 + 2 + 3, 1), (3 + 3 + 2 + 4, 2), (6, 0)])
def test_the_context_limit_truncates_before_a_turn_that_might_not_fit(limit: int, turns: int) -> None:
    """Prompt 3, then 3 sampled + 2 of reply a turn; a turn may sample 4."""
    e, t = play(pool=FakePool(turns=9), playing=task(max_tokens=4), context_tokens=limit)
    assert (t.outcome, len(t.turns)) == (Outcome.TRUNCATED, turns)
    assert all(len(r.context) + r.max_tokens <= limit for r in e.engine.requests)


# -- what goes wrong -------------------------------------------------------------------------------------------------


def stuck(stage: str) -> dict[str, Any]:
    """Parts of an episode in which one stage never answers."""
    if stage == "score":
        return {"scorer": FakeScorer(trouble=lambda _: "hang")}
    if stage == "generate":
        return {"engine": FakeEngine(token_s=FOREVER)}
    return {"pool": FakePool(trouble=lambda at, _: "hang" if at == stage else "")}


@pytest.mark.parametrize(("at", "stage", "key", "error"), [
    ("open", "open", "open_seconds", "EnvironmentFailed"), ("first", "environment", "environment_seconds",
                                                            "EnvironmentFailed"),
    ("step", "environment", "environment_seconds", "EnvironmentFailed"),
    ("generate", "generate", "generate_seconds", "EngineLost"), ("score", "score", "score_seconds", "ScorerFailed"),
])
def test_i7_each_stage_has_a_deadline_whose_error_names_trajectory_task_stage_and_age(
        at: str, stage: str, key: str, error: str) -> None:
    _, t = play(**stuck(at), **{key: 20.0}, open_attempts=1)
    assert (t.outcome, t.score, t.good) == (Outcome.FAILED, None, False)
    assert re.match(rf"{error}: g3\.1 \(game/0\) after \d sampled turns: {stage} gave no answer within 20 s; "
                    r"the trajectory is \d+ s old", t.error)
    assert t.seconds[stage] >= 20.0


def test_a_close_that_hangs_is_left_behind_at_its_deadline_and_costs_nothing_else() -> None:
    e, t = play(**stuck("close"), close_seconds=5.0)
    assert t.outcome is Outcome.FINISHED
    assert e.log.times(EnvironmentClosed) == [e.log.times(TurnEnded)[-1] + 1.0 + 5.0]  # its step, the deadline


def test_all_stages_together_have_the_episodes_budget() -> None:
    _, t = play(pool=FakePool(turns=99, step_s=30.0), playing=task(max_turns=99), episode_seconds=100.0)
    assert t.outcome is Outcome.FAILED
    assert sum(t.seconds.values()) == pytest.approx(100.0)
    assert "game/0" in t.error


def test_the_error_of_a_used_up_budget_names_the_budget() -> None:
    _, t = play(episode_seconds=10.5)  # its turns need 10 s, its score 1
    assert (t.outcome, t.score) == (Outcome.FAILED, None)
    assert "episode_seconds" in t.error
    assert "score" in t.error


def test_opening_is_tried_again_with_growing_jittered_waits() -> None:
    at: list[float] = []

    def fails(stage: str, number: int) -> str:
        if stage == "open":
            at.append(now())
        return "fail" if stage == "open" and number < 3 else ""

    e, t = play(pool=FakePool(trouble=fails), open_attempts=4, open_backoff_seconds=2.0)
    assert t.outcome is Outcome.FINISHED
    assert e.log.of(EnvironmentOpened)[0].attempts == 4
    waits = [b - a for a, b in itertools.pairwise(at)]
    assert all(0.5 * 2.0 * 2**n <= wait <= 1.5 * 2.0 * 2**n for n, wait in enumerate(waits))
    assert len(set(waits)) == 3


def test_an_environment_that_never_opens_fails_after_its_attempts_without_a_score() -> None:
    e, t = play(pool=FakePool(trouble=lambda stage, _: "fail" if stage == "open" else ""), open_attempts=3)
    assert (t.outcome, t.score) == (Outcome.FAILED, None)
    assert t.error == "EnvironmentFailed: environment 2 broke in open"
    assert e.pool.calls == 3
    assert not e.engine.requests


@pytest.mark.parametrize("stage", ["first", "step"])
def test_a_broken_environment_is_a_failed_trajectory_with_its_error(stage: str) -> None:
    e, t = play(pool=FakePool(trouble=lambda at, _: "fail" if at == stage else ""))
    assert (t.outcome, t.score, t.error) == (Outcome.FAILED, None, f"EnvironmentFailed: environment 0 broke in {stage}")
    assert not e.scorer.scored


def test_a5_s3_a_failed_scorer_is_no_reward_of_0() -> None:
    _, t = play(scorer=FakeScorer(trouble=lambda _: "fail"))
    assert (t.outcome, t.score, t.good) == (Outcome.FAILED, None, False)
    assert t.error == "ScorerFailed: g3.1: answered 503"
    assert len(t.turns) == 2


@pytest.mark.parametrize("error", [KeyError("a bug of ours"), AssertionError("another")])
def test_a_bug_is_not_a_failed_trajectory_and_still_closes_the_environment(error: Exception) -> None:
    class Broken:
        stop = ()

        def prompt(self, messages: object) -> object:
            raise error

    async def main() -> None:
        e = Episode(renderer=Broken())
        await e.start()
        with pytest.raises(type(error)):
            await e.manager.run()
        e.check_clean()

    run_virtual(main())


def test_tokens_of_a_turn_whose_environment_fails_are_told() -> None:
    e, t = play(pool=FakePool(trouble=lambda at, _: "fail" if at == "step" else ""))
    assert [(x.turn, x.sampled) for x in e.log.of(TurnEnded)] == [(0, 3)]
    assert t.sampled == 3


# -- cancellation ----------------------------------------------------------------------------------------------------


async def cancel_at(make: Callable[[], Episode], *times: float) -> Episode:
    e = make()
    await e.start()
    running = asyncio.create_task(e.manager.run())
    for at in times:
        asyncio.get_running_loop().call_later(at, running.cancel)
    await asyncio.wait([running])
    e.check_clean()
    if not running.cancelled():
        assert running.result().good
    return e


def test_i3_cancelled_at_any_moment_the_environment_is_closed_exactly_once() -> None:
    """The whole episode takes 12 s with a wait every half second at most."""
    ended = 0
    for at in range(60):
        e = run_virtual(cancel_at(Episode, at * 0.25))
        ended += bool(e.scorer.scored)
    assert 0 < ended < 60


def test_i3_cancelled_twice_at_any_moments_the_environment_is_closed_exactly_once() -> None:
    for at in range(0, 27, 2):
        for again in (0.0, 0.5, 0.99, 1.0, 1.5):
            run_virtual(cancel_at(Episode, at * 0.5, at * 0.5 + again))


def test_i3_cancelled_on_either_side_of_every_instant_at_which_something_happens() -> None:
    """Cancelled at the very instant of a wake-up, before and after it is delivered."""
    for at in range(13):
        for shift in (-1e-9, 0.0, 1e-9):
            run_virtual(cancel_at(Episode, max(0.0, at + shift)))


def test_i3_cancelled_while_every_call_is_stuck() -> None:
    for stage in ("open", "first", "step", "generate", "score"):
        run_virtual(cancel_at(lambda stage=stage: Episode(**stuck(stage)), 15.0, 15.5))  # type: ignore[misc]


def test_i3_cancelled_while_a_close_hangs_ends_at_the_closes_deadline() -> None:
    async def main() -> None:
        await cancel_at(lambda: Episode(**stuck("close"), close_seconds=4.0), 5.0, 6.0, 7.0)
        assert now() == 2.0 + 5.0 + 4.0  # weights, cancel, close

    run_virtual(main())


def test_i3_cancelled_at_each_await_of_an_episode_that_fails_to_open_at_first() -> None:
    def make() -> Episode:
        return Episode(pool=FakePool(trouble=lambda stage, n: "fail" if stage == "open" and n < 2 else ""))

    for at in range(40):
        run_virtual(cancel_at(make, at * 0.25))


def test_cancelled_in_the_middle_of_an_update_the_seat_is_free() -> None:
    async def main() -> None:
        e = Episode()
        await e.start()
        running = asyncio.create_task(e.manager.run())
        await asyncio.sleep(3.0)
        updating = asyncio.create_task(e.proxy.update(Manifest(8, "")))
        await asyncio.sleep(0.5)
        running.cancel()
        await asyncio.wait([running])
        await updating
        e.check_clean()

    run_virtual(main())


def test_what_there_is_so_far_can_be_told_of_a_cancelled_episode() -> None:
    async def main() -> None:
        e = Episode()
        e.scorer.score = lambda trajectory: hang()  # type: ignore[method-assign, assignment]
        await e.start()
        running = asyncio.create_task(e.manager.run())
        await asyncio.sleep(20.0)
        assert (e.manager.stage, now() - e.manager.since) == ("score", 9.0)
        running.cancel()
        await asyncio.wait([running])
        t = e.manager.trajectory(Outcome.ABORTED, error="spare")
        assert (len(t.turns), t.sampled, t.score, t.good) == (2, 6, None, False)

    run_virtual(main())


class Picky(FakeRenderer):
    """A chat that refuses at one stage, with an error."""

    def __init__(self, stage: str, error: Exception) -> None:
        def refuse(*_: object) -> None:
            raise error

        setattr(self, stage, refuse)


@pytest.mark.parametrize("stage", ["prompt", "text", "reply", "fork"])
@pytest.mark.parametrize(("error", "told"), [
    (ConfigError("the chat template refuses the roles user, tool"),
     "ConfigError: the chat template refuses the roles user, tool"),
    (UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed"),
     "ConfigError: the chat cannot say what this trajectory holds: 'utf-8' codec can't encode character '\\ud83d'")])
def test_what_the_chat_cannot_say_costs_this_trajectory_and_not_the_run(stage: str, error: Exception,
                                                                        told: str) -> None:
    e, t = play(renderer=Picky(stage, error))
    assert (t.outcome, t.score) == (Outcome.FAILED, None)
    assert t.error.startswith(told)
    assert not e.scorer.scored


def test_first_messages_that_make_no_token_are_a_failed_trajectory() -> None:
    class Silent(FakeRenderer):
        def prompt(self, messages: Any) -> Any:
            return ids()

    e, t = play(renderer=Silent())
    assert (t.outcome, t.error[:50]) == (Outcome.FAILED, "ConfigError: the chat makes no token of the first ")
    assert not e.engine.requests


def test_an_error_s_text_can_be_stored_whatever_it_holds() -> None:
    class Odd(FakePool):
        async def open(self, task: Task) -> Any:
            raise EnvironmentFailed("half \ud83d pair")

    _, t = play(pool=Odd(), open_attempts=1)
    assert t.error == "EnvironmentFailed: half ? pair"
