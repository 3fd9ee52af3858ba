"""The hand-over of weights: whole or not at all (T9)."""

import pytest
import torch

from rollart.backends.torch.settings import SmallModel
from rollart.backends.torch.transformer import small_model
from rollart.backends.weights.memory import MemoryWeights, checksum, load_into
from rollart.core.errors import EngineLost

TINY = SmallModel(layers=1, width=16, heads=2, kv_heads=1, mlp=16, vocabulary=32)


def test_what_is_got_is_what_was_put_even_after_training_went_on():
    model, weights = small_model(TINY, 0), MemoryWeights()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    manifest = weights.put(3, model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    got = weights.get(manifest)
    assert all(torch.equal(got[name], before[name]) for name in before)
    assert (manifest.version, manifest.nbytes) == (3, sum(t.nbytes for t in before.values()))
    assert manifest.checksum == checksum(before)


def test_dropped_or_replaced_weights_are_not_served():
    weights = MemoryWeights()
    first = weights.put(1, {"a": torch.zeros(3)})
    weights.put(1, {"a": torch.ones(3)})
    with pytest.raises(EngineLost, match="checksum"):
        weights.get(first)
    weights.drop(first)
    weights.drop(first)
    with pytest.raises(EngineLost, match="version 1 are not held"):
        weights.get(first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_sees_one_changed_value_a_swap_a_name_and_a_shape(dtype):
    base = {"a": torch.arange(1000).to(dtype), "b": torch.ones(3, 5, dtype=dtype)}
    digests = {checksum(base)}
    one = base["a"].clone()
    one[500] += 4
    swapped = base["a"].clone()
    swapped[[10, 20]] = swapped[[20, 10]]
    for other in ({**base, "a": one}, {**base, "a": swapped}, {"a": base["a"], "c": base["b"]},
                  {**base, "b": base["b"].view(5, 3)}):
        digests.add(checksum(other))
    assert len(digests) == 5
    assert checksum(dict(reversed(base.items()))) == checksum(base)


def test_a_model_is_changed_by_fitting_tensors_only():
    model, other = small_model(TINY, 0), small_model(TINY, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = other.state_dict()
    wrong = {name: t for name, t in tensors.items() if name != "model.norm.weight"} | {
        "extra": torch.zeros(1), "model.embed_tokens.weight": torch.zeros(2, 16)}
    with pytest.raises(ValueError, match=r"missing tensors: model\.norm\.weight; unknown tensors: extra; wrong shapes: "
                                         r"model\.embed_tokens\.weight is \[2, 16\] where the model has \[32, 16\]"):
        load_into(model, wrong)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    load_into(model, tensors)
    assert checksum(model.state_dict()) == checksum(tensors)
