"""Each invariant accepts the events of a right run and names itself on a wrong one; settled groups are forgotten."""

from array import array

import pytest

from rollart.control.settings import FreeSlots
from rollart.core import events as ev
from rollart.core.errors import InvariantViolated
from rollart.core.tokens import Counted
from rollart.core.types import (
    Completion,
    Fate,
    Finish,
    Group,
    Manifest,
    Observation,
    Outcome,
    Score,
    StepReport,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)
from rollart.observe.invariants import Bounds, Invariants

TASK = Task("math/0", "math")
BOUNDS = {"alpha": 1, "slots": 2, "group_size": 1, "max_replacements": 1}


def trajectory(id, segments=((0, 0),), sampled=10, outcome=Outcome.FINISHED):
    turns = ()
    if segments:
        completion = Completion(Counted(sampled), array("f"), segments, Finish.STOP, "a")
        turns = (Turn(completion, Counted(sampled), Observation(), Counted(0)),)
    return Trajectory(id, TASK, Counted(5), Observation(), turns, outcome,
                      Score(1.0) if outcome is Outcome.FINISHED else None)


def publish(version):
    return [ev.PublishStarted(version), ev.WeightsPublished(Manifest(version, "x"), 1.0),
            ev.WeightsLoaded("a", version, 1.0), *([ev.EngineUp("a", 0)] if version == 0 else []),
            ev.WeightsLive(version, 1.0, 1)]


def start(group=0, member=0):
    id = TrajectoryId(group, member)
    return [ev.TrajectoryStarted(id, "math"), ev.EnvironmentOpened(id, 1.0, 1)]


def turn(group=0, member=0, oldest=0, newest=0):
    return [ev.TurnEnded(TrajectoryId(group, member), 0, "a", 10, oldest, newest)]


def end(group=0, member=0, segments=((0, 0),)):
    id = TrajectoryId(group, member)
    return [ev.EnvironmentClosed(id), ev.TrajectoryEnded(trajectory(id, segments), Fate.IN_FLIGHT)]


def ready(group=0):
    members = (trajectory(TrajectoryId(group, 0)),)
    return [ev.GroupReady(Group(group, TASK, 0, members)), ev.GroupEnded(group, True, "", {})]


def train(group=0, version=0, staleness=0):
    return [ev.BatchTaken(version, (group,), (staleness,), 0.0),
            ev.Settled((TrajectoryId(group, 0),), Fate.TRAINED, "", version),
            ev.StepEnded(version + 1, StepReport(version + 1, 1.0, 10))]


BEGIN = [ev.RunStarted(0, 10, False), *publish(0)]
OPEN = [ev.GroupOpened(0, TASK, 0, {})]
WHOLE = [*BEGIN, *OPEN, *start(), *turn(), *end(), *ready(), *train(), *publish(1), ev.SlotsFreed(1, 1)]


def play(events, times=None, **bounds):
    checks = Invariants(Bounds(**{**BOUNDS, **bounds}))
    for i, event in enumerate(events):
        checks.on(times[i] if times else float(i), event)
    return checks


def failed(member, group=0):
    id = TrajectoryId(group, member)
    return [ev.TrajectoryEnded(trajectory(id, (), outcome=Outcome.FAILED), Fate.FAILED)]


def test_a_right_run_passes_and_leaves_nothing_in_memory():
    checks = play([*WHOLE, ev.RunEnded(1, "finished")])
    checks.close()
    assert (checks.fates, checks.tokens, checks.sampled) == ({Fate.TRAINED: 1}, {Fate.TRAINED: 10}, 10)
    assert not checks._groups
    assert checks._held == 0


UNSTARTED = [ev.TrajectoryStarted(TrajectoryId(0, 0), "math")]
LONG = [*BEGIN, *OPEN, *start(), *turn(), *end(), *ready(), *(e for v in (0, 1) for e in (
    ev.BatchTaken(v, (), (), 0.0), ev.StepEnded(v + 1, StepReport(v + 1, 1.0, 0))))]

