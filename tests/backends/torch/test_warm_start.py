"""Imitation learns what it is shown and only action tokens; the cache is whole or absent."""

import json
import math
import random

import pytest
import torch

from rollart.backends.torch.settings import SmallModel, WarmStartSettings
from rollart.backends.torch.transformer import small_model
from rollart.backends.torch.warm_start import cached, imitate, store
from rollart.core.errors import ConfigError

SHAPE = SmallModel(layers=2, width=32, heads=2, kv_heads=1, mlp=48, vocabulary=20)
SETTINGS = WarmStartSettings(passes=40, batch_tokens=200, learning_rate=1e-2)


def demonstrations(count=120):
    """Prompt x; action (3x + 1) mod 10; a random reply; the same action again."""
    chance = random.Random(0)
    shown = []
    for _ in range(count):
        x = chance.randrange(10)
        noise = [chance.randrange(20) for _ in range(chance.randrange(1, 5))]
        action = (3 * x + 1) % 10
        shown.append(([19, x, action, *noise, action], [0, 0, 1, *[0] * len(noise), 1]))
    return shown


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_imitation_learns_the_demonstrated_actions_within_seconds():
    seen = []
    result = imitate(small_model(SHAPE, 0), demonstrations(), SETTINGS, 1, lambda *now: seen.append(now))
    assert result["first_loss"] == pytest.approx(math.log(20), abs=0.1)
    assert result["last_loss"] < 0.1
    assert [step for step, _, _ in seen] == list(range(1, int(result["steps"]) + 1))
    assert result["tokens"] == 40 * sum(len(ids) for ids, _ in demonstrations())


def test_imitation_is_a_function_of_model_sequences_and_settings():
    runs = [small_model(SHAPE, 0) for _ in range(3)]
    for model, seed in zip(runs, (0, 0, 1), strict=True):
        imitate(model, demonstrations(30), WarmStartSettings(passes=1, batch_tokens=200, seed=seed), 1)
    assert torch.equal(weights(runs[0]), weights(runs[1]))
    assert not torch.equal(weights(runs[0]), weights(runs[2]))


def test_only_action_tokens_are_imitated():
    tail = [([*ids, 7, 7], [*mask, 0, 0]) for ids, mask in demonstrations(8)]
    whole = WarmStartSettings(passes=2, batch_tokens=10_000)
    plain, longer = small_model(SHAPE, 0), small_model(SHAPE, 0)
    imitate(plain, demonstrations(8), whole, 1)
    imitate(longer, tail, whole, 1)
    assert torch.equal(weights(plain), weights(longer))


def test_nothing_to_imitate_is_the_users_mistake():
    with pytest.raises(ConfigError, match="got none"):
        imitate(small_model(SHAPE, 0), [], SETTINGS, 1)


@pytest.mark.parametrize("bad", [{"demonstrations": 0}, {"error_rate": 1.5}, {"learning_rate": 0.0},
                                 {"schedule": "step"}, {"error_rates": {"maze": -1}}, {"weight_decay": -1.0}])
def test_settings_name_the_field_that_is_wrong(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        WarmStartSettings(**bad)


KEY = {"model": "small", "seed": 3}


def test_the_cache_finds_what_was_stored_under_the_same_content(tmp_path):
    assert cached(tmp_path, KEY) is None
    made = store(tmp_path, KEY, lambda folder: (folder / "weights").write_text("w"))
    assert cached(tmp_path, {"seed": 3, "model": "small"}) == made
    assert (made / "weights").read_text() == "w"
    assert json.loads((made / "key.json").read_text()) == KEY
    assert cached(tmp_path, {**KEY, "seed": 4}) is None


def test_a_folder_without_its_marker_is_not_found_and_made_again(tmp_path):
    made = store(tmp_path, KEY, lambda folder: None)
    (made / "complete").unlink()
    assert cached(tmp_path, KEY) is None
    assert store(tmp_path, KEY, lambda folder: None) == cached(tmp_path, KEY)


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store(tmp_path, KEY, fail)
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_make_the_same_the_first_is_kept(tmp_path):
    def slow(folder):
        (folder / "by").write_text("second")
        store(tmp_path, KEY, lambda other: (other / "by").write_text("first"))

    made = store(tmp_path, KEY, slow)
    assert (made / "by").read_text() == "first"
    assert list(tmp_path.iterdir()) == [made]
