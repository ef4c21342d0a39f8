"""What `--algo` means: the values a preset brings, the keys the algorithm reads, the keys it pins.

An option that an algorithm does not read is refused when given: no option is accepted and ignored.
A pinned key defines the algorithm: with another value it would be another algorithm under a false name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Want = Literal["pairs", "labels", "replies"]

_MOST_NAMES = 3  # of algorithms in an error

LOOP = frozenset({
    "algo", "model", "output_dir", "seed", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "min_lr_ratio", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "micro_batch_tokens",
    "gradient_checkpointing", "averaging", "save_steps", "save_total_limit", "logging_steps", "report_to",
    "torch_threads", "dtype", "device", "lora_r", "lora_alpha", "lora_target_modules", "debug_mode", "debug_interval",
})  # fmt: skip
"""Keys of the loop that every algorithm shares."""

SERVERS = frozenset({
    "sglang_url", "sglang_launch", "sglang_args", "sglang_python", "weight_sync", "weight_sync_dir", "sync_tolerance",
    "max_staleness", "drop_staleness",
})  # fmt: skip
"""Keys of sampling by SGLang servers."""

SAMPLED = SERVERS | frozenset({
    "backend",
    "env", "env_args", "prompts_per_step", "num_generations", "temperature", "max_completion_length",
    "max_model_length", "max_cache_tokens", "layers", "chat_template_kwargs", "thinking_ratio", "reward_weights",
    "reward_model", "normalize_scores", "score_clip", "save_trajectories", "eval_steps", "eval_tasks", "eval_env_args",
})  # fmt: skip
"""Keys of acting in an env."""

ONLINE = LOOP | SAMPLED | frozenset({
    "trajectories", "mini_batches", "mask_truncated_completions", "overlong_buffer", "control",
    "beta", "kl_estimator", "kl_in", "entropy_coef", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha",
    "importance_sampling_correction", "importance_sampling_cap",
})  # fmt: skip
"""Keys of the algorithms that learn from what the policy samples."""

FILE = frozenset({"data", "batch_size", "drop_long"})
"""Keys of reading a file."""

OFFLINE = LOOP | FILE | frozenset({"eval_data", "eval_steps", "lora_dropout"})
"""Keys of the algorithms that learn from a file."""

PREFERENCE = OFFLINE | SAMPLED | {"pairs"}
"""Keys of DPO and its kin, which learn from a file of pairs or sample their own."""

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


STORED = frozenset({
    "num_generations", "dynamic_sampling", "max_resampling", "save_trajectories", "max_staleness", "drop_staleness",
})  # fmt: skip
"""Keys that stored trajectories (`trajectories`) leave nothing to say."""

ACTING = SERVERS | frozenset({
    "backend",
    "env_args", "temperature", "max_cache_tokens", "layers", "chat_template_kwargs", "thinking_ratio",
    "reward_weights", "reward_model", "normalize_scores", "score_clip",
    "eval_tasks", "eval_env_args",
})  # fmt: skip
"""Keys of how the policy acts and is paid; with `trajectories` evaluations alone read them."""


DISTILL = frozenset({"teacher_model", "distill_temperature", "divergence", "jsd_beta", "distill_top_k"})
"""Keys of comparing distributions with a teacher's."""

_PAIRS = {"averaging": "a pair counts once"}
_PREFERENCE = {"averaging": "sequence_mean", "learning_rate": 1e-5}


