"""Reward presets: whole rewards that the seed projects publish, each part a component of its own with its weight.

What is scored against `gt` goes through our checkers, which cannot be fooled as the originals can; every other
difference stands in the docstring of its preset. A score of a reward model is no part of a preset, since an env cannot
give it: a Scorer adds it to finished episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .checker import Checker
from .components import Component, gt_component, unfinished
from .contains import ContainsGt
from .episode import Episode
from .numeric import NumericChecker
from .shaping import answer_tag, call_count, call_tags, length, repetition, thinking_closed, thinking_length

Weighted = Mapping[str, tuple[Component, float]]


@dataclass(frozen=True, slots=True)
class RewardPreset:
    """A published reward: where it is from, and its components by name with their weights."""

    name: str
    source: str
    components: Weighted

    @property
    def parts(self) -> list[Component]:
        """The components, as `ChatEnv` takes them."""
        return [component for component, _ in self.components.values()]

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each, as `ChatEnv(rewards=...)` takes them."""
        return {name: weight for name, (_, weight) in self.components.items()}


def _named(*weighted: tuple[Component, float]) -> Weighted:
    return {component.name: (component, weight) for component, weight in weighted}


def _with_calls(component: Component, *, calls: bool = True) -> Component:
    """Return `component` with the value 0 in episodes without calls (`calls=False`: in episodes with calls)."""

    def value(episode: Episode) -> float | None:
        if component.checker is not None and episode.gt == []:
            return 0.0  # a task that wants nothing stated: no fault of the checker, and no success
        found = component.value(episode)  # also where it is not paid: the one of `gt` notes the success
        return found if found is None or bool(episode.calls) is calls else 0.0

    return Component(component.name, component.when, value, component.checker)


def _clip(bound: float) -> Component:
    """Return `clip`: what has to be added for all that the episode earned to lie within +-`bound`."""
    return Component("clip", "total", lambda episode: min(max(episode.earned, -bound), bound) - episode.earned)


def _minimind_agent(checker: Checker | None) -> RewardPreset:
    """Return MiniMind's reward of agents: form where no call was made, calls and `gt` where one was; within +-3.

    Differences: a malformed call is a call, one that was not run. Which calls are valid is what the tool's schema
    says. Thinking must open at the start of the text (or in the prompt); left open it pays -0.25, and nothing written
    in it counts as an answer. `gt` is `contains_gt`, or the env's own checker. Not only an episode at its last turn is
    unfinished, a text that was cut is too. Only the answer is searched for repetition, not the markup of calls. The
    clip comes before a reward model's score, not after.
    """
    weighted = _named(
        (_with_calls(gt_component(checker or ContainsGt())), 2.5),
        (_with_calls(call_count), 1.0),
        (_with_calls(unfinished), 0.5),
        (_with_calls(length(5, 800), calls=False), 1.0),
        (_with_calls(thinking_length, calls=False), 1.0),
        (_with_calls(thinking_closed, calls=False), 1.0),
        (call_tags, 1.0),
        (repetition, 1.0),
        (_clip(3.0), 1.0),
    )
    source = "MiniMind, trainer/train_agent.py: calculate_rewards, without its reward model"
    return RewardPreset("minimind_agent", source, weighted)


def _minimind_chat(_: Checker | None) -> RewardPreset:
    """Return MiniMind's reward of chat: length, thinking, repetition. Differences: those of thinking, as above."""
    weighted = _named((length(20, 800), 1.0), (thinking_length, 1.0), (thinking_closed, 1.0), (repetition, 1.0))
    source = "MiniMind, trainer/train_grpo.py: calculate_rewards, without its reward model"
    return RewardPreset("minimind_chat", source, weighted)


def _gsm8k(checker: Checker | None) -> RewardPreset:
    """Return train-llm-from-scratch's reward of GSM8K: 1 for the right number, 0.2 for one answer block.

    Its clip at 1.2 is the sum of the two and never bites. Differences: the number must be stated as the answer (there
    the last number of any text counts, in thinking too), whole numbers are compared exactly (there within 1e-4), and
    the block must stand outside of the thinking, with no stray tag beside it.
    """
    source = "train-llm-from-scratch, src/post_training/rewards/verifiers.py: reward_gsm8k"
    return RewardPreset("gsm8k", source, _named((gt_component(checker or NumericChecker()), 1.0), (answer_tag, 0.2)))


#: name -> what makes the preset for a checker of `gt`; None stands for the one that fits the original.
PRESETS: Mapping[str, Callable[[Checker | None], RewardPreset]] = {
    "minimind_agent": _minimind_agent,
    "minimind_chat": _minimind_chat,
    "gsm8k": _gsm8k,
}
