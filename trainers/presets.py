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
    "gradient_checkpointing", "averaging", "save_steps", "save_total_limit", "logging_steps", "report_to",
    "torch_threads", "dtype", "device", "lora_r", "lora_alpha", "lora_target_modules", "debug_mode", "debug_interval",
})  # fmt: skip
"""Keys of the loop that every algorithm shares."""

ONLINE = LOOP | frozenset({
    "env", "env_args", "trajectories", "prompts_per_step", "num_generations", "mini_batches", "temperature",
    "max_completion_length", "max_model_length", "max_cache_tokens", "layers", "chat_template_kwargs", "thinking_ratio",
    "mask_truncated_completions", "overlong_buffer", "reward_weights", "reward_model", "normalize_scores", "score_clip",
    "control", "save_trajectories", "eval_steps", "eval_tasks", "eval_env_args",
    "beta", "kl_estimator", "kl_in", "entropy_coef", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha",
    "importance_sampling_correction", "importance_sampling_cap",
})  # fmt: skip
"""Keys of the algorithms that learn from what the policy samples."""

GROUPS = ONLINE | frozenset({
    "num_iterations", "scale_rewards", "credit", "min_group_size", "dynamic_sampling", "max_resampling",
})  # fmt: skip
"""Keys of the algorithms whose baseline is the group."""

CLIPPED = GROUPS | {"epsilon", "epsilon_high", "importance_sampling_level"}
"""Keys of GRPO and its kin."""

CRITIC = ONLINE | frozenset({
    "epsilon", "epsilon_high", "gamma", "lam", "critic_model", "critic_backbone", "critic_learning_rate",
    "critic_warmup_steps", "vf_coef", "cliprange_value", "whiten_advantages", "num_ppo_epochs", "early_stop_kl",
    "debug_log_ratio",
})  # fmt: skip
"""Keys of PPO."""


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
    "grpo": Preset(values={"averaging": "sequence_mean"}, reads=CLIPPED),
    "dr_grpo": Preset(
        values={"averaging": "constant", "scale_rewards": "none"},
        reads=CLIPPED,
        pinned={
            "averaging": "a long answer's tokens weigh no less, arXiv:2503.20783",
            "scale_rewards": "to divide by the deviation favours easy and hard tasks, arXiv:2503.20783",
        },
    ),
    "dapo": Preset(
        values={
            "averaging": "token_mean",
            "epsilon_high": 0.28,
            "dynamic_sampling": True,
            "overlong_buffer": None,
        },
        reads=CLIPPED,
        pinned={
            "averaging": "every token of the batch weighs the same, arXiv:2503.14476",
            "dynamic_sampling": "groups of equal rewards are sampled anew, arXiv:2503.14476",
        },
    ),
    "gspo": Preset(
        values={
            "averaging": "sequence_mean",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        reads=CLIPPED,
        pinned={"importance_sampling_level": "the ratio is the sequence's, arXiv:2507.18071"},
    ),
    "cispo": Preset(
        values={"averaging": "token_mean", "epsilon_high": 5.0},
        reads=GROUPS | {"epsilon_high"},
        pinned={"averaging": "every token of the batch weighs the same, arXiv:2506.13585"},
    ),
    "rloo": Preset(
        values={
            "averaging": "sequence_mean",
            "scale_rewards": "none",
            "beta": 0.05,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        reads=CLIPPED,
    ),
    "reinforce++": Preset(
        values={
            "averaging": "token_mean",
            "scale_rewards": "batch",
            "beta": 0.01,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        reads=CLIPPED,
        pinned={"scale_rewards": "the whole batch is the baseline, arXiv:2501.03262"},
    ),
    "ppo": Preset(values={"averaging": "token_mean", "num_generations": 1}, reads=CRITIC),
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
