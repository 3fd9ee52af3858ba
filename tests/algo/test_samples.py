"""Facts A5-A7 and T1-T6 where a trajectory becomes a training sequence."""

import itertools
import math
from dataclasses import replace

import pytest

from rollart.algo.advantages import Member
from rollart.algo.samples import make_batch, make_samples
from rollart.algo.settings import AlgoSettings
from rollart.core.tokens import Counted, floats, ids
from rollart.core.types import (
    Completion,
    Finish,
    Group,
    Message,
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


def make_sample(t):
    """The one sample of a trajectory that never forked."""
    (sample,) = make_samples(t, Member(1.0, (0.0,) * len(t.turns)), (1.0,) * len(t.turns))
    return sample


def group(rewards, outcomes=None):
    outcomes = outcomes or [Outcome.FINISHED] * len(rewards)
    return Group(0, TASK, 7, tuple(trajectory((completion([3, END]), ()), member=i, reward=r, outcome=o)
                                   for i, (r, o) in enumerate(zip(rewards, outcomes, strict=True))))


def test_t1_the_sampled_ids_are_trained_as_they_were_sampled():
    a, b, merged = 11, 12, 13  # a tokenizer would join [a][b] into one token
    sample = make_sample(trajectory((completion([a, b]), (4,)), (completion([merged]), ())))
    assert list(sample.ids) == [9, 8, 7, 6, 5, a, b, 4, merged]
    assert len(sample.ids) == len(sample.mask) == len(sample.logprobs) == len(sample.versions)


def test_t2_mask_marks_action_tokens_only():
    sample = make_sample(trajectory((completion([3, 3, END]), (1, 1, 1, 1)), (completion([3, END]), ())))
    assert list(sample.mask) == [0] * 5 + [1] * 3 + [0] * 4 + [1] * 2
    assert all(lp == (-0.5 if m else 0.0) for lp, m in zip(sample.logprobs, sample.mask, strict=True))
    assert all((v == 7) if m else (v == -1) for v, m in zip(sample.versions, sample.mask, strict=True))


def test_t3_a_sampled_end_is_trained_an_inserted_one_is_not_and_a_cut_turn_gets_none():
    cut = completion([3, 3, 3], finish=Finish.LENGTH)
    sample = make_sample(trajectory((completion([3, END]), (END, 1)), (cut, ())))
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
    sample = make_sample(trajectory((completion([3] * 7, segments=((7, 0), (8, 4))), ())))
    assert list(sample.versions)[5:] == [7] * 4 + [8] * 3


def test_t6_staleness_is_that_of_the_oldest_action_token():
    sample = make_sample(trajectory((completion([3] * 2, segments=((9, 0),)), (1,)),
                                    (completion([3] * 3, segments=((8, 0), (9, 1))), ())))
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
    made = make_batch(7, [Group(0, TASK, 7, (long, short))], AlgoSettings(advantage="mean_only"))
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
        make_sample(trajectory((completion([3, END], logprobs=[-1.0]), ())))
    with pytest.raises(ValueError, match="empty prompt"):
        make_sample(trajectory((completion([3, END]), ()), prompt=()))


@pytest.mark.parametrize("bad", [{"clip_low": 1.0}, {"importance_cap": 0.5}, {"gae_lambda": 1.5}, {"dual_clip": 1.0},
                                 {"filter": "all"}, {"correction": "tis+tis"}, {"loss": "hinge"},
                                 {"truncated": "bootstrap"}, {"advantage": "std"}, {"kl_coefficient": -1.0}])
def test_settings_name_the_field_that_is_wrong(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AlgoSettings(**bad)


def member_with(rewards, *, member=0, seen=None, reward=0.0):
    """A trajectory of one-token turns with these environment rewards."""
    done = tuple(Turn(completion([3]), "", Observation((Message("user", (seen or "xyz")[i]),), reward=r), ids((1,)))
                 for i, r in enumerate(rewards))
    return Trajectory(TrajectoryId(0, member), TASK, ids((9,)), Observation((Message("user", "go"),)), done,
                      Outcome.FINISHED, Score(reward))


def test_rewards_of_turns_count_by_their_weight_and_reach_the_sample():
    members = (member_with([0.5, 0.0], reward=1.0), member_with([0.0, 0.25], member=1))
    made = make_batch(7, [Group(0, TASK, 7, members)], AlgoSettings(advantage="mean_only", turn_reward_weight=2.0))
    assert [s.advantage for s in made.batch.samples] == [0.75, -0.75]  # 1 + 2 * 0.5 against 2 * 0.25
    assert [s.turn_rewards for s in made.batch.samples] == [(1.0, 1.0), (0.0, 0.5)]
    assert [s.reward for s in made.batch.samples] == [1.0, 0.0]
    plain = make_batch(7, [Group(0, TASK, 7, members)], AlgoSettings(advantage="mean_only"))
    assert [s.turn_rewards for s in plain.batch.samples] == [(0.0, 1.0), (0.0, 0.0)]


def test_advantages_per_turn_reach_the_sample_where_they_differ():
    members = (member_with([0, 0], seen="ab", reward=1.0), member_with([0, 0], member=1, seen="cd"))
    made = make_batch(7, [Group(0, TASK, 7, members)], AlgoSettings(advantage="turns", turn_discount=0.0))
    assert made.batch.samples[0].turn_advantages == pytest.approx((0.0, 0.7071), abs=1e-4)
    assert made.batch.samples[0].turn_tokens == (1, 1)


def test_t1_a_rewritten_history_forks_into_samples_with_exact_prefixes_and_the_weight_of_one():
    first = Turn(completion([3, END]), "", Observation(), ids(), fork=ids([9, 8, 4, 4]))
    second = Turn(completion([5, END]), "", Observation(), ids([1]))
    third = Turn(completion([6]), "", Observation(), ids())
    whole = Trajectory(TrajectoryId(0, 0), TASK, ids([9, 8, 7]), Observation(), (first, second, third),
                       Outcome.FINISHED, Score(1.0))
    made = make_batch(7, [Group(0, TASK, 7, (whole, trajectory((completion([3, END]), ()), member=1, reward=0.0)))],
                      AlgoSettings(advantage="mean_only"))
    forked = [s for s in made.batch.samples if s.trajectory.member == 0]
    assert [list(s.ids) for s in forked] == [[9, 8, 7, 3, END], [9, 8, 4, 4, 5, END, 1, 6]]
    assert [list(s.mask) for s in forked] == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 0, 1]]
    assert [s.weight for s in forked] == [0.5, 0.5]
    assert [s.advantage for s in made.batch.samples] == [0.5, 0.5, -0.5]  # a6: the baseline counts episodes
    assert [s.truncated for s in made.batch.samples] == [True, False, False]  # the episode went on behind the fork
    assert [s.turn_rewards for s in forked] == [(0.0,), (0.0, 1.0)]


