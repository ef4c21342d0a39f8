"""RLOO: the other samples of the task are the baseline."""

from __future__ import annotations

from typing import ClassVar

from .grpo import GRPO


class RLOO(GRPO):
    """REINFORCE leave-one-out, arXiv:2402.14740: an episode is one action, compared with the mean of its siblings.

    The baseline does not hold the episode's own reward, so it is unbiased; it is `n / (n - 1)` times GRPO's `reward -
    mean` for n samples. By preset the KL is taken off the reward, nothing is scaled, and the ratio is the product over
    the sequence (`importance_sampling_level="product"`), clipped as in TRL: while the policy is the one that sampled,
    the gradient is that of REINFORCE, `-A grad(sum of log p)`.
    """

    leave_one_out: ClassVar[bool] = True
