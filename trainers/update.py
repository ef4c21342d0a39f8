"""The update: optimizer steps on one batch of rows, with losses normalised over each whole optimizer batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..agents.backend import derive_seed
from ..agents.models import adapter_off, has_adapter, trainable_parameters
from ..agents.models.contract import LanguageModel
from ..tools.errors import ConfigError, RunError
from .algorithm import Algorithm, Lookups, TokenBatch
from .annotate import Compute, correct_gap, token_numbers, with_end
from .batch import MicroBatch, Row, make_rows, micro_batches
from .config import TrainConfig
from .critic import Critic
from .experience import Experience
from .losses import BatchCounts, TokenLosses, aggregate, kl_estimate
from .policy import hidden_states, logprobs_of, policy_logprobs
from .update_stats import UpdateStats

Share = Callable[[Tensor], Tensor]
"""From numbers of a micro-batch's tokens (N,) to its share of their average over the whole optimizer batch."""


class NonFiniteError(RunError):
    """A loss or a gradient is not finite; the update was not made."""


class Updater:
    """Owns optimizer and learning-rate schedule of a model, and of its critic.

    Args:
        model: trained in place, as far as its parameters require a gradient; the rest is left alone.
        algorithm: gives the loss of each token.
        config: optimizer, schedule, averaging.
        reference: frozen model that the algorithm looks at beside the policy: of the KL term, or a teacher. Where that
            is the policy as it began, one with an adapter is its own.
        max_tokens: most trainable tokens a trajectory may have (the constant of averaging `constant`).
        critic: the value model; goes with an algorithm that has one.

    `named`: every trained parameter, those of the critic as `critic.NAME`. Raises ConfigError when algorithm and
    reference, or algorithm and critic, do not go together, and when every parameter of the model is frozen.
    """

    def __init__(
        self,
        model: LanguageModel,
        algorithm: Algorithm,
        config: TrainConfig,
        reference: LanguageModel | None = None,
        max_tokens: int = 1,
        critic: Critic | None = None,
    ) -> None:
        wanted = algorithm.reference_model(config)
        own = has_adapter(model) and wanted == config.model
        if (wanted is not None and not own) != (reference is not None):
            raise ConfigError(
                f"algo {config.algo!r} with beta {config.beta} looks at the model {wanted}, and the reference is "
                f"{type(reference).__name__}: one needs the other, but a model with an adapter is its own reference"
            )
        if algorithm.critic != (critic is not None):
            raise ConfigError(f"algo {config.algo!r} and the critic {type(critic).__name__} do not go together")
        self.model, self.algorithm, self.config = model, algorithm, config
        self.reference, self.max_tokens, self.critic = reference, max_tokens, critic
        self.device = model.head_weight.device
        policy = trainable_parameters(model)
        if not policy:
            raise ConfigError("no parameter of the model requires a gradient, so there is nothing to train")
        values = {} if critic is None else trainable_parameters(critic)
        self.named = policy | {f"critic.{name}": parameter for name, parameter in values.items()}
        if algorithm.scores:  # the head is a part of what is trained, as is a classifier's
            self.parameters, self.critic_parameters = list(self.named.values()), []
        else:
            self.parameters, self.critic_parameters = list(policy.values()), list(values.values())
        self.kl_in_loss = algorithm.ratios and config.beta > 0 and config.kl_in == "loss"
        self.everything_teaches = (
            self.kl_in_loss or config.entropy_coef > 0 or algorithm.critic or algorithm.everything_teaches
        )
        groups = _groups(self.parameters, config.learning_rate, config.weight_decay)
        peak = config.learning_rate if config.critic_learning_rate is None else config.critic_learning_rate
        groups += _groups(self.critic_parameters, peak, config.weight_decay)
        self.optimizer = torch.optim.AdamW(
            groups,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,  # reads and writes every number once
        )

    def moved(self, steps: int) -> dict[str, nn.Parameter]:
        """Return the parameters that the first `steps` steps have trained, by name: those the optimizer knows."""
        alone = steps <= self.config.critic_warmup_steps
        return {name: p for name, p in self.named.items() if not alone or name.startswith("critic.")}

    def learning_rate(self, step: int, peak: float | None = None) -> float:
        """Return the learning rate of step `step` (0-based): linear warm-up, then constant, linear or cosine.

        Step `warmup_steps` has the peak, the policy's by default; the fall ends at `min_lr_ratio` of it at `max_steps`,
        one past the last step.
        """
        config = self.config
        peak = config.learning_rate if peak is None else peak
        if step < config.warmup_steps:
            return peak * (step + 1) / config.warmup_steps
        if config.lr_scheduler_type == "constant":
            return peak
        done = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
        shape = 1 - done if config.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)

    def update(
        self, mini_batches: Sequence[Sequence[Row]], step: int, stats: UpdateStats, *, dry: bool = False
    ) -> bool:
        """Make one optimizer step for each mini-batch of a pass, and add to `stats`; return whether to go on.

        False when the KL to the policy of the step's beginning is above `early_stop_kl` on a mini-batch: neither that
        one nor those behind it are used. The first of a step is always used. In the first `critic_warmup_steps` the
        policy is left alone. Norms of policy and critic are clipped apart, so neither damps the other; a shared
        critic's own parameters are its head. A `dry` update is measured and not made.

        Raises NonFiniteError on a loss or gradient that is not finite, before it touches weights or optimizer.
        """
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step, group["peak"])
        if config.lora_dropout > 0:
            torch.manual_seed(derive_seed(config.seed, "dropout", step))  # a resumed run drops the same
        warming = step < config.critic_warmup_steps
        for rows in mini_batches:
            loss = self._gradient(rows, stats, warming=warming)
            kl = stats.end_batch(debug=config.debug_log_ratio)
            if config.early_stop_kl is not None and stats.steps > 0 and kl > config.early_stop_kl:
                return False
            clip = torch.nn.utils.clip_grad_norm_
            norm = float(clip(self.parameters, config.max_grad_norm))
            critic_norm = float(clip(self.critic_parameters, config.max_grad_norm))
            if not all(math.isfinite(number) for number in (loss, norm, critic_norm)):
                raise NonFiniteError(
                    f"step {step + 1}: the loss is {loss} and the gradient norm {norm + critic_norm}; this update was "
                    "not made. Lower learning_rate or max_grad_norm, or look at the step's trajectories"
                )
            if not dry:
                self.optimizer.step()
            stats.loss += loss
            stats.grad_norm += norm
            stats.value_grad_norm += critic_norm
            stats.steps += 1
            stats.critic_steps += self.critic is not None and not self.algorithm.scores
            stats.passes += 1 / len(mini_batches)
        return True

    def annotate(self, experiences: Sequence[Experience]) -> None:
        """Compute what credit and loss need to know of a step's experiences before the first update."""
        config = self.config

        def numbers(compute: Compute, asked: Sequence[Experience]) -> list[list[float]]:
            return token_numbers(asked, compute, config.micro_batch_tokens, self.device)

        longest = self.model.config.max_position_embeddings
        lookups = Lookups(partial(numbers, self._policy_logprobs), partial(numbers, self._reference_logprobs), longest)
        if config.importance_sampling_correction != "none":
            for experience, logprobs in zip(experiences, lookups.policy(experiences), strict=True):
                experience.old_logprobs = logprobs
                correct_gap(experience, config.importance_sampling_correction, config.importance_sampling_cap)
        if self.algorithm.ratios and config.beta > 0 and not self.kl_in_loss:
            for experience, logprobs in zip(experiences, lookups.reference(experiences), strict=True):
                experience.ref_logprobs = logprobs
        if self.algorithm.ratios and self.critic is not None:
            self._annotate_values(experiences, self.critic)
        self.algorithm.annotate(experiences, lookups)

    def _annotate_values(self, experiences: Sequence[Experience], critic: Critic) -> None:
        """Set `values`, and of cut-off episodes the value after their last token."""
        goes_on = [e.trajectory.truncated and bool(e.trajectory.current_ids) for e in experiences]
        asked = [with_end(e) if cut else e for e, cut in zip(experiences, goes_on, strict=True)]
        found = token_numbers(
            asked, lambda batch: critic.values(batch, self.model), self.config.micro_batch_tokens, self.device
        )
        for experience, values, cut in zip(experiences, found, goes_on, strict=True):
            experience.value_after = values.pop() if cut else 0.0
            experience.values = values

    def _gradient(self, rows: Sequence[Row], stats: UpdateStats, *, warming: bool) -> float:
        """Set the gradients of one optimizer batch and return its loss; while `warming` the policy gets none."""
        for parameter in self.parameters:  # an update without trainable tokens is a step of gradient 0
            parameter.grad = None if warming else torch.zeros_like(parameter)
        for parameter in self.critic_parameters:
            parameter.grad = torch.zeros_like(parameter)
        # A row of advantage 0 has no gradient (unless another term gives it one): it counts, but is not computed.
        live = [row for row in rows if row.teaches or self.everything_teaches]
        self.model.train()  # a router is to be balanced, dropout of adapters to act: here alone
        total = 0.0
        for loss in self._losses(live, rows, stats, warming=warming):
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.model.eval()
        return total

    @torch.no_grad()
    def evaluate(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """Return loss and metrics of experiences that have their credit, all as one batch; nothing is changed."""
        stats, rows = UpdateStats(), make_rows(experiences)
        stats.loss = sum(float(loss) for loss in self._losses(rows, rows, stats, warming=False))
        stats.end_batch(debug=False)
        return stats.metrics()

    def _losses(
        self, live: Sequence[Row], rows: Sequence[Row], stats: UpdateStats, *, warming: bool
    ) -> Iterator[Tensor]:
        """Yield, for each micro-batch of the `live` ones of `rows`, its share of the loss of them all."""
        lengths = torch.zeros(max((row.trajectory for row in rows), default=0) + 1, device=self.device)
        for row in rows:
            lengths[row.trajectory] += len(row.places)
        counts = BatchCounts(int(lengths.sum()), int((lengths > 0).sum()), self.max_tokens)
        batches = micro_batches(live, self.config.micro_batch_tokens, self.device)
        computed = sum(batch.ids.numel() for batch in batches)
        for batch in batches:

            def share(values: Tensor, batch: MicroBatch = batch) -> Tensor:
                return aggregate(values, batch.trajectory, counts, self.config.averaging, lengths)

            loss = self._loss(batch, share, stats, warming=warming)
            router = self.model.router_loss()
            if router is not None:  # an average over the tokens that went through it
                loss = loss + router * (self.model.config.router_aux_loss_coef * batch.ids.numel() / computed)
            yield loss

    def _loss(self, batch: MicroBatch, share: Share, stats: UpdateStats, *, warming: bool) -> Tensor:
        """Return a micro-batch's share of the optimizer batch's loss: the policy's, and the critic's by `vf_coef`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not warming):
            hidden = hidden_states(self.model, batch)
            logprobs, entropy = self._said(hidden, batch)
        tokens = TokenBatch(
            logprobs, batch.old_logprobs, batch.advantages, batch.row, batch.trajectory, batch.unit, batch.ref_logprobs,
            divergence=self.algorithm.compare(self.model, hidden, batch, self.reference),
        )  # fmt: skip
        if self.critic is not None:
            values = self.critic.values(batch, self.model, hidden)
            tokens = replace(tokens, values=values, old_values=batch.values, returns=batch.returns)
        token = self.algorithm.loss(tokens)
        loss = policy_loss = share(self._policy_terms(batch, token, logprobs, entropy, stats))
        if token.value_loss is not None:
            value_loss = share(token.value_loss)
            loss = self.config.vf_coef * value_loss + (0.0 if warming else policy_loss)
            stats.policy_loss += float(policy_loss.detach())
            stats.value_loss += float(value_loss.detach())
        return loss

    def _said(self, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the tokens, each (N,); zeros where nothing is said, but scored."""
        if self.algorithm.scores:
            return hidden.new_zeros(len(hidden)), hidden.new_zeros(len(hidden))
        return logprobs_of(self.model, hidden, batch, entropy_grad=self.config.entropy_coef > 0)

    def _policy_terms(
        self, batch: MicroBatch, token: TokenLosses, logprobs: Tensor, entropy: Tensor, stats: UpdateStats
    ) -> Tensor:
        """Return what each token (N,) costs the policy: its loss, weighted, with KL and entropy where they count."""
        config = self.config
        values = token.loss * batch.weights
        if self.kl_in_loss:
            kl = kl_estimate(logprobs, self._reference_logprobs(batch), config.kl_estimator)
            values = values + config.beta * kl
            stats.kl += float(kl.detach().sum())
            stats.kl_tokens += len(kl)
        if config.entropy_coef > 0:
            values = values - config.entropy_coef * entropy
        if not self.algorithm.scores:
            stats.tokens += len(values)
            stats.entropy += float(entropy.detach().sum())
        stats.note_measured(token.measured)
        if self.algorithm.ratios:
            stats.note_tokens(token, logprobs.detach() - batch.old_logprobs)
        return values

    def _policy_logprobs(self, batch: MicroBatch) -> Tensor:
        return policy_logprobs(self.model, batch)[0]

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Return log-probs of the reference, or where there is none of the model itself with its adapter off.

        Those of a teacher with a larger vocabulary are normalised over the ids that the policy has.
        """
        model = self.model if self.reference is None else self.reference
        with adapter_off(model) if self.reference is None else nullcontext():
            return policy_logprobs(model, batch, vocabulary=len(self.model.head_weight))[0]


def _groups(parameters: Sequence[nn.Parameter], peak: float, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices decay, norms and biases do not (a norm of 0 would switch its channel off)."""
    matrices, vectors = ([p for p in parameters if (p.dim() >= 2) == wide] for wide in (True, False))
    groups = ((matrices, weight_decay), (vectors, 0.0))
    return [{"params": params, "weight_decay": decay, "lr": peak, "peak": peak} for params, decay in groups if params]
