"""The proxy: turns survive their engine, nothing starts while suspended, versions never go back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes import FOREVER, FakeEngine, Log, hang

from rollart.control.llm_proxy import LLMProxy, merge
from rollart.core.changed import Changed
from rollart.core.clock import now
from rollart.core.errors import EngineLost, InvariantViolated
from rollart.core.events import EngineDown, EngineUp, TurnMoved, WeightsLive, WeightsLoaded
from rollart.core.tokens import Counted, floats, ids
from rollart.core.types import Completion, Finish, GenerateRequest, Manifest, TrajectoryId
from rollart.sim.loop import run_virtual


def proxy(engines: Sequence[FakeEngine], **settings: Any) -> tuple[LLMProxy, Log]:
    log = Log()
    return LLMProxy(engines, {}, journal=log, changed=Changed(), **settings), log


def weights(version: int) -> Manifest:
    return Manifest(version, f"fake://{version}")


def ask(member: int = 0, *, turn: int = 0, max_tokens: int = 16) -> GenerateRequest:
    return GenerateRequest(TrajectoryId(1, member), turn, "game", ids([1, 2, 3]), max_tokens, seed=11)


def piece(tokens: Sequence[int], segments: tuple[tuple[int, int], ...], engine: str = "e0") -> Completion:
    return Completion(ids(tokens), floats(-t for t in tokens), segments, Finish.LENGTH, engine)


# -- merge -----------------------------------------------------------------------------------------------------------


def test_t5_a_turn_begun_at_7_and_ended_at_8_has_versions_7x4_8x3() -> None:
    whole = merge([piece([1, 2, 3, 4], ((7, 0),)), piece([5, 6, 7], ((8, 0),), "e1")])
    assert whole.segments == ((7, 0), (8, 4))
    assert list(whole.versions()) == [7] * 4 + [8] * 3
    assert list(whole.tokens) == [1, 2, 3, 4, 5, 6, 7]
    assert list(whole.logprobs) == [-1, -2, -3, -4, -5, -6, -7]
    assert whole.engine == "e1"


def test_merge_joins_equal_versions_at_the_border_and_keeps_those_inside() -> None:
    parts = [piece([1, 2], ((3, 0), (4, 1))), piece([3, 4, 5], ((4, 0), (5, 2))), piece([6], ((5, 0),))]
    whole = merge(parts)
    assert whole.segments == ((3, 0), (4, 1), (5, 4))
    assert list(whole.versions()) == [v for part in parts for v in part.versions()]


def test_merge_keeps_the_experts_of_the_last_piece_which_cover_the_whole_context() -> None:
    parts = [replace(piece([1], ((1, 0),)), routes=b"old"), replace(piece([2], ((1, 0),)), routes=b"old and new")]
    assert merge(parts).routes == b"old and new"


def test_merge_counts_simulated_tokens() -> None:
    part = Completion(Counted(3), floats(), ((1, 0),), Finish.STOP, "e0")
    assert merge([part, part]).tokens == Counted(6)


# -- turns -----------------------------------------------------------------------------------------------------------


def test_a_turn_whose_engine_dies_goes_on_elsewhere_from_its_tokens_with_versions_and_logprobs_aligned() -> None:
    async def main() -> None:
        a, b = FakeEngine("a", tokens=8), FakeEngine("b", tokens=8)
        p, log = proxy([a, b])
        await p.update(weights(7))
        asyncio.get_running_loop().call_later(4.5, a.crash)  # 4 tokens are sampled
        b.version = 8
        whole = await p.generate(ask(max_tokens=10))
        first, second = a.requests[0], b.requests[0]
        assert list(second.context) == [*first.context, *whole.tokens[:4]]
        assert (first.max_tokens, second.max_tokens) == (10, 6)
        assert first.seed != second.seed
        assert len(whole.tokens) == len(whole.logprobs) == 4 + 6
        assert [-t / 1024 for t in whole.tokens[:-1]] == list(whole.logprobs[:-1])
        assert list(whole.versions()) == [7] * 4 + [8] * 6
        assert [(e.engine, e.kept) for e in log.of(TurnMoved)] == [("a", 4)]
        assert p.moved == 1
        assert [e.engine for e in log.of(EngineDown)] == ["a"]
        assert p.routing.seats["a"].load == 0

    run_virtual(main())


def test_a_turn_that_lost_its_engine_with_its_last_token_is_whole() -> None:
    async def main() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        p, _ = proxy([a, b])
        await p.update(weights(1))

        async def dies(request: GenerateRequest) -> Completion:
            raise EngineLost("a died", piece([1, 2, 3], ((1, 0),)))

        a.generate = dies  # type: ignore[method-assign]
        whole = await p.generate(ask(max_tokens=3))
        assert list(whole.tokens) == [1, 2, 3]
        assert whole.finish is Finish.LENGTH
        assert not b.requests

    run_virtual(main())


def test_a_turn_that_lost_its_engine_before_the_first_token_begins_again() -> None:
    async def main() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        p, log = proxy([a, b])
        await p.update(weights(1))
        a.crash()
        whole = await p.generate(ask())
        assert (whole.engine, whole.segments) == ("b", ((1, 0),))
        assert list(b.requests[0].context) == [1, 2, 3]
        assert b.requests[0].max_tokens == 16
        assert log.of(TurnMoved)[0].kept == 0

    run_virtual(main())


def test_a_turn_gives_up_after_its_attempts_and_says_how_many_and_why() -> None:
    async def main() -> None:
        engines = [FakeEngine(f"e{i}") for i in range(4)]
        p, log = proxy(engines, attempts=3)
        await p.update(weights(1))
        for engine in engines[:3]:
            engine.crash()
        with pytest.raises(EngineLost, match=r"g1.0 turn 2: lost 3 engines one after another, the last: e2 is down"):
            await p.generate(ask(turn=2))
        assert not engines[3].requests
        assert len(log.of(TurnMoved)) == 3
        assert all(seat.load == 0 for seat in p.routing.seats.values())

    run_virtual(main())


def test_a_turn_waits_for_an_engine_that_serves_and_its_deadline_names_it() -> None:
    async def main() -> None:
        a = FakeEngine("a")
        p, _ = proxy([a], wait_seconds=30.0)
        with pytest.raises(EngineLost, match=r"turn 0 of g1.0 waited 30 s for an engine that serves"):
            await p.generate(ask())
        turn = asyncio.create_task(p.generate(ask()))
        await asyncio.sleep(10.0)
        await p.update(weights(0))
        assert (await turn).engine == "a"

    run_virtual(main())


def test_while_suspended_no_turn_starts_and_those_in_flight_are_kept() -> None:
    async def main() -> None:
        a, b = FakeEngine("a", tokens=4, load_s=1.0), FakeEngine("b", tokens=4, load_s=20.0)
        p, log = proxy([a, b])
        await p.update(weights(1))
        start = now()
        early = asyncio.create_task(p.generate(ask(0)))
        await asyncio.sleep(2.5)
        update = asyncio.create_task(p.update(weights(2)))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(p.generate(ask(1)))
        await asyncio.sleep(15.0)
        assert len(a.requests) + len(b.requests) == 1  # a is ready, but b still loads
        await update
        live = now()
        assert live == start + 2.5 + 20.0
        assert list((await early).versions()) == [1, 1, 2, 2]
        assert (await late).segments == ((2, 0),)
        assert log.of(WeightsLive)[-1] == WeightsLive(2, 20.0, 2)
        assert p.version == 2

    run_virtual(main())


def test_cancelling_one_turn_or_adding_one_does_not_stall_the_others() -> None:
    async def main() -> None:
        a = FakeEngine("a", tokens=10)
        p, _ = proxy([a])
        await p.update(weights(0))
        begun = now()
        hung, *turns = [asyncio.create_task(p.generate(ask(n))) for n in range(4)]
        await asyncio.sleep(3.5)
        hung.cancel()
        added = asyncio.create_task(p.generate(ask(9)))
        await asyncio.wait(turns)
        assert now() == begun + 10.0
        await added
        assert now() == begun + 13.5
        assert hung.cancelled()
        assert a.running == 0
        for n in (0, 1, 2, 3, 9):
            p.forget(TrajectoryId(1, n))
        assert p.routing.seats["a"].load == 0
        assert len(a.released) == 5

    run_virtual(main())


def test_cancelling_a_turn_that_waits_for_an_engine_leaves_no_waiter() -> None:
    async def main() -> None:
        a = FakeEngine("a")
        p, _ = proxy([a])
        turn = asyncio.create_task(p.generate(ask()))
        await asyncio.sleep(1.0)
        assert [w.who for w in p._changed.waits] == ["turn 0 of g1.0"]
        turn.cancel()
        await asyncio.wait([turn])
        assert p._changed.waits == []
        assert p.routing.seats["a"].load == 0

    run_virtual(main())


def test_a_new_turn_after_forget_may_go_elsewhere_and_the_kv_was_released() -> None:
    async def main() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        p, _ = proxy([a, b])
        await p.update(weights(0))
        assert [(await p.generate(ask(0, turn=t))).engine for t in range(3)] == ["a"] * 3
        p.forget(TrajectoryId(1, 0))
        p.forget(TrajectoryId(1, 0))
        assert (a.released, b.released) == ([TrajectoryId(1, 0)], [])

    run_virtual(main())


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fail", "hang"])
def test_an_engine_that_does_not_load_is_left_out_and_the_others_serve(kind: str) -> None:
    async def main() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        p, log = proxy([a, b], load_seconds=50.0)
        await p.update(weights(0))
        a.load_trouble = kind
        await p.update(weights(1))
        assert p.routing.live == ["b"]
        assert p.version == 1
        assert log.of(WeightsLive)[-1].engines == 1
        assert log.of(EngineDown)[-1].engine == "a"
        assert "version 1" in log.of(EngineDown)[-1].reason
        assert (await p.generate(ask())).segments == ((1, 0),)
        assert now() < 60.0

    run_virtual(main())


@pytest.mark.parametrize("verb", ["suspend", "resume"])
def test_an_engine_that_hangs_in_an_update_holds_the_others_for_the_load_deadline_at_most(verb: str) -> None:
    async def main() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        p, _ = proxy([a, b], load_seconds=50.0)
        await p.update(weights(0))
        setattr(a, verb, hang)
        begun = now()
        await p.update(weights(1))
        assert now() == begun + 50.0
        assert p.routing.live == ["b"]

    run_virtual(main())


def test_the_first_update_brings_every_engine_up_and_leaves_out_one_that_is_lost() -> None:
    async def main() -> None:
        a, b, c = FakeEngine("a"), FakeEngine("b"), FakeEngine("c")
        b.crash()
        p, log = proxy([a, b, c])
        await p.update(weights(4))
        assert [e.engine for e in log.of(EngineUp)] == ["a", "c"]
        assert p.routing.live == ["a", "c"]
        assert p.started

    run_virtual(main())


def test_an_engine_that_comes_back_serves_after_it_loaded_the_newest_weights_only() -> None:
    async def main() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        p, log = proxy([a, b])
        await p.update(weights(1))
        p.mark_down("a", "gone")
        p.mark_down("a", "gone again")
        assert len(log.of(EngineDown)) == 1
        newest = [weights(1)]
        bringing = asyncio.create_task(p.bring_up("a", newest[0], lambda: newest[0]))
        await asyncio.sleep(1.0)
        newest[0] = weights(2)
        assert not await bringing  # newer ones came while it loaded
        assert p.routing.live == ["b"]
        assert await p.bring_up("a", newest[0], lambda: newest[0])
        assert p.routing.live == ["a", "b"]
        assert [e.version for e in log.of(WeightsLoaded) if e.engine == "a"] == [1, 1, 2]

    run_virtual(main())


def test_i5_an_engine_that_goes_back_a_version_is_our_own_mistake() -> None:
    async def main() -> None:
        p, _ = proxy([FakeEngine("a")])
        await p.update(weights(3))
        with pytest.raises(InvariantViolated, match="I5: a went back from 3 to 2"):
            await p.update(weights(2))

    run_virtual(main(), time_limit=FOREVER)
