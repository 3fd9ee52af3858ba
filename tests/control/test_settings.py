"""Settings: the schedules as values, and refusals in one clear line."""

from __future__ import annotations

import pytest

from rollart.control.pipeline import PipelineSettings
from rollart.control.settings import SCHEDULES, FreeSlots, Overlap, RolloutSettings, ScheduleSettings


def test_the_five_schedules_differ_where_the_paper_says() -> None:
    s = SCHEDULES
    assert list(s) == ["sync", "sync_plus", "one_off", "areal", "rollart"]
    assert [n for n in s if s[n].turn_barrier] == ["sync"]
    assert [s[n].overlap for n in s] == [Overlap.NONE, Overlap.NONE, Overlap.ONE_OFF, Overlap.BOUNDED, Overlap.BOUNDED]
    assert [s[n].free for n in s] == [FreeSlots.LIVE, FreeSlots.LIVE, FreeSlots.TAKEN, FreeSlots.STEPPED,
                                      FreeSlots.LIVE]
    assert [n for n in s if not s[n].check_always] == ["areal"]


@pytest.mark.parametrize(("name", "alpha", "bound"),
                         [("sync", None, 0), ("sync_plus", 0, 0), ("one_off", None, 1), ("areal", None, 1),
                          ("rollart", None, 1), ("rollart", 0, 0), ("areal", 4, 4)])
def test_the_bound_is_the_schedules_own_or_the_wanted_or_1(name: str, alpha: int | None, bound: int) -> None:
    assert ScheduleSettings(name=name, alpha=alpha).bound == bound


@pytest.mark.parametrize(("wrong", "message"), [
    ({"name": "rolart"}, r"must be one of sync, sync_plus, one_off, areal, rollart; got 'rolart'"),
    ({"alpha": -1}, r"alpha must be at least 0; got -1"),
    ({"name": "sync", "alpha": 2}, r"schedule sync has alpha = 0 by its nature, got 2"),
])
def test_a_wrong_schedule_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [
    ("batch_groups", 0), ("group_size", 0), ("open_attempts", 0), ("max_failed_groups", 0), ("spares", -1),
    ("spare_groups", -1), ("max_replacements", -1), ("context_tokens", -1), ("min_members", 9), ("min_members", -1),
    ("open_seconds", 0.0), ("generate_seconds", 0.0), ("environment_seconds", -1.0), ("score_seconds", 0.0),
    ("close_seconds", 0.0), ("episode_seconds", 0.0), ("stall_seconds", float("nan")),
    ("open_backoff_seconds", -1.0),
])
def test_a_wrong_rollout_setting_is_refused_and_named_with_what_was_got(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} .*got {value}") as caught:
        RolloutSettings(**{name: value})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"checkpoint_every": -1}, {"eval_every": -1}, {"step_seconds": 0.0}])
def test_a_wrong_pipeline_setting_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must"):
        PipelineSettings(**wrong)  # type: ignore[arg-type]


def test_enough_members_is_the_whole_group_unless_fewer_are_allowed() -> None:
    assert RolloutSettings(group_size=4).enough == 4
    assert RolloutSettings(group_size=4, min_members=2).enough == 2