WRONG = {
    "I1: g0.0 is trained at version 2": [*LONG, ev.BatchTaken(2, (0,), (2,), 0.0)],
    "I1: a batch reports staleness 2": [*BEGIN, ev.BatchTaken(0, (), (2,), 0.0)],
    "I1: g0.0 turn 0: the version segments do not begin": [*BEGIN, *OPEN, *start(), *turn(), *end(segments=((0, 3),))],
    "I1: g0.0 turn 0: after version 1": [*BEGIN, *OPEN, *start(), *turn(), *end(segments=((1, 0), (0, 3)))],
    "I2: group 0 was opened twice": [*BEGIN, *OPEN, *OPEN],
    "I2: g0.0 was started after member 0": [*BEGIN, *OPEN, *start(), *turn(), *end(), *UNSTARTED],
    "I2: g0.1 ended, and is not running": [*BEGIN, *OPEN, *start(), *failed(1)],
    "I2: g0.0 was settled as stale": [*BEGIN, *OPEN, *start(), ev.Settled((TrajectoryId(0, 0),), Fate.STALE)],
    "I2: g0.0 was settled as trained, and is in no batch": [
        *BEGIN, *OPEN, *start(), *turn(), *end(), *ready(), ev.Settled((TrajectoryId(0, 0),), Fate.TRAINED, "", 0)],
    "I2: group 0 was given up, and g0.0 got no fate": [
        *BEGIN, *OPEN, *start(), *turn(), *end(), ev.GroupEnded(0, False, "stale", {})],
    "I2: g0.0 waits to be trained with outcome failed": [*BEGIN, *OPEN, *UNSTARTED, ev.TrajectoryEnded(
        trajectory(TrajectoryId(0, 0), (), outcome=Outcome.FAILED), Fate.IN_FLIGHT)],
    "I2: group 0 is in a batch, and was in one before": [
        *BEGIN, *OPEN, *start(), *turn(), *end(), *ready(), ev.BatchTaken(0, (0, 0), (), 0.0)],
    "I3: g0.0 ended before its environment was closed": [*BEGIN, *OPEN, *start(), *turn(), *end()[1:]],
    "I3: g0.0 opened a second environment": [*BEGIN, *OPEN, *start(), *start()[1:]],
    "I3: group 0 ended while g0.0 still run": [*BEGIN, *OPEN, *start(), ev.GroupEnded(0, False, "", {})],
    "I3: a turn of g0.0, whose group is not open": [*WHOLE, *turn()],
    "I3: e0.3 still runs after its evaluation": [
        *BEGIN, ev.EnvironmentOpened(TrajectoryId(0, 3, "e"), 1.0, 1), ev.EvalEnded(0, 0, (), 1.0)],
    "I4: 3 groups open or ready + 0 in training exceed 2 slots": [
        *BEGIN, *OPEN, ev.GroupOpened(1, TASK, 0, {}), ev.GroupOpened(2, TASK, 0, {})],
    "I4: 2 slots of version 1 were freed, its batch held 1": [*WHOLE[:-1], ev.SlotsFreed(1, 2)],
    "I5: a went back from version 1 to 0": [*WHOLE, ev.WeightsLoaded("a", 0, 1.0)],
    "I5: a loaded version 3, the trainer stands at 1": [*WHOLE, ev.WeightsLoaded("a", 3, 1.0)],
    "I5: b serves version 0 while version 1 is live": [
        *WHOLE, ev.WeightsLoaded("b", 0, 1.0), ev.EngineUp("b", 0)],
    "I5: turn 0 of g0.0 has tokens of version 1, but a has loaded 0": [*BEGIN, *OPEN, *start(), *turn(newest=1)],
    "I5: turn 0 of g0.0 has tokens of versions 1 to 0": [*BEGIN, *OPEN, *start(), *turn(oldest=1, newest=0)],
    "I6: the publish of version 0 started before version 0 was live": [*BEGIN, *publish(0)[:1], *publish(0)[:1]],
    "I6: version 2 is published while the trainer stands at 0": [*BEGIN, *publish(2)[:1]],
    "I6: the slots of version 1 were freed while version 0 was live": [
        *BEGIN, *OPEN, *start(), *turn(), *end(), *ready(), *train(), ev.SlotsFreed(1, 1)],
    "I6: a batch is taken at version 4": [*BEGIN, ev.BatchTaken(4, (), (), 0.0)],
    "I7: a failed member of group 0 was not replaced": [
        *BEGIN, *OPEN, *UNSTARTED, *start(member=1), *failed(0), *turn(member=1)],
    "I7: group 0 ended with a failed member that was not replaced": [
        *BEGIN, *OPEN, *UNSTARTED, *failed(0), ev.GroupEnded(0, False, "", {})],
    "I8: g0.0 ends with 10 sampled tokens, its turns had 20": [*BEGIN, *OPEN, *start(), *turn(), *turn(), *end()],
}


