"""What is said before anything starts. Needs no vLLM."""

import importlib.metadata
import json
import struct

import pytest

from rollart.backends.vllm import checks
from rollart.backends.vllm.handover import coverage, shapes_of
from rollart.backends.vllm.settings import ServerSettings, VLLMSettings
from rollart.config.recipe import PoolSettings
from rollart.core.errors import ConfigError

CONFIG = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 512}


@pytest.mark.parametrize(("settings", "line"), [
    ({"tensor_parallel": 2}, "tensor_parallel = 2 must divide the model's 9 heads"),
    ({"context_tokens": 600}, "at most the model's 512; got 600"),
])
def test_settings_that_do_not_fit_the_model_are_refused_in_one_line(settings, line):
    with pytest.raises(ConfigError, match=line):
        checks.check_model(CONFIG, VLLMSettings(**settings))


def test_context_is_the_smaller_of_settings_and_model(tmp_path):
    assert checks.check_model(CONFIG, VLLMSettings(tensor_parallel=3)) == 512
    assert checks.check_model(CONFIG, VLLMSettings(context_tokens=100)) == 100
    with pytest.raises(ConfigError, match="Hugging Face checkpoint folder"):
        checks.read_config(tmp_path)


@pytest.mark.parametrize(("installed", "line"), [
    ({}, "needs vLLM, which is not installed"), ({"vllm": "0.11.2"}, r"vllm 0\.11\.2 has no weight update"), ])
def test_an_environment_without_vllm_or_with_an_old_one_is_refused(monkeypatch, installed, line):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match=line):
        checks.check_vllm()


@pytest.mark.parametrize("wrong", [
    {"dtype": "int8"}, {"eager": "sometimes"}, {"kv_gb": -1.0}, {"max_concurrent": 0}, {"tensor_parallel": 0},
    {"gpu_memory_utilization": 1.5}, {"answer_seconds": 0.0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VLLMSettings(**wrong)


def test_server_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="above 0"):
        ServerSettings(seconds=0.0)


@pytest.mark.parametrize(("pool", "line"), [
    ({"engine": "server"}, "needs 1 urls; got 0"), ({"urls": ("http://a:1",)}, "needs no urls; got 1"),
    ({"engine": "server", "urls": ("10.0.0.1:8000",)}, "must begin with http://"),
])
def test_a_pool_of_servers_has_as_many_urls_as_replicas(pool, line):
    with pytest.raises(ValueError, match=line):
        PoolSettings(**pool)


def test_coverage_names_what_is_missing_unknown_or_of_another_shape(tmp_path):
    header = json.dumps({"__metadata__": {}, "a": {"shape": [2, 3]}, "b": {"shape": [4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    expected = shapes_of(tmp_path)
    assert expected == {"a": (2, 3), "b": (4,)}
    assert coverage(expected, {"a": (2, 3), "b": (4,), "lm_head.weight": (2, 3)}, tied=True) == ""
    assert coverage(expected, {"a": (3, 2), "c": (1,)}, tied=False) == (
        "missing: b; unknown: c; of another shape: a")
    assert coverage({}, {"a": (1,)}, tied=False) == ""
