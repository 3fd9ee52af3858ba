"""Facts A5-A7 and T1-T6 where a trajectory becomes a training sequence."""

import itertools
import math

import pytest

from rollart.algo.samples import make_batch, make_sample
from rollart.algo.settings import AlgoSettings
from rollart.core.tokens import Counted, floats, ids
from rollart.core.types import (
    Completion,
    Finish,
    Group,
    Observation,
    Outcome,
    Score,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)

TASK = Task("t", "maze")
END = 2


def completion(tokens, segments=((7, 0),), finish=Finish.STOP, logprobs=None):
    return Completion(ids(tokens), floats([-0.5] * len(tokens) if logprobs is None else logprobs), segments, finish)


def trajectory(*turns, member=0, reward=1.0, outcome=Outcome.FINISHED, prompt=(9, 8, 7, 6, 5)):
    done = tuple(Turn(c, "", Observation(), ids(reply)) for c, reply in turns)
    score = None if reward is None else Score(reward)
    return Trajectory(TrajectoryId(0, member), TASK, ids(prompt), Observation(), done, outcome, score)


def group(rewards, outcomes=None):
    outcomes = outcomes or [Outcome.FINISHED] * len(rewards)
    return Group(0, TASK, 7, tuple(trajectory((completion([3, END]), ()), member=i, reward=r, outcome=o)
                                   for i, (r, o) in enumerate(zip(rewards, outcomes, strict=True))))


def test_t1_the_sampled_ids_are_trained_as_they_were_sampled():
    a, b, merged = 11, 12, 13  # a tokenizer would join [a][b] into one token
    sample = make_sample(trajectory((completion([a, b]), (4,)), (completion([merged]), ())), 1.0, 1.0)
    assert list(sample.ids) == [9, 8, 7, 6, 5, a, b, 4, merged]
    assert len(sample.ids) == len(sample.mask) == len(sample.logprobs) == len(sample.versions)


def test_t2_mask_marks_action_tokens_only():
    sample = make_sample(trajectory((completion([3, 3, END]), (1, 1, 1, 1)), (completion([3, END]), ())), 1.0, 1.0)
    assert list(sample.mask) == [0] * 5 + [1] * 3 + [0] * 4 + [1] * 2
    assert all(lp == (-0.5 if m else 0.0) for lp, m in zip(sample.logprobs, sample.mask, strict=True))
    assert all((v == 7) if m else (v == -1) for v, m in zip(sample.versions, sample.mask, strict=True))


def test_t3_a_sampled_end_is_trained_an_inserted_one_is_not_and_a_cut_turn_gets_none():
    cut = completion([3, 3, 3], finish=Finish.LENGTH)
    sample = make_sample(trajectory((completion([3, END]), (END, 1)), (cut, ())), 1.0, 1.0)
    assert list(sample.ids)[5:] == [3, END, END, 1, 3, 3, 3]
    assert list(sample.mask)[5:] == [1, 1, 0, 0, 1, 1, 1]


def test_t4_truncation_is_an_explicit_choice_and_read_from_the_outcome():
    members = group([1.0, 0.0, 0.0], [Outcome.FINISHED, Outcome.TRUNCATED, Outcome.FINISHED])
    trained = make_batch(7, [members], AlgoSettings(truncated="train"))
    assert (len(trained.batch.samples), trained.filtered) == (3, ())
    masked = make_batch(7, [members], AlgoSettings(truncated="mask"))
    assert masked.filtered == ((TrajectoryId(0, 1), "truncated"),)
    baseline = {s.trajectory: s.advantage for s in trained.batch.samples}
    assert all(s.advantage == baseline[s.trajectory] for s in masked.batch.samples)


def test_t5_a_turn_over_a_weight_change_keeps_both_versions():
    sample = make_sample(trajectory((completion([3] * 7, segments=((7, 0), (8, 4))), ())), 1.0, 1.0)
    assert list(sample.versions)[5:] == [7] * 4 + [8] * 3


def test_t6_staleness_is_that_of_the_oldest_action_token():
    sample = make_sample(trajectory((completion([3] * 2, segments=((9, 0),)), (1,)),
                                    (completion([3] * 3, segments=((8, 0), (9, 1))), ())), 1.0, 1.0)
    oldest = min(v for v, m in zip(sample.versions, sample.mask, strict=True) if m)
    assert 10 - oldest == 2


