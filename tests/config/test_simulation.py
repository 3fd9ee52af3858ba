"""Simulation recipes: what they make, and one clear line for what cannot be."""

import pytest

from rollart.config.simulation import load_simulation, simulation_from
from rollart.core.errors import ConfigError
from rollart.sim.workload import DOMAINS
from rollart.sim.world import simulate


def tables(**changes):
    base = {"train": {"gpu": "H800", "gpus": 8}, "pools": {"a": {"gpu": "H800", "gpus": 4}}, "domains": {"math": {}}}
    return {**base, **changes}


def test_a_recipe_becomes_a_world_and_its_json_the_same_recipe():
    recipe = simulation_from(tables(
        model={"name": "Qwen3-14B"}, pools={"a": {"gpu": "H800", "gpus": 8, "tensor_parallel": 2, "domains": ["math"]},
                                            "b": {"gpu": "H20", "gpus": 4, "domains": ["default"]}},
        domains={"math": {"weight": 2.0, "action": {"mean": 99.0}}, "other": {"load": "swe", "turns": 3}}))
    world = recipe.world()
    assert {name: pool.engines for name, pool in world.pools.items()} == {"a": 4, "b": 4}
    assert world.affinity == {"math": "a", "default": "b"}
    assert (world.domains["math"].action.mean, world.domains["math"].action.sigma) == (99.0,
                                                                                       DOMAINS["math"].action.sigma)
    assert (world.domains["other"].turns.mean, world.domains["other"].turns.sigma) == (3.0, 0.0)
    assert simulation_from(recipe.to_json()) == recipe


def test_blocking_weights_stop_rollout_for_the_whole_transfer():
    beside, blocking = (simulation_from(tables(weights={"blocking": b})).world() for b in (False, True))
    assert blocking.publish_s == 0
    assert blocking.pools["a"].cost.load_s == pytest.approx(beside.publish_s + beside.pools["a"].cost.load_s)


def test_a_pool_may_prefill_and_decode_on_gpus_of_their_own():
    world = simulation_from(tables(pools={"pd": {"gpu": "H20", "gpus": 6, "tensor_parallel": 2, "prefill_gpu": "H800",
                                                 "prefill_gpus": 2}})).world()
    pool = world.pools["pd"]
    assert (pool.engines, pool.prefill, pool.decode, pool.gpus) == (1, 1, 3, 8)
    assert pool.price == pytest.approx(2 * 2.85 + 6)


def test_recorded_episodes_by_path(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n")
    world = simulation_from(tables(domains={"chat": {"records": str(path)}})).world()
    load = world.domains["chat"]
    assert (load.max_turns, load.max_tokens, load.records[0].prompt) == (1, 10, 4808)


@pytest.mark.parametrize(("changes", "message"), [
    ({"pool": {}}, r"unknown key pool.*pools"),
    ({"model": {"name": "Qwen3-9B"}}, r"model.name: no model Qwen3-9B.*Qwen3-8B"),
    ({"model": {"layers": 0}}, r"layers must be at least 1; got 0"),
    ({"model": {"name": "Qwen3-32B"}}, r"pools.a: Qwen3-32B .* does not fit 1 x H800 by 2 GB"),
    ({"pools": {}}, r"needs at least one pool"),
    ({"pools": {"a": {"gpu": "H8000", "gpus": 4}}}, r"pools.a.gpu: no GPU kind H8000.*H800"),
    ({"pools": {"a": {"gpus": 3, "tensor_parallel": 2}}}, r"gpus = 3 .* must be multiples of tensor_parallel = 2"),
    ({"pools": {"a": {"domains": ["maths"]}}}, r"pools.a.domains: no domain maths.*math"),
    ({"pools": {"a": {"domains": ["math"]}, "b": {"domains": ["math"]}}}, r"bound to two pools, a and b"),
    ({"pools": {"a": {"domains": ["math"]}}, "domains": {"math": {}, "swe": {}}}, r"domain swe has no pool: name it"),
    ({"domains": {}}, r"needs at least one domain"),
    ({"domains": {"math": {"load": "mth"}}}, r"domains.math.load: no preset mth.*math"),
    ({"domains": {"math": {"actoin": 3}}}, r"unknown key domains.math.actoin.*action"),
    ({"domains": {"math": {"weight": -1.0}}}, r"domains.math.weight must be at least 0"),
    ({"domains": {"math": {"weight": float("inf")}}}, r"domains.math.weight must be a finite number; got inf"),
    ({"domains": {"math": {"step_s": {"values": [-5.0]}}}}, r"math.step_s.*values must be finite numbers >= 0; got -5"),
    ({"domains": {"math": {"step_s": float("nan")}}}, r"math.step_s"),
    ({"faults": {"engine_mtbf": float("inf")}}, r"faults.engine_mtbf must be a finite number; got inf"),
    ({"train": {"cost": {"token_s": float("nan")}}}, r"train.cost.token_s must be a finite number; got nan"),
    ({"reward": {"cold_start_s": float("nan")}}, r"reward.cold_start_s must be a finite number; got nan"),
    ({"rollout": {"batch_groups": 0}}, r"^rollout.batch_groups must be at least 1; got 0$"),
    ({"domains": {"math": {"records": "none.csv"}}}, r"records none.csv cannot be read"),
    ({"reward": {"serverless": False}}, r"reserved rewards .* need instances of at least 1"),
    ({"train": {"gpus": 1}}, r"training Qwen3-8B needs 147 GB of GPU memory, 1 x H800 have 80 GB: use at least 2"),
    ({"seed": "x"}, r"seed must be int"),
    ({"domains": {"mathh": {}}}, r"domains.mathh says nothing of its episodes, .*did you mean 'math'"),
    ({"algorithm": {"clip_low": 0.1}}, r"algorithm.clip_low has no effect in a simulation"),
    ({"pipeline": {"eval_every": 2}}, r"pipeline.eval_every has no effect in a simulation"),
    ({"domains": {"math": {"records": "none.csv", "turns": 3}}}, r"domains.math.turns has no effect beside records"),
    ({"calibration": {"compute_efficiency": 0.0}}, r"compute_efficiency must be above 0, at most 1; got 0"),
    ({"learner": {}}, r"\[learner\] belongs to a training recipe: use rollart train"),
])
def test_what_cannot_be_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        simulation_from(tables(**changes))
    assert "\n" not in str(error.value)


def test_the_recipes_that_ship_can_be_simulated(pytestconfig):
    found = sorted((pytestconfig.rootpath / "recipes").glob("sim_*.toml"))
    assert found
    for path in found:
        if path.stem != "sim_trace":  # needs a file
            load_simulation(path).world()


def test_batches_with_nothing_to_train_on_end_a_simulation_too():
    alone = tables(rollout={"batch_groups": 1, "group_size": 1}, algorithm={"filter": "zero_variance"},
                   pipeline={"steps": 9, "max_empty_batches": 2})
    told = simulate(simulation_from(alone).world(), 0).ended
    assert "2 batches in a row had nothing to train on (1 trajectories: zero variance)" in told
    assert "pipeline.max_empty_batches = 2" in told
