"""Distillation: a student learns a teacher's distributions at the tokens of a file, beside the tokens themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ..agents.models.contract import LanguageModel
from ..agents.models.inspection import inspect_model
from .algorithm import TokenBatch, no_clipping
from .batch import MicroBatch
from .config import TrainConfig
from .fused_divergence import Teacher, TopTeacher, token_divergence
from .losses import TokenLosses, sft_token_loss
from .sft import SFT
from .teacher import ask_teacher, measure_of
from .teacher_cache import About, TeacherCache, fingerprint


class Distill(SFT):
    """White-box distillation, arXiv:1503.02531: `a CE + (1 - a) T^2 D` a token, with a = `distill_alpha`.

    CE is `sft`'s loss, D a divergence (see `fused_divergence.Measure`; forward KL by default) between the softmaxes of
    the teacher's and the student's logits over T = `distill_temperature`. The gradient of D falls with the square of T,
    which `T^2` makes up for. Assumes that the teacher is at home in the episodes of the file: where it did not write
    them, its distributions there may be worth little.
    """

    @classmethod
    def reference_model(cls, config: TrainConfig) -> str | None:
        """Return the teacher."""
        return config.teacher_model

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.measure = measure_of(config)
        self.cache = None if config.teacher_cache is None else open_cache(config.teacher_cache, config)

    def compare(
        self, policy: LanguageModel, hidden: Tensor, batch: MicroBatch, reference: LanguageModel | None
    ) -> Tensor:
        """Return the divergence of the student from the teacher at each token."""
        teacher = self._teacher(policy, batch, reference)
        return token_divergence(hidden, policy.head_weight, teacher, self.measure)

    def _teacher(self, policy: LanguageModel, batch: MicroBatch, reference: LanguageModel | None) -> Teacher:
        if self.cache is None:
            return ask_teacher(policy, batch, reference, self.config)

        def ask() -> TopTeacher:
            told = ask_teacher(policy, batch, reference, self.config)
            assert isinstance(told, TopTeacher)  # config wants distill_top_k with a cache
            return told

        return self.cache.read(batch, ask)

    def loss(self, tokens: TokenBatch) -> TokenLosses:
        """a CE + (1 - a) T^2 D."""
        assert tokens.divergence is not None
        alpha, squared = self.config.distill_alpha, self.measure.temperature**2
        entropy = sft_token_loss(tokens.logprobs)
        loss = alpha * entropy + (1 - alpha) * squared * tokens.divergence
        measured = {"distill/ce": entropy.detach(), "distill/divergence": tokens.divergence.detach()}
        return replace(no_clipping(loss), measured=measured)


def open_cache(folder: str, config: TrainConfig) -> TeacherCache:
    """Return the cache of a run's teacher in `folder`. Raises as `TeacherCache` does, ModelError for no model."""
    assert config.teacher_model is not None
    assert config.distill_top_k is not None
    teacher = Path(config.teacher_model)
    shared = min(inspect_model(path).vocab_size for path in (teacher, Path(config.model)))
    about = About(fingerprint(teacher), config.dtype, config.distill_temperature, config.distill_top_k, shared)
    return TeacherCache(Path(folder), about)
