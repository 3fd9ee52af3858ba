"""The cost model: the models' published sizes, rooflines that know their limits, clusters as text."""

import pytest

from rollart.core.errors import ConfigError
from rollart.sim.calibration import DEFAULT, Calibration
from rollart.sim.costs import GPUS, MODELS, Shape, StepCost, TrainCost, engine_cost, parse_cluster, train_cost, transfer

H800, H20 = GPUS["H800"], GPUS["H20"]


@pytest.mark.parametrize(("name", "gib"), [("Qwen3-8B", 15.26), ("Qwen3-14B", 27.51), ("Qwen3-32B", 61.02)])
def test_the_papers_weight_sizes_follow_from_the_published_shapes(name, gib):
    assert MODELS[name].weight_bytes / 2**30 == pytest.approx(gib, abs=0.005)


def test_a_mixture_multiplies_with_its_active_experts_only():
    shape = MODELS["Qwen3-30B-A3B"]
    assert shape.parameters == pytest.approx(30.5e9, rel=0.01)
    assert shape.active_parameters == pytest.approx(3.3e9, rel=0.1)
    assert MODELS["Qwen3-235B-A22B"].parameters == pytest.approx(235e9, rel=0.01)


def test_prefill_is_bound_by_compute_and_decode_by_bandwidth():
    fast, wide = (engine_cost(MODELS["Qwen3-8B"], gpu, 1, DEFAULT) for gpu in (H800, H20))
    prefill = fast.seconds(0, 0, 8192), wide.seconds(0, 0, 8192)
    assert prefill[1] / prefill[0] == pytest.approx(989.5 / 148.0, rel=0.05)
    decode = fast.seconds(8, 8 * 4096, 0), wide.seconds(8, 8 * 4096, 0)
    assert 0.8 < decode[1] / decode[0] < 1.0, "H20 reads memory 1.19 times as fast"
    weights = 2 * MODELS["Qwen3-8B"].common_parameters / (3.35e12 * DEFAULT.bandwidth_efficiency)
    assert fast.seconds(1, 0, 0) == pytest.approx(weights + DEFAULT.step_overhead_s + DEFAULT.sequence_overhead_s)


def test_tensor_parallel_halves_the_work_and_pays_for_the_exchange():
    one, two = (engine_cost(MODELS["Qwen3-14B"], H800, n, DEFAULT) for n in (1, 2))
    assert 0.5 < two.token_s / one.token_s < 0.65
    assert two.weights_s == one.weights_s / 2
    assert two.overhead_s > one.overhead_s
    assert two.capacity > 2 * one.capacity


def test_a_model_that_does_not_fit_says_by_how_much_and_what_would():
    with pytest.raises(ConfigError, match=r"Qwen3-32B \(66 GB and 32768 tokens of KV\) does not fit 1 x H800 by "
                                          r"2 GB: it needs at least 2 x H800 per engine; raise tensor_parallel"):
        engine_cost(MODELS["Qwen3-32B"], H800, 1, DEFAULT)
    with pytest.raises(ConfigError, match=r"training Qwen3-32B needs 590 GB .* 4 x H800 have 320 GB: use at least 8"):
        train_cost(MODELS["Qwen3-32B"], H800, 4, DEFAULT)


def test_training_pays_for_tokens_and_for_attention():
    cost = TrainCost(fixed_s=1.0, token_s=0.1, attention=0.01)
    assert cost.seconds([]) == 1.0
    assert cost.seconds([10, 20]) == pytest.approx(1.0 + 0.1 * (10 * 1.05 + 20 * 1.1))
    big = train_cost(MODELS["Qwen3-8B"], H800, 32, DEFAULT)
    assert 70 < big.seconds([22_500] * 128) < 100, "the paper's step trains for 84.5 s"


def test_transfers_fit_the_papers_seconds_and_rdma_needs_no_store():
    moved = transfer(MODELS["Qwen3-32B"], DEFAULT)
    assert moved.push == pytest.approx(127.3, rel=0.1)
    assert moved.pull == pytest.approx(29.7, rel=0.1)
    assert moved.exposed == pytest.approx(9.6, rel=0.15)
    near = transfer(MODELS["Qwen3-32B"], DEFAULT, colocated=True)
    assert near.push == 0
    assert near.exposed == near.pull == pytest.approx(9.4, rel=0.1)


def test_every_constant_says_what_it_is_and_where_from():
    kinds = {kind for _, _, kind, _ in Calibration.rows()}
    assert kinds == {"known", "fitted", "assumed"}
    assert all(len(source) > 20 for _, _, _, source in Calibration.rows())


def test_a_cluster_is_read_and_printed():
    cluster = parse_cluster("96xH800, 32 x h20,4xH800")
    assert str(cluster) == "100xH800,32xH20"
    assert cluster.parts[1].price == 32.0
    for text in ("", "96", "H800", "0xH800", "96xH800,", "-1xH20", "96xH800;32xH20"):
        with pytest.raises(ConfigError, match=r"a cluster is written like 96xH800,32xH20; got"):
            parse_cluster(text)
    with pytest.raises(ConfigError, match=r"no GPU kind H80 \(did you mean H800\?\)|no GPU kind H80.*H800"):
        parse_cluster("8xH80")


def test_a_shape_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"layers must be at least 1; got 0"):
        Shape(layers=0)
    with pytest.raises(ValueError, match=r"experts >= active >= 1 and expert_mlp; got experts 8, active 0"):
        Shape(experts=8)


@pytest.mark.parametrize(("name", "value"), [
    ("compute_efficiency", 0.0), ("compute_efficiency", 5.0), ("memory_share", 2.0), ("pull_hidden", 3.0),
    ("chunk_tokens", 0), ("step_overhead_s", -1.0), ("train_passes", -4.0), ("push_bytes_per_s", 0.0)])
def test_a_constant_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*; got {value:g}"):
        Calibration(**{name: value})


def test_costs_that_are_no_costs_are_refused():
    with pytest.raises(ValueError, match="token_s must be 0 or more; got -1"):
        StepCost(token_s=-1.0)
    with pytest.raises(ValueError, match="must be above 0; got chunk 0"):
        StepCost(chunk=0)
    with pytest.raises(ValueError, match="fixed_s, token_s and attention must be 0 or more"):
        TrainCost(token_s=-1.0)
