"""Equality with TRL 1.16 of reward: loss, every gradient and metrics, both in float32.

A real `RewardTrainer` opens the folder that we save and gets the ids of transformers' `apply_chat_template`: padding,
and where the score is read, are its own. Ties have no counterpart there: a pair of equals is the mean of its two
losses, TRL's as well.

`pytest -s tests/equality` prints the table.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gymtune.agents import Renderer, Trajectory
from gymtune.agents.models import load_model, save_classifier
from gymtune.agents.replay import whole_conversation
from gymtune.tools.messages import Message, assistant, system, user
from gymtune.trainers import TrainConfig
from gymtune.trainers.batch import make_rows
from gymtune.trainers.critic import Critic
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.reward import Reward
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

FP32 = 1e-5  # loss, entries of the gradient, metrics: two float32 ways to the same number
SHARE = 1e-5  # norm of the difference of a parameter's two gradients, as a share of that of the gradient
DIFFERENT = 1e-2  # two settings are at least so far apart, or one of them would show nothing
METRICS = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
}
RESULT: Message = {"role": "tool", "tool_call_id": "1", "content": "3"}
#: prompt, chosen, rejected, tools, margin
PAIRS: list[tuple[list[Message], list[Message], list[Message], list[Any], float]] = [
    ([user("What is 1 + 2?")], [assistant("3")], [assistant("It is 4, or 5.")], [], 0.5),
    ([system("Be brief."), user("Hi")], [assistant("Hello!")], [assistant("")], [], 2.0),
    ([user("Add 1 and 2.")], [CALL, RESULT, assistant("3")], [assistant("4")], TOOLS, -1.0),
    ([user("What is 7 + 5? " * 4)], [assistant("12 " * 9)], [assistant("7")], [], 0.0),
]


@dataclass(frozen=True)
class Setting:
    """One comparison: `changes` to the preset, `theirs` options of TRL; `tied`: every pair is one of equals."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False


CENTRED = {"center_rewards_coefficient": 0.05}
SETTINGS = [
    Setting("preset"),
    Setting("micro-batches", {"micro_batch_tokens": 30}),
    Setting("margins", {"margin": "column"}),
    Setting("centred", CENTRED, CENTRED),
    Setting("margins, centred", {"margin": "column"} | CENTRED, CENTRED),
    Setting("ties", {"ties": "half"}, tied=True),
]


@dataclass(frozen=True)
class Outcome:
    """What one side computed."""

    loss: float
    gradient: dict[str, Tensor]
    metrics: dict[str, float]


def head() -> Tensor:
    return 0.2 * torch.randn(1, 32, generator=torch.Generator().manual_seed(0))


def ours(folder: Path, weights: Mapping[str, Tensor], setting: Setting) -> Outcome:
    """Run a setting as `Trainer` does: experiences, annotate, credit, rows, gradient."""
    config = TrainConfig(algo="reward", model="unused", output_dir="unused", data="unused", **setting.changes)
    model, renderer = load_model(folder), Renderer.from_folder(folder)
    critic = Critic(model)
    with torch.no_grad():
        critic.head.weight.copy_(head())
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    updater = Updater(model, Reward(config), config, critic=critic)
    trajectories = [
        _trajectory([*prompt, *reply], tools, margin, reward=float(chosen and not setting.tied))
        for prompt, *replies, tools, margin in PAIRS
        for chosen, reply in zip((True, False), replies, strict=True)
    ]
    experiences = experiences_of([whole_conversation(t, renderer) for t in trajectories], need_logprobs=False)
    updater.annotate(experiences)
    updater.algorithm.credit(experiences)
    stats = UpdateStats()
    loss = updater._gradient(make_rows(experiences), stats, warming=False)
    names = {name: name.replace("critic.head", "score") for name in updater.named}
    return Outcome(loss, {names[n]: p.grad.clone() for n, p in updater.named.items()}, stats.metrics())


def _trajectory(messages: list[Message], tools: list[Any], margin: float, *, reward: float) -> Trajectory:
    trajectory = Trajectory(trajectory_id="t", group_id="g", task_id="t", env_id="E-v0", task_index=0)
    trajectory.messages, trajectory.tools, trajectory.metadata = messages, json.dumps(tools), {"margin": margin}
    trajectory.append_turn("said", "stop")
    trajectory.turns[-1].reward = reward
    return trajectory


