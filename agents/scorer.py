"""Scorer: what an env cannot score alone. It runs over finished trajectories, a batch of whole groups at a time.

Reward models, judges and TRL-style functions see the conversation; each adds a component to the last turn. One scorer
serves rollout and training, so that a reward means the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..rewards.components import Component
from ..rewards.functions import (
    ConversationScorer,
    RewardFunction,
    Scores,
    call_function,
    call_scorer,
    load_function,
)
from ..rewards.registry import load_object
from ..tools.errors import ConfigError
from .trajectory import Trajectory

REWARD_MODEL = "reward_model"

#: Scores a batch: trajectories, every one of them finished and without an error.
Score = Callable[[Sequence[Trajectory]], Scores]


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that scores, under the name of its component and with its weight."""

    name: str
    weight: float
    score: Score


class Scorer:
    """Adds components to finished trajectories. `fault` is what went wrong last, for whoever has to tell of it.

    Raises ConfigError for two parts of one name.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        names = [part.name for part in parts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two rewards are named {twice[0]!r}: give one of them another name")
        self.parts = tuple(parts)
        self.fault: str | None = None

    def __bool__(self) -> bool:
        return bool(self.parts)

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Add every part's component to every trajectory that did not fail.

        A part that breaks leaves the rewards of the batch untold, as a broken checker does; a part that returns None
        for a trajectory has no say in it, as in TRL. Raises ConfigError when an env has a component of that name.
        """
        whole = [trajectory for trajectory in trajectories if trajectory.error is None and trajectory.turns]
        for part in self.parts if whole else ():
            scores = part.score(whole)
            if scores.error is not None:
                self.fault = scores.error
            for trajectory, value in zip(whole, scores.values, strict=True):
                if value is not None or scores.error is not None:
                    _add(trajectory, part, value)


def _add(trajectory: Trajectory, part: Part, value: float | None) -> None:
    if part.name in trajectory.rewards:
        raise ConfigError(f"the env has a component {part.name!r} already: give the scorer's another name")
    trajectory.rewards[part.name] = value
    if value is not None:
        trajectory.turns[-1].reward += part.weight * value


def split_rewards(weights: Mapping[str, float], reward_model: str | None = None) -> tuple[dict[str, float], Scorer]:
    """Split weights by name into those of an env's components and a scorer for the rest.

    `module:name` is a `Component` of the user's, or a TRL-style function (its component: `name`). `reward_model` is
    a folder, or `stub` for one that needs no weights; its component has that name, and weight 1 unless given.

    Raises ConfigError for a function or a model that is not there.
    """
    own: dict[str, float] = {}
    parts: list[Part] = []
    for name, weight in weights.items():
        if ":" in name and not isinstance(load_object(name, "reward"), Component):
            parts.append(function_part(name.rpartition(":")[2], weight, load_function(name)))
        elif name != REWARD_MODEL:
            own[name] = weight
    if reward_model is not None:
        from .reward_model import load_reward_model

        parts.append(scorer_part(REWARD_MODEL, weights.get(REWARD_MODEL, 1.0), load_reward_model(reward_model)))
    elif REWARD_MODEL in weights:
        raise ConfigError(f"the reward {REWARD_MODEL!r} has a weight but no model: give --reward-model FOLDER")
    return own, Scorer(parts)


def function_part(name: str, weight: float, function: RewardFunction) -> Part:
    """Return the part that calls a TRL-style function.

    It gets `prompts` (the task's messages) and `completions` (what followed), and by keyword, where it asks for them:
    `gt`, `task_id`, `completion_ids` (sampled ids), `tools` (JSON text), `trajectories`, and the tasks' metadata.
    """

    def score(trajectories: Sequence[Trajectory]) -> Scores:
        prompts = [list(t.messages[: t.opening]) for t in trajectories]
        completions = [list(t.messages[t.opening :]) for t in trajectories]
        return call_function(function, prompts, completions, _columns(trajectories))

    return Part(name, weight, score)


def scorer_part(name: str, weight: float, scorer: ConversationScorer) -> Part:
    """Return the part that hands whole conversations to a reward model or a judge."""
    return Part(name, weight, lambda trajectories: call_scorer(scorer, [t.messages for t in trajectories]))


def _columns(trajectories: Sequence[Trajectory]) -> Mapping[str, list[Any]]:
    keys = dict.fromkeys(key for trajectory in trajectories for key in trajectory.metadata)
    columns: dict[str, list[Any]] = {key: [t.metadata.get(key) for t in trajectories] for key in keys}
    return columns | {
        "gt": [t.gt for t in trajectories],
        "task_id": [t.task_id for t in trajectories],
        "completion_ids": [[i for i, m in zip(t.tokens, t.response_mask, strict=True) if m] for t in trajectories],
        "tools": [t.tools for t in trajectories],
        "trajectories": list(trajectories),
    }
