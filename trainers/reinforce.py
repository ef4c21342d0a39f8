"""REINFORCE++: no group, the whole batch is the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from .advantages import whiten
from .experience import Experience
from .grpo import GRPO
from .returns import token_returns


class ReinforcePlusPlus(GRPO):
    """arXiv:2501.03262: PPO's surrogate without a critic; the advantages are normalised returns of tokens.

    A token's return is the episode's reward less `beta` times the KL of the tokens from it on. Mean and deviation are
    those of all tokens that are in the step's loss, so a hard task's samples all look bad and an easy one's good: it
    assumes that there are enough tasks in a step for that to cancel. One sample a task will do.
    """

    def credit(self, experiences: Sequence[Experience]) -> None:
        """(return - mean) / deviation over the tokens of the batch; exactly 0 where all returns are equal."""
        trained = [experience for experience in experiences if self.trains(experience)]
        advantages = whiten([token_returns(experience, self.config) for experience in trained])
        for experience in experiences:
            experience.give(0.0)
        for experience, values in zip(trained, advantages, strict=True):
            experience.advantages = values
