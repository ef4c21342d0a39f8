"""What is measured of an update: sums over its tokens and optimizer steps, and the metrics made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance

import torch
from torch import Tensor

from .annotate import gap_metrics
from .config_keys import Correction
from .experience import Experience
from .losses import TokenLosses, kl_estimate

QUANTILES = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "max": 1.0}
"""Of the log-ratios that `debug_log_ratio` logs."""
_MEAN = "mean_"
_MOST_SORTED = 2**23  # torch.quantile takes 2^24 numbers at most


@dataclass(slots=True)
class UpdateStats:
    """Sums over the tokens of a step's update, from which the metrics are made."""

    tokens: int = 0
    loss: float = 0.0  # sum over optimizer steps, as are the two parts and the norms
    steps: int = 0
    grad_norm: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    kl_tokens: int = 0
    clip_low: int = 0
    clip_high: int = 0
    ratio_min: float = math.inf
    ratio_max: float = -math.inf
    ratio_sum: float = 0.0
    gap_sum: float = 0.0  # |current - sampler's log-prob| of tokens before the first optimizer step
    gap_max: float = 0.0
    gap_tokens: int = 0
    approx_kl: float = 0.0  # KL(old policy || policy), sum over tokens
    passes: float = 0.0  # over the step's episodes, one cut short counted in part
    critic_steps: int = 0  # those that trained a critic
    policy_loss: float = 0.0
    value_loss: float = 0.0
    value_grad_norm: float = 0.0
    value_clipped: int = 0
    log_ratios: list[Tensor] = field(default_factory=list)  # of the optimizer batch at hand
    measured: dict[str, tuple[float, int]] = field(default_factory=dict)  # sum and count of what a loss measures
    extremes: dict[str, tuple[float, float]] = field(default_factory=dict)  # least and most of what is named `mean_*`
    logged: dict[str, float] = field(default_factory=dict)  # metrics that are no sums

    def note_credit(self, experiences: Sequence[Experience], correction: Correction) -> None:
        """Take in what credit knew, under TRL's names where it has them.

        `sampling/*`: gap of policy and sampler and the weights that correct it (`gap_metrics`), where it is corrected.
        `objective/kl`: mean over episodes of the sum of their tokens' k1 to the reference, where the reward counts it.
        `val/explained_variance`: `1 - Var(return - value) / Var(return)` of the critic before the update, over the
        tokens of episodes with a reward; absent where the returns are all equal.
        """
        if correction != "none":
            self.logged |= gap_metrics(experiences, correction)
        known = [experience for experience in experiences if experience.reward is not None]
        judged = [e for e in known if e.ref_logprobs and e.unit is None]  # of a pair the loss measures what is told
        if judged:
            sums = [math.fsum(e.old_logprobs) - math.fsum(e.ref_logprobs) for e in judged]
            self.logged["objective/kl"] = fmean(sums)
        pairs = [pair for e in known if e.values for pair in zip(e.returns, e.values, strict=True)]
        spread = pvariance([wanted for wanted, _ in pairs]) if pairs else 0.0
        if spread > 0:
            self.logged["val/explained_variance"] = 1 - pvariance([wanted - said for wanted, said in pairs]) / spread

    def note_tokens(self, token: TokenLosses, log_ratio: Tensor) -> None:
        """Take in the tokens (N,) of a micro-batch that a policy sampled; `log_ratio` is current - old."""
        self.clip_low += int(token.clip_low.sum())
        self.clip_high += int(token.clip_high.sum())
        self.ratio_min = min(self.ratio_min, float(token.ratio.min()))
        self.ratio_max = max(self.ratio_max, float(token.ratio.max()))
        self.ratio_sum += float(token.ratio.sum())
        self.log_ratios.append(log_ratio)
        if self.steps == 0:
            gap = log_ratio.abs()
            self.gap_sum += float(gap.sum())
            self.gap_max = max(self.gap_max, float(gap.max()))
            self.gap_tokens += len(gap)
        if token.value_clipped is not None:
            self.value_clipped += int(token.value_clipped.sum())

    def note_measured(self, measured: Mapping[str, Tensor]) -> None:
        """Take in what the loss of a micro-batch measured; see `TokenLosses`."""
        for name, values in measured.items():
            if name.startswith(_MEAN) and values.numel():
                least, most = self.extremes.get(name, (math.inf, -math.inf))
                self.extremes[name] = min(least, float(values.min())), max(most, float(values.max()))
            total, count = self.measured.get(name, (0.0, 0))
            self.measured[name] = (total + float(values.detach().double().sum()), count + values.numel())

    def end_batch(self, *, debug: bool) -> float:
        """Close an optimizer batch and return its mean KL(old policy || policy), k3; 0 without tokens.

        With `debug` the quantiles of its log-ratios are logged, under the number of the optimizer step.
        """
        if not self.log_ratios:
            return 0.0
        ratios = torch.cat(self.log_ratios)
        self.log_ratios = []
        kl = kl_estimate(torch.zeros_like(ratios), ratios, "k3")
        self.approx_kl += float(kl.sum())
        if debug:
            some = ratios[:: len(ratios) // _MOST_SORTED + 1].float()
            for name, quantile in QUANTILES.items():
                self.logged[f"debug/log_ratio/{self.steps}/{name}"] = float(torch.quantile(some, quantile))
        return float(kl.mean())

    def metrics(self) -> dict[str, float]:
        """Return the means under TRL's names, over the tokens that were computed (see `Updater._gradient`)."""
        tokens, steps = max(self.tokens, 1), max(self.steps, 1)
        values = {"loss": self.loss / steps, "grad_norm": self.grad_norm / steps}
        if self.tokens:  # where no token was computed there is no entropy, which is not an entropy of 0
            values["entropy"] = self.entropy / tokens
        if self.kl_tokens:
            values["kl"] = self.kl / self.kl_tokens
        if self.gap_tokens:
            values |= {
                "clip_ratio/low_mean": self.clip_low / tokens,
                "clip_ratio/high_mean": self.clip_high / tokens,
                "clip_ratio/region_mean": (self.clip_low + self.clip_high) / tokens,
                "sampling/sampling_logp_difference/mean": self.gap_sum / self.gap_tokens,
                "sampling/sampling_logp_difference/max": self.gap_max,
                "sampling/importance_sampling_ratio/min": self.ratio_min,
                "sampling/importance_sampling_ratio/mean": self.ratio_sum / tokens,
                "sampling/importance_sampling_ratio/max": self.ratio_max,
            }
        if self.critic_steps:
            values |= {
                "loss/policy_avg": self.policy_loss / steps,
                "loss/value_avg": self.value_loss / steps,
                "policy/approxkl_avg": self.approx_kl / tokens,
                "policy/clipfrac_avg": (self.clip_low + self.clip_high) / tokens,
                "val/clipfrac_avg": self.value_clipped / tokens,
                "val/grad_norm": self.value_grad_norm / steps,
                "ppo/passes": self.passes,
            }
        values |= {name: total / count for name, (total, count) in self.measured.items() if count}
        for name, (least, most) in self.extremes.items():
            what = name.removeprefix(_MEAN)
            values |= {f"min_{what}": least, f"max_{what}": most}
        if "rewards/chosen" in values and "rewards/rejected" in values:  # of pairs, and of replies judged alone
            values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
        return values | self.logged
