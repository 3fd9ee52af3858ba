import json
from pathlib import Path

import pytest

from rollart.config.recipe import from_tables, load_recipe
from rollart.config.reference import reference
from rollart.config.toml import override
from rollart.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALLEST = {"domains": {"calculator": {}}}


def test_the_reference_page_has_every_key():
    assert (ROOT / "docs" / "recipes.md").read_text().strip() == reference().strip(), (
        "run: python -m rollart.config.reference > docs/recipes.md")


TRAINING = [path for path in sorted((ROOT / "recipes").glob("*.toml")) if not path.stem.startswith("sim_")]


def test_a_simulation_recipe_is_not_for_training():
    with pytest.raises(ConfigError, match=r"\[train\] belongs to a simulation recipe: use rollart simulate"):
        load_recipe(ROOT / "recipes" / "sim_paper.toml")


@pytest.mark.parametrize("path", TRAINING, ids=lambda p: p.stem)
def test_every_recipe_that_ships_is_valid_and_makes_itself_again(path):
    recipe = load_recipe(path)
    tables = json.loads(json.dumps(recipe.to_json()))
    assert json.loads(json.dumps(from_tables(tables).to_json())) == tables


@pytest.mark.parametrize(("path", "value", "words"), [
    ("rollout.batch_groups", 0, "batch_groups must be at least 1"),
    ("rollout.min_members", 9, "between 0 and group_size = 8"),
    ("rollout.open_seconds", 0, r"rollout\.open_seconds must be above 0; got 0"),
    ("sampling.top_p", 0.9, "top_p = 1"),
    ("sampling.temperature", 0.0, "temperature"),
    ("reward.score_seconds", 100.0, "does not fit into"),
    ("pools.default.domains", ["calculatr"], "did you mean 'calculator'"),
    ("algorithm.clip_low", 2.0, "clip_low"),
    ("learner.learning_rate", "fast", "learner.learning_rate"),
    ("engine.context_tokens", 8, "does not fit a context of 8"),
    ("domains.calculator.weight", 0, "weight above 0"),
    ("domains.calculator.latency.distribution", "odd", "latency"),
    ("domains.calculator.curriculum", 3, "must have lists of settings"),
    ("domains.calculator.curriculum.highest", 3, "must have lists of settings"),
    ("domains.calculator.curriculum.highest", [], "need one length"),
    ("domains.calculator.curriculum.highest", [5, 100], "highest must lie between 1 and 99; got 100"),
    ("domains.calculator.curriculum.higest", [5, 9], "did you mean 'highest'"),
    ("seed", "zero", "seed must be int"),
    ("warm_start.error_rate", 2.0, "between 0 and 1"),
])
def test_what_cannot_be_is_refused_with_the_key_and_the_value(path, value, words):
    tables = json.loads(json.dumps(SMALLEST))
    override(tables, [f"{path}={json.dumps(value)}"])
    with pytest.raises(ConfigError, match=words) as error:
        from_tables(tables)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("tables", "words"), [
    ({"algorithm": {"name": "gppo"}}, r"algorithm\.name must be one of grpo"),
    ({"algorithm": {"value_clip": 0.2}}, r"algorithm: value_clip = 0\.2 .* advantage = 'grpo'"),
    ({"algorithm": {"kl_coefficient": 0.1}}, r"algorithm: kl_coefficient = 0\.1 .* reference = 'none'"),
    ({"algorithm": {"kl_coefficient": 0.1, "reference": "adapter_off"}}, r"adapter_off' needs an adapter: set \[lora"),
    ({"rollout": {"group_size": 1}}, r"algorithm\.advantage = 'grpo' .* rollout\.group_size must be at least 2; got 1"),
    ({"algorithm": {"router_coefficient": 0.1}}, r"router_coefficient = 0\.1 .* model\.small\.experts = 0"),
    ({"model": {"small": {"experts": 4}}}, r"experts = 4 .* experts_per_token .* 0"),
    ({"chat": {"tools": "hermes"}}, r"\[chat\] .* model\.path"),
    ({"lora": {"rank": 0}}, "rank must be at least 1"),
])
def test_a_learning_rule_that_contradicts_itself_or_the_run_is_refused(tables, words):
    with pytest.raises(ConfigError, match=words) as error:
        from_tables({**SMALLEST, **tables})
    assert "\n" not in str(error.value)


def test_an_algorithm_by_name_is_written_out_in_full_and_reads_back_the_same():
    recipe = from_tables({**SMALLEST, "algorithm": {"name": "ppo", "gae_lambda": 0.9}, "rollout": {"group_size": 1},
                          "lora": {"rank": 4}})
    assert (recipe.algorithm.advantage, recipe.algorithm.value_clip, recipe.algorithm.gae_lambda) == ("gae", 0.2, 0.9)
    assert from_tables(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_wait_and_spare_groups_exclude_each_other():
    with pytest.raises(ConfigError, match="spare_groups must be 0; got 1"):
        from_tables({**SMALLEST, "schedule": {"stale": "wait"}, "rollout": {"spare_groups": 1}})


def test_no_domain_is_refused():
    with pytest.raises(ConfigError, match="at least one task domain"):
        from_tables({})


def test_an_override_reads_toml_values_and_plain_words():
    tables: dict = {}
    override(tables, ["a.b=3", "a.c=[1, 2]", "a.d=word", 'a.e="3"'])
    assert tables == {"a": {"b": 3, "c": [1, 2], "d": "word", "e": "3"}}


def test_several_domains_of_one_class_have_names_of_their_own():
    url = {"class": "http", "arguments": {"level": 2}}
    far = {**url, "id": "http://b", "weight": 2}
    recipe = from_tables({"domains": {"near": {**url, "id": "http://a"}, "far": far}})
    assert from_tables(json.loads(json.dumps(recipe.to_json()))) == recipe
    domains = [recipe.domain(name) for name in recipe.domains]
    assert [domain.task(0, "train").domain for domain in domains] == ["near", "far"]
    assert [(domain.settings.id, domain.settings.arguments) for domain in domains] == [
        ("http://a", {"level": 2}), ("http://b", {"level": 2})]
    with pytest.raises(ConfigError, match="domain near has no setting 'idd': did you mean 'id'"):
        from_tables({"domains": {"near": {"class": "http", "idd": "http://a"}}})

