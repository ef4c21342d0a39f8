"""A toy that a small model learns in seconds: say the digit that was named. And a model that mostly guesses."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import gymnasium
import pytest
import torch

from gymtune.agents import FunctionAgent, ScriptedAgent, TrajectoryWriter, rollout
from gymtune.agents.models import init_model
from gymtune.envs import ChatEnv, Task
from gymtune.rewards.components import gt_component
from gymtune.rewards.numeric import NumericChecker
from gymtune.tools.messages import Message, assistant, user
from gymtune.trainers import Listeners, TrainConfig, train

TOY = "gymtune-test/Echo-v0"


class EchoEnv(ChatEnv):
    """Say `d` when asked to: ten tasks, and one guess in ten is right."""

    def __init__(self, **options: Any) -> None:
        tasks = [
            Task(f"echo/{d}", (user(f"Say {d}."),), str(d), ({"role": "assistant", "content": str(d)},))
            for d in range(10)
        ]
        super().__init__(tasks, [gt_component(NumericChecker())], max_turns=1, **options)


if TOY not in gymnasium.registry:
    gymnasium.register(TOY, entry_point=EchoEnv)


@pytest.fixture(scope="session")
def echo_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Gold episodes (`right`), and episodes that answer with any digit seven times in ten (`guesses`)."""
    folder = tmp_path_factory.mktemp("echo")
    rng = Random(0)

    def guess(messages: Sequence[Message]) -> str:
        named = messages[-1]["content"][len("Say ")]
        return named if rng.random() < 0.3 else str(rng.randrange(10))

    agents = {"right": ScriptedAgent(), "guesses": FunctionAgent(guess)}
    for name, agent in agents.items():
        with TrajectoryWriter(folder / f"{name}.jsonl") as writer:
            for trajectory in rollout(TOY, agent, 10, num_generations=60):
                writer.append(trajectory)
    return {name: folder / f"{name}.jsonl" for name in agents}


@pytest.fixture(scope="session")
def opinions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of pairs (`pairs`): the digit that was named and another one. And of the same as `labels`.

    In the pairs of `held_out` the tasks end without a full stop.
    """
    folder = tmp_path_factory.mktemp("opinions")
    records: dict[str, list[dict[str, Any]]] = {"pairs": [], "held_out": [], "labels": []}
    for d, wrong in ((d, wrong) for d in range(10) for wrong in range(10) if d != wrong):
        prompt, good, bad = [user(f"Say {d}.")], [assistant(str(d))], [assistant(str(wrong))]
        records["pairs"].append({"prompt": prompt, "chosen": good, "rejected": bad})
        records["held_out"].append({"prompt": [user(f"Say {d}")], "chosen": good, "rejected": bad})
        records["labels"] += [{"prompt": prompt, "completion": said, "label": said is good} for said in (good, bad)]
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return {name: folder / f"{name}.jsonl" for name in records}


@pytest.fixture(scope="session")
def learnt() -> Iterator[Callable[..., None]]:
    """Note what an algorithm reached; the table is printed at the end (`pytest -s`, `make test-learns`)."""
    table: dict[str, dict[str, Any]] = {}

    def note(algo: str, **found: Any) -> None:
        table.setdefault(algo, {}).update(found)

    yield note
    heads = ("algorithm", "floor", "reached", "seconds", "with its loss replaced by 0", "with shuffled rewards")
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for algo, row in table.items():
        cells = [
            f"{row[key]:.2f}" if key in row else "-" for key in ("floor", "reached", "seconds", "without", "shuffled")
        ]
        print(f"| {algo} | {' | '.join(cells)} |")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, list[dict[str, Any]]]]:
    """Train and return the finished model and the lines of metrics."""

    def make(**options: Any) -> tuple[Path, list[dict[str, Any]]]:
        lines: list[dict[str, Any]] = []
        config = TrainConfig(output_dir=str(tmp_path_factory.mktemp("learns") / "run"), save_steps=0, **options)
        return train(config, listeners=Listeners(on_step=lines.append)), lines

    return make


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer that knows nothing."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("fresh") / "model"
    texts = [*(f"Say {d}." for d in range(10)), "user", "assistant"] * 2
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "max_position_embeddings": 64}
    init_model(folder, texts=texts, vocab_size=300, **sizes)
    return folder


@pytest.fixture(scope="session")
def guesser(fresh: Path, echo_files: dict[str, Path], run: Callable[..., Any]) -> Path:
    """`fresh` taught by guesses: right about four times in ten, which is where the RL algorithms start."""
    steps = {"max_steps": 100, "learning_rate": 1e-2, "warmup_steps": 10}
    return run(algo="sft", model=str(fresh), data=str(echo_files["guesses"]), **steps)[0]