def test_overlong_shaping_lowers_the_reward_before_the_baseline_and_filters_look_at_raw_ones():
    long, short = trajectory((completion([3] * 8), ()), member=0), trajectory((completion([3, END]), ()), member=1)
    shaping = AlgoSettings(advantage="mean_only", overlong_tokens=10, overlong_cache=4)
    made = make_batch(7, [Group(0, TASK, 7, (long, short))], shaping)
    assert [s.advantage for s in made.batch.samples] == [-0.25, 0.25]
    kept = make_batch(7, [Group(0, TASK, 7, (long, short))], replace(shaping, filter="zero_variance"))
    assert not kept.batch.samples


def test_the_overlong_filter_takes_groups_that_ran_into_limits():
    cut = [Outcome.TRUNCATED, Outcome.TRUNCATED, Outcome.FINISHED]
    settings = AlgoSettings(filter="zero_variance+overlong")
    assert {reason for _, reason in make_batch(7, [group([1, 0, 0], cut)], settings).filtered} == {"overlong"}
    assert len(make_batch(7, [group([1, 0, 0], cut[1:] + cut[-1:])], settings).batch.samples) == 3


def test_reinforce_plus_plus_is_the_whitened_reward_of_the_batch():
    settings = AlgoSettings.named("reinforce++")
    made = make_batch(7, [group([1, 0]), group([0, 0])], settings)
    assert [s.advantage for s in made.batch.samples] == pytest.approx([1.7320, -0.5774, -0.5774, -0.5774], abs=1e-3)


def test_with_a_critic_the_batch_has_rewards_and_no_advantages():
    made = make_batch(7, [group([1, 0])], AlgoSettings.named("ppo"))
    assert [s.advantage for s in made.batch.samples] == [0, 0]
    assert [s.turn_rewards for s in made.batch.samples] == [(1.0,), (0.0,)]
