"""Scorer: what an env cannot score alone. It runs over finished trajectories, a batch of whole groups at a time.

Reward models, judges, servers and TRL-style functions see the conversation; each adds a component to the last turn. One
scorer serves rollout and training, so that a reward means the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
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
from .http_reward import HttpReward, is_url
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

    With `normalize` the known scores of a part get mean 0 and deviation 1 in every batch, equal ones 0; `clip` cuts
    scores to this size, after that. What counts is the changed score; the one that was given stands beside it as the
    component `NAME/raw`, which pays nothing.

    Raises ConfigError for two parts of one name, and where there is no part whose scores could be changed.
    """

    def __init__(self, parts: Sequence[Part], *, normalize: bool = False, clip: float | None = None) -> None:
        names = [part.name for part in parts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two rewards are named {twice[0]!r}: give one of them another name")
        if (normalize or clip is not None) and not parts:
            raise ConfigError(
                "normalize_scores and score_clip change the scores of reward models and functions, and there are none: "
                "an env's own components stay as they are"
            )
        self.parts, self.normalize, self.clip = tuple(parts), normalize, clip
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
            changed = self._changed(scores.values)
            for trajectory, raw, value in zip(whole, scores.values, changed, strict=True):
                if raw is not None or scores.error is not None:
                    _add(trajectory, part, value)
                if raw is not None and changed is not scores.values:
                    trajectory.rewards[f"{part.name}/raw"] = raw

    def _changed(self, scores: list[float | None]) -> list[float | None]:
        """Return the scores that count; the same list where nothing is normalised or cut."""
        known = [score for score in scores if score is not None]
        if not known or (not self.normalize and self.clip is None):
            return scores
        most = math.inf if self.clip is None else self.clip
        centre, unit = (fmean(known), pstdev(known)) if self.normalize else (0.0, 1.0)
        equal = self.normalize and min(known) == max(known)  # what rounding leaves of a deviation is none
        return [s if s is None else 0.0 if equal else max(-most, min(most, (s - centre) / unit)) for s in scores]


def _add(trajectory: Trajectory, part: Part, value: float | None) -> None:
    if part.name in trajectory.rewards:
        raise ConfigError(f"the env has a component {part.name!r} already: give the scorer's another name")
    trajectory.rewards[part.name] = value
    if value is not None:
        trajectory.turns[-1].reward += part.weight * value


def split_rewards(
    weights: Mapping[str, float],
    reward_model: str | None = None,
    *,
    normalize: bool = False,
    clip: float | None = None,
) -> tuple[dict[str, float], Scorer]:
    """Split weights by name into those of an env's components and a scorer for the rest.

    `module:name` is a `Component` of the user's, or a TRL-style function (its component: `name`). `reward_model` is
    a folder, the address of a server, or `stub` for one that needs no weights; its component has that name, and weight
    1 unless given. `normalize` and `clip` are the scorer's.

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
        parts.append(_reward_model_part(weights.get(REWARD_MODEL, 1.0), reward_model))
    elif REWARD_MODEL in weights:
        raise ConfigError(f"the reward {REWARD_MODEL!r} has a weight but no model: give --reward-model FOLDER")
    return own, Scorer(parts, normalize=normalize, clip=clip)


def _reward_model_part(weight: float, name: str) -> Part:
    if is_url(name):
        return function_part(REWARD_MODEL, weight, HttpReward(name))
    from .reward_model import load_reward_model

    return scorer_part(REWARD_MODEL, weight, load_reward_model(name))


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
    """Return the part that hands whole conversations, and tools where they are taken, to a reward model or a judge."""

    def score(trajectories: Sequence[Trajectory]) -> Scores:
        return call_scorer(scorer, [t.messages for t in trajectories], [t.tools for t in trajectories])

    return Part(name, weight, score)


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
