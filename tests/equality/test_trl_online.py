"""Equality with TRL 1.16: advantages, loss, every gradient and metrics of each online algorithm that it has.

Both compute in float32, for transformers computes rope and norms in it whatever the weights are. TRL has no
REINFORCE++, and since 1.0 no PPO: these are held against slow references (`test_group_methods`, `test_ppo`).

Where TRL means another thing by the same setting, it is said here:
- Episodes that are left out of the loss (`mask_truncated_completions`, reward unknown) still count in what TRL divides
  by; ours counts the episodes that are in it. The two differ by that factor (`counts_all`), which is asserted. TRL's
  RLOO also keeps the advantages of cut-off episodes in its loss (its ratio is then exp(0)), a constant without
  gradient; and takes no KL off their reward, where ours does (so that setting has beta 0).
- `use_bias_correction_kl` (TRL's default) multiplies the KL by the ratio; we have no such key, and it is off here.
- The entropy bonus is a mean over tokens in TRL whatever the averaging, ours is averaged as the loss: alike for
  `token_mean`.
- Shares of what was clipped are of sequences in TRL where the ratio is a sequence's, ours are of tokens.
- `max_completion_length` bounds a completion with the answers of its tools in TRL, a turn in ours; the constant of
  Dr. GRPO is handed to both here.

`pytest -s tests/equality` prints the table.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

FP32 = 1e-5  # advantages, loss, entries of the gradient, metrics: two float32 ways to the same number
SHARE = 1e-5  # norm of the difference of a parameter's two gradients, as a share of that of the gradient
DIFFERENT = 1e-2  # two settings of an algorithm are at least so far apart, or one of them would show nothing
SHARED = ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "sampling/")


@dataclass(frozen=True)
class Setting:
    """One comparison. `counts_all`: TRL divides by all of these, ours by those of episodes in the loss."""

    algo: str
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    drift: float = 0.1
    rewards: str = "all differ"
    tools: bool = False
    counts_all: Literal["sequences", "tokens"] | None = None


CUT = {"mask_truncated_completions": True}
WIDE = {"epsilon": 0.1, "epsilon_high": 0.2}  # of sequences: GSPO's own bounds clip nearly all of these
BETA = {"beta": 0.1}
NEAR = 0.05  # drift: where a ratio is a product over many tokens it is large, and so are rounding and gradients


def corrected(how: str, **changes: Any) -> dict[str, Any]:
    """Return a correction of the sampler whose cap some weights are beyond."""
    return {"importance_sampling_correction": how, "importance_sampling_cap": 1.3} | changes


SETTINGS = [
    Setting("grpo", "on policy", drift=0.0),
    Setting("grpo", "second pass"),
    Setting("grpo", "beta 0.1", BETA),
    Setting("grpo", "epsilon 0.1, epsilon_high 0.5", {"epsilon": 0.1, "epsilon_high": 0.5}),
    Setting("grpo", "scale_rewards batch", {"scale_rewards": "batch"}),
    Setting("grpo", "scale_rewards none", {"scale_rewards": "none"}),
    Setting("grpo", "temperature 0.7", {"temperature": 0.7}),
    Setting("grpo", "temperature 0.7, beta, tools", BETA | {"temperature": 0.7}, tools=True),
    Setting("grpo", "tools between turns", tools=True),
    Setting("grpo", "one group of equals", rewards="one group of equals"),
    Setting("grpo", "two rewards unknown", rewards="two unknown", counts_all="sequences"),
    Setting("grpo", "mask_truncated_completions", CUT, counts_all="sequences"),
    Setting("grpo", "correction token_truncate", corrected("token_truncate")),
    Setting("grpo", "correction token_mask", corrected("token_mask")),
    Setting("grpo", "correction sequence_truncate", corrected("sequence_truncate")),
    Setting("grpo", "correction sequence_mask", corrected("sequence_mask")),
    Setting("grpo", "correction token_mask, beta, tools", corrected("token_mask", **BETA), tools=True),
    Setting("dr_grpo", "on policy", drift=0.0),
    Setting("dr_grpo", "second pass"),
    Setting("dr_grpo", "beta 0.1, tools", BETA, tools=True),
    Setting("dr_grpo", "mask_truncated_completions", CUT, counts_all="sequences"),
    Setting("dapo", "on policy", drift=0.0),
    Setting("dapo", "second pass"),
    Setting("dapo", "beta 0.1, temperature 0.7", BETA | {"temperature": 0.7}),
    Setting("dapo", "entropy_coef 0.5", {"entropy_coef": 0.5}),
    Setting("dapo", "tools, micro-batches of 40 tokens", {"micro_batch_tokens": 40}, tools=True),
    Setting("dapo", "two rewards unknown", rewards="two unknown", counts_all="tokens"),
    Setting("dapo", "mask_truncated_completions", CUT),
    Setting("dapo", "correction token_truncate", corrected("token_truncate")),
    Setting("gspo", "on policy", drift=0.0),
    Setting("gspo", "second pass"),
    Setting("gspo", "epsilon 0.1, epsilon_high 0.2", WIDE),
    Setting("gspo", "wide, tools, beta 0.1", WIDE | BETA, tools=True),
    Setting("gspo", "wide, averaging token_mean", WIDE | {"averaging": "token_mean"}),
    Setting("gspo", "wide, correction sequence_truncate", corrected("sequence_truncate", **WIDE)),
    Setting("cispo", "on policy", drift=0.0),
    Setting("cispo", "second pass"),
    Setting("cispo", "epsilon_high 1.1", {"epsilon_high": 1.1}),
    Setting("cispo", "beta 0.1, tools", BETA, tools=True),
    Setting("cispo", "scale_rewards batch, temperature 0.7", {"scale_rewards": "batch", "temperature": 0.7}),
    Setting("cispo", "correction sequence_mask", corrected("sequence_mask")),
    Setting("rloo", "on policy", drift=0.0),
    Setting("rloo", "second pass", drift=NEAR),
    Setting("rloo", "beta 0", {"beta": 0.0}, drift=NEAR),
    Setting("rloo", "normalized advantages", {"scale_rewards": "batch"}, drift=NEAR),
    Setting("rloo", "epsilon 0.1, epsilon_high 0.5", {"epsilon": 0.1, "epsilon_high": 0.5}, drift=NEAR),
    Setting("rloo", "temperature 0.7", {"temperature": 0.7}, drift=NEAR / 2),
    Setting("rloo", "two rewards unknown", rewards="two unknown", counts_all="sequences", drift=NEAR),
    Setting("rloo", "mask_truncated_completions, beta 0", CUT | {"beta": 0.0}, counts_all="sequences", drift=NEAR),
]

MEASURED = [setting for setting in SETTINGS if setting.rewards == "all differ"]
"""A token of advantage 0 is not computed here, so in the others TRL's means are over more tokens."""


