"""What is wrong between keys of a config that are each right alone."""

from __future__ import annotations

from collections.abc import Iterator

from ..agents.renderer import THINKING
from .config_keys import AllKeys
from .presets import PRESETS


def contradictions(config: AllKeys) -> Iterator[str]:
    """Yield what contradicts, each as a sentence that names what to change."""
    reads = PRESETS[config.algo].reads
    yield from _of_the_source(config)
    if "data" in reads and config.data is not None and bool(config.eval_steps) != (config.eval_data is not None):
        yield "eval_steps and eval_data go together: every so many steps the loss on the held-out file is measured"
    if "env" in reads:
        yield from _of_credit(config)
    if config.backend == "sglang":
        yield from _of_servers(config)
    if "teacher_model" in reads:
        yield from _of_the_teacher(config)
    yield from _of_preference(config)
    if config.algo == "cispo" and config.epsilon_high is None:
        yield "--algo cispo caps the ratio at epsilon_high, which is none; its preset has 5.0"
    if config.thinking_ratio is not None and (fixed := set(THINKING) & config.chat_template_kwargs.keys()):
        yield f"thinking_ratio draws by episode what chat_template_kwargs fixes by {min(fixed)}: keep one of them"
    if config.critic_warmup_steps >= config.max_steps:
        yield f"critic_warmup_steps {config.critic_warmup_steps} leave the policy none of the {config.max_steps} steps"
    if config.warmup_steps > config.max_steps:
        yield f"warmup_steps {config.warmup_steps} is more than max_steps {config.max_steps}"


def _of_the_source(config: AllKeys) -> Iterator[str]:
    """Yield what is wrong with where episodes come from: a file of records, stored episodes, an env."""
    reads = PRESETS[config.algo].reads
    if "env" not in reads:
        if config.data is None:
            yield (
                f"--algo {config.algo} learns from a file, data is not set; `gymtune rollout` writes one, and "
                "`gymtune plan` says what a file is good for"
            )
        if config.averaging == "constant":
            yield (
                f"averaging 'constant' divides by the longest completion, --algo {config.algo} samples none: use "
                "token_mean"
            )
    elif config.data is not None:
        if config.env is not None:
            yield "data and env are both given: learn from the file, or from episodes that are sampled in the env"
    elif config.trajectories is not None:
        if config.env is not None and not config.eval_steps:
            yield (
                "env: with trajectories nothing is sampled in it but for evaluations, and eval_steps is 0: leave env "
                "out, or give eval_steps"
            )
        if config.env is None and config.eval_steps:
            yield "eval_steps: an evaluation samples in an environment, env is not set"
    elif config.env is None:
        other = "data, a file" if "data" in reads else "trajectories, a file of stored episodes"
        stored = f" Or it learns from {other}" if {"data", "trajectories"} & reads else ""
        yield (
            f"--algo {config.algo} samples in an environment, env is not set; `gymtune envs list` names them.{stored}"
        )
    elif (config.prompts_per_step * config.num_generations) % config.mini_batches:
        yield (
            f"mini_batches must divide the {config.prompts_per_step * config.num_generations} episodes of a step "
            f"(prompts_per_step {config.prompts_per_step} x num_generations {config.num_generations}), came "
            f"{config.mini_batches}"
        )


def _of_servers(config: AllKeys) -> Iterator[str]:
    """Yield what is wrong between the keys of SGLang servers."""
    if bool(config.sglang_url) == config.sglang_launch:
        yield "backend sglang wants sglang_url, addresses of servers, or sglang_launch, which starts one: one of both"
    if config.weight_sync == "adapter" and config.lora_r is None:
        yield "weight_sync 'adapter' sends an adapter, and lora_r is none: give a rank, or use disk"
    corrects = "importance_sampling_correction" in PRESETS[config.algo].reads
    if config.max_staleness > 0 and corrects and config.importance_sampling_correction == "none":
        yield (
            f"max_staleness {config.max_staleness} trains on episodes of older weights: correct that by "
            "importance_sampling_correction, such as token_truncate"
        )
    if config.drop_staleness is not None and config.drop_staleness >= config.max_staleness:
        yield (
            f"drop_staleness {config.drop_staleness} never drops: no episode is older than max_staleness "
            f"{config.max_staleness}"
        )


def _of_the_teacher(config: AllKeys) -> Iterator[str]:
    """Yield what is wrong between the keys of distillation."""
    if config.teacher_model is None:
        yield f"--algo {config.algo} learns from a teacher, teacher_model is not set: give a model folder"
    if config.teacher_cache is not None and config.distill_top_k is None:
        yield "teacher_cache keeps the top-k log-probs of the teacher, and distill_top_k is none: give a number"
    if config.algo == "opd" and config.opd_loss == "sampled" and config.importance_sampling_level == "product":
        yield (
            "opd_loss 'sampled' gives each token an advantage of its own, importance_sampling_level 'product' takes a "
            "sequence for one action: use token or sequence"
        )


def _of_preference(config: AllKeys) -> Iterator[str]:
    """Yield what is wrong between the keys of DPO and its kin."""
    if config.algo in ("dpo", "ipo", "kto", "simpo") and config.beta == 0:
        yield f"--algo {config.algo} scales what a reply earns by beta, which is 0: leave it to the preset, or raise it"
    if config.algo == "kto" and config.data is not None and config.batch_size == 1:
        yield "--algo kto estimates a KL from prompts with another's reply: batch_size must be at least 2, came 1"


def _of_credit(config: AllKeys) -> Iterator[str]:
    """Yield what is wrong between the keys of credit, reference and ratios."""
    reads = PRESETS[config.algo].reads
    alone = config.algo == "opd" and config.reward_coef == 0  # the teacher judges each episode by itself
    compared = ("min_group_size" in reads and not alone) or "pairs" in reads
    sampled = config.trajectories is None and config.data is None and compared
    if sampled and config.num_generations < config.min_group_size:
        yield (
            f"--algo {config.algo} compares the episodes of a group: num_generations must be at least "
            f"min_group_size {config.min_group_size}, came {config.num_generations}"
        )
    if config.credit == "turn" and config.control == "shuffle_rewards":
        yield "control 'shuffle_rewards' deals out rewards of episodes, credit 'turn' reads those of turns"
    if config.credit == "turn" and config.importance_sampling_level == "product":
        yield (
            "credit 'turn' gives a sequence several advantages, importance_sampling_level 'product' takes it for "
            "one action: use token or sequence"
        )
    if config.sync_ref_model and config.lora_r is not None:
        yield (
            "sync_ref_model moves the reference, but with lora_r the reference is the model with its adapter off, "
            "which stays what it was: leave one of the two out"
        )
    if config.overlong_buffer is not None and config.overlong_buffer > config.max_completion_length:
        yield (
            f"overlong_buffer {config.overlong_buffer} is more than the max_completion_length "
            f"{config.max_completion_length} that it is the end of"
        )
