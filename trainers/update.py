"""The update: optimizer steps on one batch of rows, with losses normalised over each whole optimizer batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..agents.backend import derive_seed
from ..agents.models import adapter_off, has_adapter
from ..agents.models.contract import LanguageModel
from ..tools.errors import ConfigError, RunError
from .algorithm import Algorithm, TokenBatch
from .annotate import Compute, correct_gap, token_numbers
from .batch import MicroBatch, Row, micro_batches
from .config import TrainConfig
from .experience import Experience
from .losses import BatchCounts, aggregate, kl_estimate
from .policy import policy_logprobs


@dataclass(slots=True)
class UpdateStats:
    """Sums over the tokens of an update, from which the metrics are made."""

    tokens: int = 0
    loss: float = 0.0  # sum over optimizer steps
    steps: int = 0
    grad_norm: float = 0.0  # sum over optimizer steps
    entropy: float = 0.0
    kl: float = 0.0
    clip_low: int = 0
    clip_high: int = 0
    ratio_min: float = math.inf
    ratio_max: float = -math.inf
    gap_sum: float = 0.0  # |current - sampler's log-prob| of tokens before the first optimizer step
    gap_max: float = 0.0
    gap_tokens: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the means under TRL's names, over the tokens that were computed (see `Updater._gradient`)."""
        tokens, steps = max(self.tokens, 1), max(self.steps, 1)
        values = {"loss": self.loss / steps, "grad_norm": self.grad_norm / steps}
        if self.tokens:  # where no token was computed there is no entropy, which is not an entropy of 0
            values["entropy"] = self.entropy / tokens
        if self.gap_tokens:
            values |= {
                "clip_ratio/low_mean": self.clip_low / tokens,
                "clip_ratio/high_mean": self.clip_high / tokens,
                "clip_ratio/region_mean": (self.clip_low + self.clip_high) / tokens,
                "sampling/sampling_logp_difference/mean": self.gap_sum / self.gap_tokens,
                "sampling/sampling_logp_difference/max": self.gap_max,
                "sampling/importance_sampling_ratio/min": self.ratio_min,
                "sampling/importance_sampling_ratio/max": self.ratio_max,
            }
        return values


