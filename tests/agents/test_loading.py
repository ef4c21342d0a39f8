"""From a folder to an agent, and what is refused on the way."""

import shutil
from pathlib import Path

import pytest

from gymtune.agents import Sampling
from gymtune.agents.loading import load_agent, make_sampling
from gymtune.tools.errors import ConfigError, ModelError


def test_the_agent_has_the_model_the_renderer_and_the_sampling(tiny_model: Path) -> None:
    import torch

    agent = load_agent(tiny_model, Sampling(temperature=0.5), concurrency=3, dtype="bfloat16")
    assert agent.sampling == Sampling(temperature=0.5)
    assert agent.backend.model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert agent.max_model_length == 512
    assert agent.backend.cache.slots == 3


def test_wrong_places_and_sizes_are_named(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown dtype 'float23'\. Did you mean 'float32'"):
        load_agent(tiny_model, dtype="float23")
    with pytest.raises(ConfigError, match="device 'tpu' is not there"):
        load_agent(tiny_model, device="tpu")
    with pytest.raises(ConfigError, match=r"sampling: top_p: .*greater than 0 \(got '0.0'\)"):
        make_sampling(top_p=0.0)
    assert make_sampling(temperature=0.0, top_k=5) == Sampling(temperature=0.0, top_k=5)


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_a_folder_that_lacks_a_file_is_named(tiny_model: Path, tmp_path: Path, missing: str) -> None:
    shutil.copytree(tiny_model, tmp_path / "m")
    (tmp_path / "m" / missing).unlink()
    with pytest.raises(ModelError, match=f"{tmp_path}/m.*{missing}"):
        load_agent(tmp_path / "m")
