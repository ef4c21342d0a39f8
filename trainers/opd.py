"""On-policy distillation: the student acts, a teacher judges each token that it said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..agents.models.contract import LanguageModel
from .algorithm import Lookups, TokenBatch
from .batch import MicroBatch
from .config import TrainConfig
from .experience import Experience
from .fused_divergence import token_divergence
from .grpo import GRPO
from .losses import TokenLosses
from .teacher import ask_teacher, measure_of


class OPD(GRPO):
    """The student learns in states that its own samples lead to, which those of a file do not (arXiv:2306.13649).

    `opd_loss` "sampled": a token's advantage is `teacher's log-prob - old log-prob`, at the temperature of sampling.
    In expectation over what the student says, the gradient is that of KL(student || teacher) at each token (reverse KL
    as a policy gradient, as in arXiv:2306.08543, of the next token alone). "full": `T^2` times a divergence between
    whole distributions (see `fused_divergence.Measure`) with its own gradient. To either, `reward_coef` times GRPO's
    advantage of the episode is added, through the clipped surrogate.

    An episode that failed teaches nothing. One whose reward is not known is judged by the teacher all the same.
    Assumes that the teacher knows what to say after what the student said.
    """

    @classmethod
    def reference_model(cls, config: TrainConfig) -> str | None:
        """Return the teacher."""
        return config.teacher_model

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.measure, self.sampled = measure_of(config), config.opd_loss == "sampled"
        self.everything_teaches = not self.sampled

    def annotate(self, experiences: Sequence[Experience], lookups: Lookups) -> None:
        """Ask the teacher for the log-prob of each token that was said, where it judges these alone."""
        if self.sampled:
            for experience, logprobs in zip(experiences, lookups.reference(experiences), strict=True):
                experience.ref_logprobs = logprobs

    def compare(
        self, policy: LanguageModel, hidden: Tensor, batch: MicroBatch, reference: LanguageModel | None
    ) -> Tensor | None:
        """Return the divergence of the student from the teacher at each token, where it judges whole distributions."""
        if self.sampled:
            return None
        teacher = ask_teacher(policy, batch, reference, self.config)
        return token_divergence(hidden, policy.head_weight, teacher, self.measure)

    def credit(self, experiences: Sequence[Experience]) -> None:
        """`reward_coef` times GRPO's advantage of the episode, and what the teacher thinks of each token."""
        super().credit(experiences)
        for experience in experiences:
            earned = [self.config.reward_coef * advantage for advantage in experience.advantages]
            if experience.trajectory.error is not None:
                earned = [0.0] * len(earned)
            elif self.sampled:
                told = zip(experience.ref_logprobs, experience.old_logprobs, earned, strict=True)
                earned = [teacher - old + advantage for teacher, old, advantage in told]
            experience.advantages = earned

    def trains(self, experience: Experience) -> bool:
        """Whether an episode is in the loss: also without a reward, unless it failed, or where cut-off ones are not."""
        trajectory = experience.trajectory
        return trajectory.error is None and not (self.config.mask_truncated_completions and trajectory.truncated)

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """GRPO's -min(r A, clip(r) A), and T^2 D where whole distributions are compared."""
        token = super().loss(tokens)
        if tokens.divergence is None:
            judged = tokens.ref_logprobs
            measured = {"distill/divergence": tokens.old_logprobs - judged, "distill/teacher_logprob": judged}
            return replace(token, measured=measured)
        loss = token.loss + self.measure.temperature**2 * tokens.divergence
        return replace(token, loss=loss, measured={"distill/divergence": tokens.divergence.detach()})
