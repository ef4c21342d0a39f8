"""What `--algo` means: the values a preset brings, the keys the algorithm reads, the keys it pins.

An option that an algorithm does not read is refused when given: no option is accepted and ignored.
A pinned key defines the algorithm: with another value it would be another algorithm under a false name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOOP = frozenset({
    "algo", "model", "output_dir", "seed", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "min_lr_ratio", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "micro_batch_tokens",
    "gradient_checkpointing",
    "averaging", "save_steps", "save_total_limit", "logging_steps", "torch_threads", "dtype", "device",
    "lora_r", "lora_alpha", "lora_target_modules",
})  # fmt: skip
"""Keys of the loop that every algorithm shares."""

GROUPS = LOOP | frozenset({
    "env", "env_args", "prompts_per_step", "num_generations", "mini_batches", "num_iterations", "temperature",
    "max_completion_length", "max_model_length",
    "max_cache_tokens", "layers", "beta", "epsilon_high", "scale_rewards",
    "mask_truncated_completions", "reward_weights", "reward_model", "control", "save_trajectories",
})  # fmt: skip
"""Keys of the algorithms that sample groups of episodes."""


@dataclass(frozen=True)
class Preset:
    """One algorithm: `values` over the defaults, `reads` (keys it acts on), `pinned` (key of `values` -> why)."""

    values: Mapping[str, Any]
    reads: frozenset[str]
    pinned: Mapping[str, str] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "sft": Preset(
        values={"averaging": "token_mean", "learning_rate": 1e-3},
        reads=LOOP | {"data", "batch_size", "min_reward", "lora_dropout"},
    ),
    "grpo": Preset(values={"averaging": "sequence_mean"}, reads=GROUPS | {"epsilon"}),
    "cispo": Preset(
        values={"averaging": "token_mean", "epsilon_high": 5.0},
        reads=GROUPS,
        pinned={"averaging": "every token of the batch weighs the same, arXiv:2506.13585"},
    ),
}


def unread(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of `fields` that nothing reads under `values` (which holds `algo`), each with the reason."""
    algo = values["algo"]
    reasons = {}
    for key in fields.keys() - PRESETS[algo].reads:
        readers = [name for name, preset in PRESETS.items() if key in preset.reads]
        reasons[key] = f"--algo {algo} does not read it; {' and '.join(readers)} would"
    if values.get("lora_r") is None:
        for key in ("lora_alpha", "lora_dropout", "lora_target_modules"):
            reasons.setdefault(key, "lora_r is none, so there is no adapter; with a rank it would be read")
    if values.get("lr_scheduler_type") == "constant":
        reasons["min_lr_ratio"] = "a constant learning rate never falls; linear and cosine would read it"
    return reasons


def unpinned(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of `values` (which holds `algo`) that contradict what the algorithm pins, with the reason."""
    algo = values["algo"]
    preset = PRESETS[algo]
    reasons = {}
    for key, why in preset.pinned.items():
        wanted = preset.values[key]
        if values.get(key, wanted) != wanted:
            free = [name for name, other in PRESETS.items() if key in other.reads and key not in other.pinned]
            others = f" {' and '.join(free)} leave it open." if free else ""
            reasons[key] = f"--algo {algo} pins it to {wanted!r} ({why}), came {values[key]!r}.{others}"
    return reasons