class Updater:
    """Owns optimizer and learning-rate schedule of a model.

    Args:
        model: trained in place, as far as its parameters require a gradient; the rest is left alone.
        algorithm: gives the loss of each token.
        config: optimizer, schedule, averaging.
        reference: frozen model of the KL term; goes with `beta` > 0, unless an adapter switched off is the reference.
        max_tokens: most trainable tokens a trajectory may have (the constant of averaging `constant`).

    Raises ConfigError when `beta` and `reference` do not go together, and when every parameter is frozen.
    """

    def __init__(
        self,
        model: LanguageModel,
        algorithm: Algorithm,
        config: TrainConfig,
        reference: LanguageModel | None = None,
        max_tokens: int = 1,
    ) -> None:
        if (config.beta > 0 and not has_adapter(model)) != (reference is not None):
            raise ConfigError(
                f"beta is {config.beta} and the reference model is {type(reference).__name__}: one needs the other, "
                "but a model with an adapter is its own reference"
            )
        self.model, self.algorithm, self.config = model, algorithm, config
        self.reference, self.max_tokens = reference, max_tokens
        self.device = model.head_weight.device
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ConfigError("no parameter of the model requires a gradient, so there is nothing to train")
        self.kl_in_loss = config.beta > 0 and config.kl_in == "loss"
        self.everything_teaches = self.kl_in_loss or config.entropy_coef > 0 or algorithm.critic
        self.optimizer = torch.optim.AdamW(
            _decay_groups(model, config.weight_decay),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,  # reads and writes every number once
        )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step `step` (0-based): linear warm-up, then constant, linear or cosine.

        Step `warmup_steps` has the peak; the fall ends at `min_lr_ratio` of it at `max_steps`, one past the last step.
        """
        config = self.config
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / config.warmup_steps
        if config.lr_scheduler_type == "constant":
            return config.learning_rate
        done = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
        shape = 1 - done if config.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)

    def update(self, mini_batches: Sequence[Sequence[Row]], step: int, stats: UpdateStats) -> None:
        """Make one optimizer step for each mini-batch and add to `stats`.

        Raises RunError on a loss or gradient that is not finite, before it touches weights or optimizer.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        if self.config.lora_dropout > 0:
            torch.manual_seed(derive_seed(self.config.seed, "dropout", step))  # a resumed run drops the same
        for rows in mini_batches:
            loss = self._gradient(rows, stats)
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise RunError(
                    f"step {step}: the loss is {loss} and the gradient norm {norm}; this update was not made. Lower "
                    "learning_rate or max_grad_norm, or look at the step's trajectories"
                )
            self.optimizer.step()
            stats.loss += loss
            stats.grad_norm += norm
            stats.steps += 1

    def annotate(self, experiences: Sequence[Experience]) -> None:
        """Compute what credit and loss need to know of a step's experiences before the first update."""
        config = self.config

        def numbers(compute: Compute) -> list[list[float]]:
            return token_numbers(experiences, compute, config.micro_batch_tokens, self.device)

        if config.importance_sampling_correction != "none":
            found = numbers(lambda batch: policy_logprobs(self.model, batch)[0])
            for experience, logprobs in zip(experiences, found, strict=True):
                experience.old_logprobs = logprobs
                correct_gap(experience, config.importance_sampling_correction, config.importance_sampling_cap)
        if config.beta > 0 and not self.kl_in_loss:
            found = numbers(self._reference_logprobs)
            for experience, logprobs in zip(experiences, found, strict=True):
                experience.ref_logprobs = logprobs

    def _gradient(self, rows: Sequence[Row], stats: UpdateStats) -> float:
        """Set the gradients of one optimizer batch and return its loss."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)  # an update without trainable tokens is a step of gradient 0
        lengths = torch.zeros(max((row.trajectory for row in rows), default=0) + 1, device=self.device)
        for row in rows:
            lengths[row.trajectory] += len(row.places)
        counts = BatchCounts(int(lengths.sum()), int((lengths > 0).sum()), self.max_tokens)
        # A row of advantage 0 has no gradient (unless another term gives it one): it counts, but is not computed.
        live = [row for row in rows if row.teaches or self.everything_teaches]
        batches = micro_batches(live, self.config.micro_batch_tokens, self.device)
        computed = sum(batch.ids.numel() for batch in batches)
        total = 0.0
        self.model.train()  # a router is to be balanced, dropout of adapters to act: here alone
        for batch in batches:
            loss = self._loss(batch, counts, lengths, stats)
            router = self.model.router_loss()
            if router is not None:  # an average over the tokens that went through it
                loss = loss + router * (self.model.config.router_aux_loss_coef * batch.ids.numel() / computed)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.model.eval()
        return total

    def _loss(self, batch: MicroBatch, counts: BatchCounts, lengths: Tensor, stats: UpdateStats) -> Tensor:
        """Return a micro-batch's share of the optimizer batch's loss."""
        config = self.config
        logprobs, entropy = policy_logprobs(self.model, batch, entropy_grad=config.entropy_coef > 0)
        token = self.algorithm.loss(TokenBatch(logprobs, batch.old_logprobs, batch.advantages, batch.row))
        values = token.loss * batch.weights
        if self.kl_in_loss:
            kl = kl_estimate(logprobs, self._reference_logprobs(batch), config.kl_estimator)
            values = values + config.beta * kl
            stats.kl += float(kl.detach().sum())
        if config.entropy_coef > 0:
            values = values - config.entropy_coef * entropy
        entropy = entropy.detach()
        stats.tokens += len(values)
        stats.entropy += float(entropy.sum())
        if self.algorithm.online:
            stats.clip_low += int(token.clip_low.sum())
            stats.clip_high += int(token.clip_high.sum())
            stats.ratio_min = min(stats.ratio_min, float(token.ratio.min()))
            stats.ratio_max = max(stats.ratio_max, float(token.ratio.max()))
            if stats.steps == 0:
                gap = (logprobs.detach() - batch.old_logprobs).abs()
                stats.gap_sum += float(gap.sum())
                stats.gap_max = max(stats.gap_max, float(gap.max()))
                stats.gap_tokens += len(gap)
        return aggregate(values, batch.trajectory, counts, self.config.averaging, lengths)

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Return log-probs of the starting model: the reference, or the model itself with its adapter off."""
        model = self.model if self.reference is None else self.reference
        with adapter_off(model) if self.reference is None else nullcontext():
            return policy_logprobs(model, batch)[0]


def _decay_groups(model: LanguageModel, weight_decay: float) -> list[dict[str, object]]:
    """Return AdamW's groups: matrices decay, norms and biases do not (a norm of 0 would switch its channel off)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() >= 2) == wide] for wide in (True, False))
    groups = ((matrices, weight_decay), (vectors, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
