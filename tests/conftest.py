"""What every test may ask for: one tiny model a session, and one CPU thread."""

import os
import sys
from pathlib import Path

# Before torch is imported, so that tests which do not need it do not load it. Subprocesses inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

sys.path.insert(0, str(Path(__file__).parent / "sglang"))

from sglang_fixtures import double, free_port, server, sglang_model, sglang_python, sglang_server  # noqa: F401


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen3 model (hidden 32, 2 layers) with a tokenizer that knows the words of our envs."""
    import torch

    from gymtune.agents.models import init_model
    from gymtune.envs import make_env
    from gymtune.envs.tasks import gold_texts

    torch.set_num_threads(1)
    texts = []
    for name in ("gymtune/Calculator-v0", "gymtune/Arithmetic-v0"):
        env = make_env(name)
        for index in range(40):
            task = env.tasks[index]
            assert task.gold is not None
            texts += [message["content"] for message in task.messages]
            texts += gold_texts(task.gold, env.chat_format)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    init_model(
        folder,
        texts=texts,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=384,
        max_position_embeddings=512,
    )
    return folder


@pytest.fixture(scope="session")
def tiny_renderer(tiny_model: Path):
    """The renderer of `tiny_model`."""
    from gymtune.agents.renderer import Renderer

    return Renderer.from_folder(tiny_model)


@pytest.fixture(scope="session")
def sums_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of 400 gold episodes of one-digit sums, messages only."""
    from gymtune.agents import ScriptedAgent, TrajectoryWriter, rollout

    path = tmp_path_factory.mktemp("sums") / "gold.jsonl"
    with TrajectoryWriter(path) as writer:
        for trajectory in rollout("gymtune/Arithmetic-v0", ScriptedAgent(), 400):
            writer.append(trajectory)
    return path


@pytest.fixture(scope="session")
def taught_model(tiny_model: Path, sums_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_model` after some SFT on sums: it answers with numbers, now and then with the right one."""
    from gymtune.trainers import TrainConfig, train

    run = tmp_path_factory.mktemp("taught") / "run"
    where = {"model": str(tiny_model), "output_dir": str(run), "data": str(sums_file)}
    return train(TrainConfig(algo="sft", **where, max_steps=120, learning_rate=1e-2, batch_size=32, save_steps=0))


@pytest.fixture(scope="session")
def sampled_file(taught_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of 24 groups of 4 one-digit sums, sampled by `taught_model`, with log-probs."""
    from gymtune.agents import Sampling, TrajectoryWriter, rollout
    from gymtune.agents.loading import load_agent

    path = tmp_path_factory.mktemp("sampled") / "groups.jsonl"
    agent = load_agent(taught_model, Sampling(max_new_tokens=4))
    with TrajectoryWriter(path) as writer:
        for trajectory in rollout("gymtune/Arithmetic-v0", agent, 24, num_generations=4):
            writer.append(trajectory)
    return path