@dataclass(frozen=True)
class Preset:
    """One algorithm: `values` over the defaults, `reads` (keys it acts on), `pinned` (key of `values` -> why)."""

    values: Mapping[str, Any]
    reads: frozenset[str]
    pinned: Mapping[str, str] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "sft": Preset(
        values={"averaging": "token_mean", "learning_rate": 1e-3},
        reads=OFFLINE | {"min_reward", "best_of"},
    ),
    "reward": Preset(
        values={"averaging": "sequence_mean", "learning_rate": 1e-4},
        reads=OFFLINE | {"pairs", "margin", "ties", "center_rewards_coefficient"},
        pinned=_PAIRS,
    ),
    "dpo": Preset(
        values=_PREFERENCE | {"beta": 0.1},
        reads=PREFERENCE | {"beta", "label_smoothing", "reference_free", "length_normalized"},
        pinned=_PAIRS,
    ),
    "ipo": Preset(values=_PREFERENCE | {"beta": 0.1}, reads=PREFERENCE | {"beta", "reference_free"}, pinned=_PAIRS),
    "orpo": Preset(values=_PREFERENCE | {"beta": 0.1}, reads=PREFERENCE | {"beta"}, pinned=_PAIRS),
    "kto": Preset(
        values=_PREFERENCE | {"beta": 0.1},
        reads=(PREFERENCE - {"pairs"})
        | {"beta", "desirable_weight", "undesirable_weight", "label_threshold", "reference_free"},
        pinned={"averaging": "a reply counts once, arXiv:2402.01306"},
    ),
    "simpo": Preset(
        values=_PREFERENCE | {"beta": 2.0},
        reads=PREFERENCE | {"beta", "simpo_gamma", "label_smoothing"},
        pinned=_PAIRS,
    ),
    "distill": Preset(
        values={"averaging": "token_mean", "learning_rate": 1e-3},
        reads=OFFLINE | DISTILL | {"min_reward", "best_of", "distill_alpha", "teacher_cache"},
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
            "importance_sampling_level": "product",
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
        reads=CLIPPED - {"min_group_size", "dynamic_sampling", "max_resampling"},  # no group is its baseline
        pinned={"scale_rewards": "the whole batch is the baseline, arXiv:2501.03262"},
    ),
    "ppo": Preset(values={"averaging": "token_mean", "num_generations": 1}, reads=CRITIC),
    "opd": Preset(
        values={"averaging": "token_mean", "divergence": "reverse_kl", "scale_rewards": "none"},
        reads=(CLIPPED - {"beta", "kl_estimator", "kl_in", "sync_ref_model", "ref_model_sync_steps"})
        - {"ref_model_mixup_alpha", "credit", "control", "dynamic_sampling", "max_resampling", "trajectories"}
        | DISTILL
        | {"opd_loss", "reward_coef"},
    ),
}