@pytest.fixture(scope="module")
def theirs(
    trl: Any, tiny_model: Path, weights: Callable[[float], Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Setting], Outcome]:
    """Return the function that runs a setting through TRL's trainer, from messages on."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    disable_progress_bars()
    scratch = tmp_path_factory.mktemp("trl_reward")
    folder, model = scratch / "reward", load_model(tiny_model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(0.0)[name])
    save_classifier(model, head(), folder, tiny_model, Renderer.from_folder(tiny_model).stop_ids)

    def run(setting: Setting) -> Outcome:
        with_margin = "margin" in setting.changes
        sides = ("chosen", "rejected")
        rows = [
            {side: json.dumps([*prompt, *reply]) for side, reply in zip(sides, replies, strict=True)}
            | {"tools": json.dumps(tools)}
            | ({"margin": margin} if with_margin else {})
            for prompt, *replies, tools, margin in PAIRS
        ]
        opened = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        keys = {"output_dir": str(scratch / "run"), "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
        keys |= {"per_device_train_batch_size": len(PAIRS), "gradient_checkpointing": False, "max_length": None}
        trainer = trl.RewardTrainer(
            model=opened,
            args=trl.RewardConfig(**keys, **setting.theirs),
            train_dataset=Dataset.from_list([_ids(row, tokenizer) for row in rows]),
            processing_class=tokenizer,
        )
        trainer.model.train()
        inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(len(PAIRS))])
        loss = trainer.compute_loss(trainer.model, inputs)
        if setting.tied:
            half = len(PAIRS)
            swapped = {
                key: torch.cat((value[half:], value[:half])) for key, value in inputs.items() if key != "use_cache"
            }
            loss = (loss + trainer.compute_loss(trainer.model, swapped)) / 2
        loss.backward()
        gradient = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
        return Outcome(float(loss.detach()), gradient, metrics)

    return run


def _ids(row: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return a row with the ids of `apply_chat_template`, as TRL's own preparation makes them of messages.

    Not by it: a table of messages gives every message every key, and every call every argument.
    """
    tools = json.loads(row["tools"]) or None
    ids = {
        f"{side}_ids": tokenizer.apply_chat_template(json.loads(row[side]), tools=tools)["input_ids"]
        for side in ("chosen", "rejected")
    }
    return ids | ({"margin": row["margin"]} if "margin" in row else {})


@pytest.fixture(scope="module")
def outcomes(
    theirs: Callable[[Setting], Outcome], tiny_model: Path, weights: Callable[[float], Any]
) -> Callable[[Setting], tuple[Outcome, Outcome]]:
    """Run a setting on both sides, once."""
    known: dict[str, tuple[Outcome, Outcome]] = {}

    def of(setting: Setting) -> tuple[Outcome, Outcome]:
        if setting.name not in known:
            mine = ours(tiny_model, weights(0.0), setting)
            with warnings.catch_warnings(action="ignore"):  # TRL calls what transformers will drop
                known[setting.name] = mine, theirs(setting)
        return known[setting.name]

    return of


@pytest.fixture(scope="module")
def table() -> Iterator[Callable[..., None]]:
    """Take in rows of a table and print it in the end."""
    head = ("algorithm", "setting", "loss", "gradient, largest", "gradient, share of worst parameter")
    rows = [" | ".join(head), " | ".join(["---"] * len(head))]

    def add(setting: Setting, *differences: float) -> None:
        rows.append(" | ".join(["reward", setting.name, *(f"{value:.1e}" for value in differences)]))

    yield add
    print("\n\nDifferences from TRL 1.16, float32:\n" + "\n".join(f"| {row} |" for row in rows))


def flat(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


def share(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference as a share of their norm."""
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_equal(setting: Setting, outcomes: Callable[[Setting], Any], table: Callable[..., None]) -> None:
    ours, theirs = outcomes(setting)
    assert ours.gradient.keys() == theirs.gradient.keys()
    off_loss = abs(ours.loss - theirs.loss)
    off_largest = float((flat(ours.gradient) - flat(theirs.gradient)).abs().max())
    off_share = max(share(ours.gradient[name], theirs.gradient[name]) for name in theirs.gradient)
    table(setting, off_loss, off_largest, off_share)
    assert off_loss < FP32
    assert off_largest < FP32
    assert off_share < SHARE


@pytest.mark.parametrize("setting", [s for s in SETTINGS if not s.tied], ids=lambda setting: setting.name)
def test_metrics_are_theirs(setting: Setting, outcomes: Callable[[Setting], Any]) -> None:
    ours, theirs = outcomes(setting)
    assert {name for name in METRICS if name in theirs.metrics} == set(METRICS)
    for name in METRICS:
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], abs=FP32), name


def test_every_setting_is_another_gradient(outcomes: Callable[[Setting], Any]) -> None:
    gradients = {s.name: flat(outcomes(s)[0].gradient) for s in SETTINGS if s.name != "micro-batches"}
    for first, second in combinations(gradients, 2):
        assert share(gradients[first], gradients[second]) > DIFFERENT, (first, second)