@pytest.mark.parametrize(("text", "events"), WRONG.items(), ids=WRONG)
def test_the_event_that_breaks_an_invariant_is_named_at_once(text, events):
    play(events[:-1])
    with pytest.raises(InvariantViolated) as raised:
        play(events)
    assert str(raised.value).startswith(text), raised.value


def test_a_failed_member_needs_no_replacement_when_they_are_used_up_or_the_group_is_full():
    play([*BEGIN, *OPEN, *UNSTARTED, *failed(0), ev.GroupEnded(0, False, "", {})], max_replacements=0)
    spare = ev.TrajectoryStarted(TrajectoryId(0, 1), "math")
    play([*BEGIN, *OPEN, *start(), spare, *turn(), *end(), *failed(1), *ready()])


def test_slots_may_be_freed_earlier_where_the_schedule_says_so():
    events = [*BEGIN, *OPEN, *start(), *turn(), *end(), *ready(), *train(), ev.GroupOpened(1, TASK, 0, {}),
              *publish(1), ev.SlotsFreed(1, 0)]
    play(events, slots=1, free=FreeSlots.STEPPED)
    with pytest.raises(InvariantViolated, match=r"^I4"):
        play(events, slots=1)


def test_a_step_over_its_budget_is_named():
    times = [0.0] * (len(WHOLE) - 8) + [500.0] * 8
    play(WHOLE, times, step_seconds=500.0)
    with pytest.raises(InvariantViolated, match=r"^I7: the step to version 1 took 500 s, the budget is 499 s"):
        play(WHOLE, times, step_seconds=499.0)


def test_wasted_tokens_over_their_share_are_named():
    spare = [ev.TrajectoryStarted(TrajectoryId(0, 1), "math"), ev.EnvironmentOpened(TrajectoryId(0, 1), 1.0, 1),
             *turn(member=1), ev.EnvironmentClosed(TrajectoryId(0, 1)),
             ev.TrajectoryEnded(trajectory(TrajectoryId(0, 1), outcome=Outcome.ABORTED), Fate.CANCELLED)]
    events = [*BEGIN, *OPEN, *start(), *spare, *turn(), *end(), *ready(), *train()]
    play(events, wasted_share=0.5, wasted_after=1)
    with pytest.raises(InvariantViolated, match=r"^I8: 10 of 20 sampled tokens were wasted"):
        play(events, wasted_share=0.49, wasted_after=1)


def test_what_is_forgotten_is_named_at_the_end():
    evaluating = ev.EnvironmentOpened(TrajectoryId(0, 3, "e"), 1.0, 1)
    for events, text in (([*BEGIN, *OPEN, *start()], "I2: g0.0 was dispatched and has no fate"),
                         ([*BEGIN, *OPEN], "I2: group 0 was opened and never ended"),
                         ([*BEGIN, evaluating], "I3: the environment of e0.3")):
        with pytest.raises(InvariantViolated, match=f"^{text}"):
            play(events).close()


def test_not_strict_collects_and_strict_repeats_the_first():
    wrong = [*BEGIN, *OPEN, *OPEN, ev.PublishStarted(9)]
    checks = Invariants(Bounds(**BOUNDS), strict=False, keep=1)
    for event in wrong:
        checks.on(0.0, event)
    assert checks.violations == ["I2: group 0 was opened twice"]
    strict = Invariants(Bounds(**BOUNDS))
    for event in wrong[:-2]:
        strict.on(0.0, event)
    for event in wrong[-2:]:
        with pytest.raises(InvariantViolated, match="I2: group 0 was opened twice"):
            strict.on(0.0, event)


def test_a_resumed_run_settles_what_it_cannot_take_over_and_trains_members_from_before():
    members = (trajectory(TrajectoryId(4, 0)),)
    checks = play([ev.RunStarted(0, 10, True), ev.Settled((TrajectoryId(3, 0),), Fate.STALE, "resume"),
                   ev.GroupEnded(3, False, "resume: no slot", {}), *publish(0), ev.GroupOpened(4, TASK, 0, {}, 1),
                   ev.GroupReady(Group(4, TASK, 0, members)), ev.GroupEnded(4, True, "", {}), *train(group=4),
                   *publish(1), ev.SlotsFreed(1, 1)])
    checks.close()
    assert not checks._groups