_OFF = (None, 0, False, "none")
_BEHIND: Mapping[str, tuple[tuple[str, ...], str]] = {
    "lora_r": (
        ("lora_alpha", "lora_dropout", "lora_target_modules"),
        "lora_r is none, so there is no adapter; with a rank it would be read",
    ),
    "beta": (
        ("kl_estimator", "kl_in", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"),
        "beta is 0, so no KL counts; with a weight above 0 it would be read",
    ),
    "sync_ref_model": (
        ("ref_model_sync_steps", "ref_model_mixup_alpha"),
        "sync_ref_model is false, so the reference stays what it is",
    ),
    "importance_sampling_correction": (
        ("importance_sampling_cap",),
        "importance_sampling_correction is none, so nothing is capped",
    ),
    "dynamic_sampling": (("max_resampling",), "dynamic_sampling is false, so no group is sampled anew"),
    "eval_steps": (("eval_tasks", "eval_env_args", "eval_data"), "eval_steps is 0, so nothing is evaluated"),
    "debug_mode": (("debug_interval",), "debug_mode is false, so no samples are written"),
}
"""A key that may be off -> the keys that are read only where it is on, and why they are not."""


def looks_for(algo: str) -> Want | None:
    """Return what an algorithm looks for in a file of records, by the keys it reads; None for one that reads none."""
    reads = PRESETS[algo].reads
    if "data" not in reads:
        return None
    if "pairs" in reads:
        return "pairs"
    return "labels" if "label_threshold" in reads else "replies"


def unread(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of `fields` that nothing reads under `values` (which holds `algo`), each with the reason."""
    algo = values["algo"]
    reasons = {}
    for key in fields.keys() - PRESETS[algo].reads:
        readers = [name for name, preset in PRESETS.items() if key in preset.reads]
        reasons[key] = f"--algo {algo} does not read it; {_few(readers)} would"
    for switch, (keys, why) in _BEHIND.items():
        if values.get(switch) in _OFF:
            for key in keys:
                reasons.setdefault(key, why)
    for key, why in _idle_backend(values):
        reasons.setdefault(key, why)
    if not _is_scored(values):
        for key in ("normalize_scores", "score_clip"):
            reasons.setdefault(key, "no reward model or function scores; with one of them it would be read")
    for key, why in _idle_offline(values):
        reasons.setdefault(key, why)
    for key, why in _idle_beside_teacher(values):
        reasons.setdefault(key, why)
    if values.get("critic_backbone") == "shared":
        reasons.setdefault("critic_model", "critic_backbone is shared, the critic reads the policy's layers")
    if values.get("lr_scheduler_type") == "constant":
        reasons["min_lr_ratio"] = "a constant learning rate never falls; linear and cosine would read it"
    return reasons


def _idle_backend(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys that are of the other backend, each with the reason."""
    if values.get("backend", "torch") == "torch":
        yield from ((key, "backend is torch, there is no server; with sglang it would be read") for key in SERVERS)
        return
    for key in ("layers", "max_cache_tokens"):
        yield key, "backend is sglang, whose server has its own layers and cache"
    if not values.get("sglang_launch"):
        for key in ("sglang_args", "sglang_python"):
            yield key, "sglang_launch is false, no server is started"


def _idle_offline(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys that are of sampling alone where episodes are stored (`trajectories`), each with the reason."""
    reads = PRESETS[values["algo"]].reads
    if "data" in reads and "env" in reads:
        if values.get("data") is not None:
            yield from ((key, "data is given, so nothing is sampled") for key in SAMPLED - {"eval_steps"})
        else:
            yield from ((key, "no data is given, episodes are sampled") for key in FILE | {"eval_data"})
    if values.get("trajectories") is None:
        return
    for key in STORED:
        yield key, "trajectories are stored: their groups are as they were sampled"
    if values.get("env") is not None:
        return
    why = (
        "trajectories are stored, each counts at the temperature it was sampled at and with what it earned; and "
        "without an env for evaluations nothing is sampled"
    )
    yield from ((key, why) for key in ACTING)
    if values.get("averaging") != "constant" and values.get("overlong_buffer") is None:
        yield "max_completion_length", "trajectories are stored, they are as long as they are"


def _idle_beside_teacher(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys that say how a teacher is compared with, or what is added to that, where nobody asks for it."""
    if values["algo"] == "opd":
        sampled, paid = values.get("opd_loss", "sampled") == "sampled", bool(values.get("reward_coef"))
        if sampled:
            why = "opd_loss is sampled, the teacher judges the sampled token alone; full would read it"
            yield from ((key, why) for key in sorted(DISTILL - {"teacher_model"}))
        if not paid:
            why = "reward_coef is 0, so rewards teach nothing; with a weight above 0 it would be read"
            yield from ((key, why) for key in ("scale_rewards", "min_group_size", "overlong_buffer"))
        if not sampled and not paid:
            why = "opd_loss is full and reward_coef 0, so there is no ratio; with a weight above 0 it would be read"
            yield from ((key, why) for key in ("epsilon", "epsilon_high", "importance_sampling_level"))
    if values.get("divergence") != "jsd":
        yield "jsd_beta", "divergence is not jsd, whose mixture it is of"


def unpinned(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of `values` (which holds `algo`) that contradict what the algorithm pins, with the reason."""
    algo = values["algo"]
    preset = PRESETS[algo]
    reasons = {}
    for key, why in preset.pinned.items():
        wanted = preset.values[key]
        if values.get(key, wanted) != wanted:
            free = [name for name, other in PRESETS.items() if key in other.reads and key not in other.pinned]
            others = f" {_few(free)} leave it open." if free else ""
            reasons[key] = f"--algo {algo} pins it to {wanted!r} ({why}), came {values[key]!r}.{others}"
    return reasons


def _is_scored(values: Mapping[str, Any]) -> bool:
    """Whether something but the env scores: a reward model, or what is named as `module:function`."""
    weights = values.get("reward_weights")
    return values.get("reward_model") is not None or (isinstance(weights, Mapping) and any(":" in n for n in weights))


def _few(names: Sequence[str]) -> str:
    """Return up to three names; "..." stands for the others."""
    return " and ".join(names) if len(names) <= _MOST_NAMES else ", ".join([*names[:_MOST_NAMES], "..."])
