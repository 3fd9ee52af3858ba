"""The catalogue: names that can be imported, algorithms that can be made, contradictions that name both keys."""

import dataclasses
import re

import pytest

from rollart.algo.catalogue import ALGORITHMS, PIECES, function, parts, resolve
from rollart.algo.listing import block, listing
from rollart.algo.settings import AlgoSettings
from rollart.config.toml import build
from rollart.core.errors import ConfigError


def test_names_are_unique_and_their_keys_are_settings():
    names = [(piece.kind, piece.name) for piece in PIECES]
    assert len(set(names)) == len(names)
    fields = {field.name for field in dataclasses.fields(AlgoSettings)}
    assert all(set(piece.keys) <= fields for piece in PIECES)
    assert all(set(changes) <= fields for changes in ALGORITHMS.values())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_is_a_toml_block_that_gives_it_back(name):
    import tomllib
    table = tomllib.loads(block(name))["algorithm"]
    assert build(AlgoSettings, table, "algorithm") == AlgoSettings.named(name)


def test_the_listing_has_every_piece_with_its_formula_and_says_what_an_algorithm_changes():
    text = "\n".join(line for _, line in listing())
    assert all(piece.name in text and piece.formula in text for piece in PIECES)
    assert 'loss = "gspo", aggregation = "sequence_mean"' in text
    one = "\n".join(line for _, line in listing("gspo"))
    assert "exp(mean of log R" in one
    assert "with a critic" not in one
    with pytest.raises(ConfigError, match=r"algorithm\.name must be one of grpo, .*; got 'gppo'"):
        list(listing("gppo"))


def test_a_key_that_is_given_goes_before_the_algorithms_own():
    assert resolve({"name": "gspo", "clip_high": 0.1})["clip_high"] == 0.1
    assert AlgoSettings.named("ppo", value_clip=0.0).value_clip == 0
    assert parts("tis+staleness") == ("tis", "staleness")
    assert parts("none") == ()


def test_a_piece_of_ones_own_may_read_any_key_of_its_kind():
    assert AlgoSettings(loss="mine:loss", clip_low=0.1).clip_low == 0.1
    with pytest.raises(ValueError, match="clip_low"):
        AlgoSettings(advantage="mine:advantage", loss="reinforce", clip_low=0.1)


@pytest.mark.parametrize(("changes", "first", "second"), [
    ({"value_clip": 0.2}, "value_clip", "advantage"),
    ({"critic_rate": 1e-3}, "critic_rate", "advantage"),
    ({"gae_lambda": 0.9}, "gae_lambda", "advantage"),
    ({"kl_coefficient": 0.1}, "kl_coefficient", "reference"),
    ({"reference": "copy"}, "reference", "kl_coefficient"),
    ({"correction": "icepop", "band_low": 3.0, "band_high": 2.0}, "band_low", "band_high"),
    ({"correction": "geometric_mask", "geometric_low": 1.2}, "geometric_low", "geometric_high"),
    ({"truncated": "bootstrap"}, "truncated", "advantage"),
    ({"aggregation": "constant_length"}, "aggregation", "aggregation_tokens"),
    ({"aggregation_tokens": 100}, "aggregation_tokens", "aggregation"),
    ({"ratio": "behaviour"}, "correction", "ratio"),
    ({"ratio": "behaviour", "correction": "none", "loss": "reinforce"}, "ratio", "loss"),
    ({"ratio": "behaviour", "correction": "none", "proximal": "approximated"}, "proximal", "ratio"),
    ({"correction": "none", "importance_cap": 3.0}, "importance_cap", "correction"),
    ({"step_weight": 2.0}, "step_weight", "advantage"),
    ({"dual_clip": 3.0, "loss": "cispo"}, "dual_clip", "loss"),
    ({"overlong_tokens": 100}, "overlong_tokens", "overlong_cache"),
    ({"overlong_cache": 100}, "overlong_cache", "overlong_tokens"),
    ({"overlong_share": 0.1}, "overlong_share", "filter"),
    ({"loss": "reinforce", "clip_high": 9.0}, "clip_high", "loss"),
    ({"loss": "cispo", "clip_low": 0.1}, "clip_low", "loss"),
    ({"loss": "reinforce", "correction": "none", "proximal": "approximated"}, "proximal", "loss"),
    ({"advantage": "rloo", "advantage_eps": 1.0}, "advantage_eps", "advantage"),
    ({"kl_value": "k1"}, "kl_value", "kl_coefficient"),
])
def test_contradictions_are_refused_with_both_keys_named(changes, first, second):
    with pytest.raises(ConfigError, match=rf"algorithm: {first} = .*\b{second} = ") as raised:
        build(AlgoSettings, resolve(changes), "algorithm")
    assert "\n" not in str(raised.value)


def test_a_piece_of_ones_own_is_named_by_module_and_function(monkeypatch):
    settings = AlgoSettings(advantage="own_pieces:ranks", loss="own_pieces:hinge")
    with pytest.raises(ConfigError, match=r"algorithm\.loss = 'own_pieces:hinge' cannot be imported"):
        function("loss", settings.loss)
    assert function("advantage", "rollart.algo.advantages:plain").__name__ == "plain"
    with pytest.raises(ValueError, match=re.escape("a function of your own as module:function; got 'hinge'")):
        AlgoSettings(loss="hinge")