def test_a5_a_failed_member_is_filtered_and_left_out_of_the_baseline():
    made = make_batch(7, [group([1, 0, None, 1], [Outcome.FINISHED] * 2 + [Outcome.FAILED, Outcome.FINISHED])],
                      AlgoSettings())
    assert [round(s.advantage, 3) for s in made.batch.samples] == [0.577, -1.155, 0.577]
    assert made.filtered == ((TrajectoryId(0, 2), "no reward"),)


def test_a6_the_baseline_counts_episodes_whatever_their_turns():
    long = trajectory(*[(completion([3, END]), (1,))] * 3, member=0, reward=1.0)
    short = trajectory((completion([3, END]), ()), member=1, reward=0.0)
    made = make_batch(7, [Group(0, TASK, 7, (long, short))], AlgoSettings(normalisation="mean_only"))
    assert [s.advantage for s in made.batch.samples] == [0.5, -0.5]


@pytest.mark.parametrize(("success", "chance"), [(0.9, 0.430), (0.5, 0.0078)])
def test_a7_zero_variance_filter_takes_exactly_the_groups_that_agree(success, chance):
    settings, taken = AlgoSettings(filter="zero_variance"), 0.0
    for rewards in itertools.product([0.0, 1.0], repeat=8):
        made = make_batch(7, [group(rewards)], settings)
        assert len(made.batch.samples) in (0, 8)
        if not made.batch.samples:
            taken += math.prod(success if r else 1 - success for r in rewards)
    assert taken == pytest.approx(chance, abs=5e-4 if success > 0.5 else 5e-5)


def test_filter_none_keeps_equal_groups_with_advantage_zero():
    made = make_batch(7, [group([1, 1, 1])], AlgoSettings(filter="none"))
    assert [s.advantage for s in made.batch.samples] == [0.0] * 3


def test_filter_reads_raw_rewards_before_truncation_masks_anything():
    made = make_batch(7, [group([0, 1, 0], [Outcome.FINISHED, Outcome.TRUNCATED, Outcome.FINISHED])],
                      AlgoSettings(filter="zero_variance", truncated="mask"))
    assert len(made.batch.samples) == 2


def test_every_member_is_in_the_batch_or_filtered_exactly_once():
    outcomes = [Outcome.TRUNCATED, Outcome.FINISHED, Outcome.FAILED, Outcome.FINISHED]
    silent = trajectory(member=4, reward=0.0)
    members = [*group([1, 0, None, 1], outcomes).members, silent]
    made = make_batch(7, [Group(0, TASK, 7, tuple(members))], AlgoSettings(truncated="mask"))
    seen = [s.trajectory for s in made.batch.samples] + [i for i, _ in made.filtered]
    assert sorted(seen) == [m.id for m in members]
    assert dict(made.filtered)[TrajectoryId(0, 4)] == "no sampled token"


def test_simulated_tokens_make_simulated_samples():
    turn = Turn(Completion(Counted(20), floats(), ((7, 0),), Finish.STOP), Counted(9), Observation(), Counted(5))
    member = Trajectory(TrajectoryId(0, 0), TASK, Counted(100), Observation(), (turn,), Outcome.FINISHED, Score(1.0))
    sample = make_batch(7, [Group(0, TASK, 7, (member,))], AlgoSettings()).batch.samples[0]
    assert sample.ids == Counted(125)
    assert len(sample.mask) == len(sample.logprobs) == len(sample.versions) == 0


def test_a_trajectory_that_contradicts_itself_is_an_error():
    with pytest.raises(ValueError, match=r"g0.0 turn 0: 2 sampled tokens but 1 log-prob"):
        make_sample(trajectory((completion([3, END], logprobs=[-1.0]), ())), 1.0, 1.0)
    with pytest.raises(ValueError, match="empty prompt"):
        make_sample(trajectory((completion([3, END]), ()), prompt=()), 1.0, 1.0)


@pytest.mark.parametrize("bad", [{"clip_low": 1.0}, {"importance_cap": 0.5}, {"dual_clip": 1.0}, {"filter": "all"},
                                 {"truncated": "bootstrap"}, {"normalisation": "std"}, {"kl_coefficient": -1.0}])
def test_settings_name_the_field_that_is_wrong(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AlgoSettings(**bad)