@pytest.fixture(scope="module")
def outcomes(compare: Callable[..., Any]) -> Callable[[Setting], Any]:
    """Compare a setting, once."""
    known: dict[str, Any] = {}

    def of(setting: Setting) -> Any:
        key = f"{setting.algo} {setting.name}"
        if key not in known:
            how = {"drift": setting.drift, "rewards": setting.rewards, "tools": setting.tools}
            known[key] = compare(setting.algo, setting.changes, **how)
        return known[key]

    return of


@pytest.fixture(scope="module")
def table() -> Iterator[Callable[..., None]]:
    """Take in rows of a table and print it in the end."""
    head = ("algorithm", "setting", "advantages", "loss", "gradient, largest", "gradient, share of worst parameter")
    rows = [" | ".join(head), " | ".join(["---"] * len(head))]

    def add(setting: Setting, *differences: float) -> None:
        rows.append(" | ".join([setting.algo, setting.name, *(f"{value:.1e}" for value in differences)]))

    yield add
    print("\n\nDifferences from TRL 1.16, float32:\n" + "\n".join(f"| {row} |" for row in rows))


def share(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference as a share of their norm."""
    return float((ours - theirs).norm() / theirs.norm())


def flat(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


def in_loss(setting: Setting, sample: Any) -> bool:
    cut = sample.truncated and bool(setting.changes.get("mask_truncated_completions"))
    return sample.reward is not None and not cut


def translated(setting: Setting, samples: Any, loss: float, advantages: list[float]) -> tuple[float, float]:
    """Return TRL's loss as it would be if it left out what ours does, and the factor for its gradient."""
    cut = [not in_loss(setting, sample) for sample in samples]
    if setting.algo == "rloo" and "mask_truncated_completions" in setting.changes:
        loss += sum(a for a, out in zip(advantages, cut, strict=True) if out) / len(samples)
    if setting.counts_all is None:
        return loss, 1.0
    sizes = [1 if setting.counts_all == "sequences" else sum(sample.mask) for sample in samples]
    factor = sum(sizes) / sum(size for size, out in zip(sizes, cut, strict=True) if not out)
    return loss * factor, factor


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.algo}: {setting.name}")
def test_equal(setting: Setting, outcomes: Callable[[Setting], Any], table: Callable[..., None]) -> None:
    samples, ours, theirs = outcomes(setting)
    loss, factor = translated(setting, samples, theirs.loss, theirs.advantages)
    wanted = {name: gradient * factor for name, gradient in theirs.gradient.items()}
    assert ours.gradient.keys() == wanted.keys()
    off_advantages = max(abs(a - b) for a, b in zip(ours.advantages, theirs.advantages, strict=True))
    off_loss = abs(ours.loss - loss)
    off_largest = float((flat(ours.gradient) - flat(wanted)).abs().max())
    off_share = max(share(ours.gradient[name], wanted[name]) for name in wanted)
    table(setting, off_advantages, off_loss, off_largest, off_share)
    assert off_advantages < FP32
    assert off_loss < FP32
    assert off_largest < FP32
    assert off_share < SHARE


@pytest.mark.parametrize("setting", MEASURED, ids=lambda setting: f"{setting.algo}: {setting.name}")
def test_metrics_are_theirs(setting: Setting, outcomes: Callable[[Setting], Any]) -> None:
    _, ours, theirs = outcomes(setting)
    names = [name for name in ours.metrics.keys() & theirs.metrics.keys() if name.startswith(SHARED)]
    if setting.algo in ("gspo", "rloo"):  # one ratio a sequence
        names = [name for name in names if not name.startswith("clip_ratio")]
    assert "entropy" in names
    for name in names:
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], abs=FP32, rel=FP32), name


@pytest.mark.parametrize("algo", sorted({setting.algo for setting in SETTINGS}))
def test_every_setting_is_another_gradient(algo: str, outcomes: Callable[[Setting], Any]) -> None:
    gradients = {s.name: flat(outcomes(s)[1].gradient) for s in SETTINGS if s.algo == algo}
    for first, second in combinations(gradients, 2):
        assert share(gradients[first], gradients[second]) > DIFFERENT, (first, second)
