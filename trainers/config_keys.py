"""The keys of a training run, by subject. `config.TrainConfig` joins and checks them; nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, JsonValue

from ..agents.backend import Layers

Algo = Literal[
    "sft", "reward", "dpo", "ipo", "orpo", "kto", "simpo", "distill",
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "ppo", "opd",
]  # fmt: skip
Averaging = Literal["token_mean", "sequence_mean", "constant"]
ScaleRewards = Literal["group", "batch", "none"]
RatioLevel = Literal["token", "sequence", "product"]
DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class RunKeys(BaseModel):
    """What is trained, on what, and what is written."""

    algo: Algo = Field(description="the algorithm; brings a preset")
    model: str = Field(min_length=1, description="model folder in Hugging Face form")
    output_dir: str = Field(min_length=1, description="run folder")
    env: str | None = Field(
        default=None, min_length=1, description="id of the environment that episodes are sampled in"
    )
    env_args: dict[str, JsonValue] = Field(default={}, description="keyword arguments of the environment")
    trajectories: str | None = Field(
        default=None,
        min_length=1,
        description="file of stored episodes to learn from in place of sampling; they need their log-probs",
    )
    data: str | None = Field(
        default=None,
        min_length=1,
        description="file to learn from: episodes, conversations, pairs, labelled replies",
    )
    eval_data: str | None = Field(
        default=None, min_length=1, description="file of held-out records, which evaluations measure the loss on"
    )
    seed: int = Field(default=0, ge=0, description="seed of sampling, tasks and data order")
    save_steps: int = Field(default=50, ge=0, description="steps between checkpoints; 0: only at the end")
    save_total_limit: int | None = Field(default=2, ge=1, description="checkpoints kept; none: all")
    logging_steps: int = Field(default=1, ge=1, description="steps between lines of metrics")
    save_trajectories: bool = Field(default=True, description="keep the sampled trajectories in the run folder")
    torch_threads: int | None = Field(default=None, ge=1, description="CPU threads of torch; none: torch's choice")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="dtype of the weights")
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default=[], description="where the lines of metrics go as well"
    )
    eval_steps: int = Field(default=0, ge=0, description="steps between evaluations on held-out tasks; 0: none")
    eval_tasks: int = Field(default=64, ge=1, description="held-out tasks of an evaluation")
    eval_env_args: dict[str, JsonValue] = Field(
        default={}, description="arguments of the environment that differ in evaluations; an env with splits: test"
    )
    debug_mode: bool = Field(
        default=False, description="write decoded samples with mask, reward parts and advantages to debug.jsonl"
    )
    debug_interval: int = Field(default=10, ge=1, description="steps between the samples of debug_mode")


class OptimizerKeys(BaseModel):
    """Steps, learning rate, AdamW, LoRA."""

    max_steps: int = Field(
        default=100, ge=1, description="steps; one step is a rollout batch with its updates, or a batch"
    )
    learning_rate: float = Field(default=3e-4, gt=0, description="peak learning rate of AdamW")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="shape after warm-up"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the learning rate rises from 0")
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="last learning rate, as a share of the peak")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of the gradient")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the mean of the squared gradient")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the squared gradient")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients of a larger norm are scaled down to it")
    lora_r: int | None = Field(default=None, ge=1, description="rank of LoRA adapters; none: every weight is trained")
    lora_alpha: int = Field(default=32, ge=1, description="what adapters add is multiplied by lora_alpha / lora_r")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="share of an adapter's inputs that is dropped")
    lora_target_modules: str | list[str] = Field(
        default="all-linear", description="ends of the names of the matrices that get an adapter"
    )


class BatchKeys(BaseModel):
    """How much is sampled and computed at a time."""

    min_reward: float | None = Field(default=None, description="trajectories with less reward are left out")
    prompts_per_step: int = Field(default=32, ge=1, description="tasks sampled in a step, each a group")
    num_generations: int = Field(default=8, ge=1, description="episodes of one group")
    best_of: int | None = Field(default=None, ge=1, description="best episodes of each group that are kept; none: all")
    drop_long: bool = Field(
        default=False, description="leave out what is longer than the model takes, in place of refusing the file"
    )
    batch_size: int = Field(default=64, ge=1, description="trajectories, or pairs of them, of one optimizer step")
    mini_batches: int = Field(default=1, ge=1, description="optimizer steps that a rollout batch is split into")
    num_iterations: int = Field(default=1, ge=1, description="passes over a rollout batch")
    micro_batch_tokens: int = Field(
        default=4096, ge=1, description="tokens computed in one forward; bounds memory, not the result"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="compute layers again in the backward pass: less memory, a third more work"
    )


class SamplingKeys(BaseModel):
    """How the policy acts."""

    temperature: float = Field(default=1.0, gt=0, description="of sampling, and of the log-probs in the loss")
    max_completion_length: int = Field(default=256, ge=1, description="most tokens sampled in a turn")
    max_model_length: int | None = Field(
        default=None, ge=2, description="longest context; none: what the model was made for"
    )
    max_cache_tokens: int | None = Field(
        default=None, ge=2, description="places for tokens in the sampler's cache; none: no bound"
    )
    layers: Layers = Field(
        default="packed",
        description="how the sampler runs the layers: packed (fast on a CPU, a copy of the weights), plain, compiled "
        "(torch.compile), deterministic (samples do not depend on their batch, to the bit; several times slower)",
    )


class LossKeys(BaseModel):
    """What a token costs, what an episode is worth."""

    beta: float = Field(
        default=0.0,
        ge=0,
        description="weight of the KL to the reference model; dpo and its kin: scale of their log-ratios",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="how the KL is told from sampled tokens: k1 unbiased, k2 of little variance, k3 both"
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="where the KL counts: beside the loss, or taken off the reward of each token"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    epsilon: float = Field(default=0.2, gt=0, le=1, description="ratios below 1 - epsilon are clipped")
    epsilon_high: float | None = Field(
        default=None,
        gt=0,
        description="grpo: ratios above 1 + epsilon_high are clipped (none: epsilon); cispo: cap of the ratio",
    )
    averaging: Averaging = Field(default="token_mean", description="how losses of tokens become the loss of the batch")
    scale_rewards: ScaleRewards = Field(
        default="group", description="divide advantages by the group's deviation, the batch's, or not"
    )
    mask_truncated_completions: bool = Field(default=False, description="leave truncated episodes out of the loss")
    reward_weights: dict[str, float] = Field(
        default={}, description="weights of rewards, over the environment's own; module:function is one of yours"
    )
    reward_model: str | None = Field(
        default=None, min_length=1, description="folder of a reward model, address of a server, or stub"
    )
    control: Literal["none", "shuffle_rewards"] = Field(
        default="none", description="control run: rewards dealt out at random must teach nothing"
    )


class CreditKeys(BaseModel):
    """How rewards become advantages, and what is sampled for that."""

    credit: Literal["episode", "turn"] = Field(
        default="episode", description="a token's advantage is its episode's, or that of its turn's rewards to come"
    )
    min_group_size: int = Field(
        default=2, ge=2, description="groups with fewer episodes that did not fail teach nothing"
    )
    dynamic_sampling: bool = Field(
        default=False, description="groups of equal rewards are sampled anew with other tasks"
    )
    max_resampling: int = Field(default=3, ge=1, description="rounds of dynamic sampling in a step")
    overlong_buffer: int | None = Field(
        default=None,
        ge=1,
        description="a turn's last tokens before max_completion_length, over which a penalty grows to 1",
    )
    importance_sampling_level: RatioLevel = Field(
        default="token", description="ratios are of tokens, the geometric mean of a sequence's, or their product"
    )
    importance_sampling_correction: Correction = Field(
        default="none", description="how the gap between sampler and trainer is corrected: truncated or masked weights"
    )
    importance_sampling_cap: float = Field(default=3.0, gt=0, description="greatest weight of that correction")
    normalize_scores: bool = Field(
        default=False, description="scores of reward models and functions get mean 0 and deviation 1 in a step"
    )
    score_clip: float | None = Field(default=None, gt=0, description="scores are cut to this size, after normalising")
    thinking_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of episodes whose template opens a thinking span; none: its default",
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(default={}, description="arguments of the chat template")
    sync_ref_model: bool = Field(default=False, description="the reference follows the policy")
    ref_model_sync_steps: int = Field(default=64, ge=1, description="steps between its moves")
    ref_model_mixup_alpha: float = Field(
        default=0.6, gt=0, le=1, description="share of the policy in the reference after a move; 1: a copy"
    )


class CriticKeys(BaseModel):
    """PPO's critic and its returns."""

    gamma: float = Field(default=1.0, gt=0, le=1, description="discount of a token")
    lam: float = Field(default=0.95, ge=0, le=1, description="lambda of GAE")
    critic_model: str | None = Field(
        default=None, min_length=1, description="folder of the critic's backbone; none: a copy of the policy's"
    )
    critic_backbone: Literal["separate", "shared"] = Field(
        default="separate", description="the critic's layers are its own, or the policy's"
    )
    critic_learning_rate: float | None = Field(default=None, gt=0, description="none: learning_rate")
    critic_warmup_steps: int = Field(default=0, ge=0, description="first steps that train the critic alone")
    vf_coef: float = Field(default=0.5, gt=0, description="weight of the value loss")
    cliprange_value: float | None = Field(
        default=0.2, gt=0, description="values move at most so far from the old ones; none: no clipping"
    )
    whiten_advantages: bool = Field(default=True, description="advantages of a batch get mean 0 and deviation 1")
    num_ppo_epochs: int = Field(default=2, ge=1, description="passes over a rollout batch")
    early_stop_kl: float | None = Field(
        default=None, gt=0, description="the passes of a step end when the KL (k3) to the old policy is above this"
    )
    debug_log_ratio: bool = Field(default=False, description="log quantiles of the log-ratio of every optimizer step")


class PreferenceKeys(BaseModel):
    """DPO and its kin, and the reward model: what is compared, and how."""

    pairs: Literal["best_worst", "all"] = Field(
        default="best_worst", description="pairs of a group: its best and worst episode, or every two that differ"
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="dpo, simpo: how often the labels of pairs are taken to be wrong"
    )
    reference_free: bool = Field(default=False, description="the reference is uniform: its log-probs do not count")
    length_normalized: bool = Field(
        default=False, description="dpo: log-probs of replies are means over their tokens, not sums"
    )
    simpo_gamma: float = Field(
        default=0.5, ge=0, description="simpo: by how much beta times the mean log-probs of a pair should differ"
    )
    desirable_weight: float = Field(default=1.0, ge=0, description="kto: weight of good replies")
    undesirable_weight: float = Field(default=1.0, ge=0, description="kto: weight of bad replies")
    label_threshold: float | None = Field(
        default=None, description="kto: episodes with at least this reward are good; none: those that succeeded"
    )
    margin: Literal["none", "column", "reward"] = Field(
        default="none",
        description="reward: by how much a pair should differ: not said, its column margin, or its rewards' difference",
    )
    ties: Literal["drop", "half"] = Field(
        default="drop", description="reward: pairs of equals are left out, or count half for either side"
    )
    center_rewards_coefficient: float | None = Field(
        default=None, gt=0, description="reward: weight of the squared sum of a pair's scores, which centres them"
    )


class DistillKeys(BaseModel):
    """Learning from a teacher's distributions."""

    teacher_model: str | None = Field(default=None, min_length=1, description="folder of the teacher")
    distill_alpha: float = Field(
        default=0.5, ge=0, le=1, description="distill: weight of cross-entropy; the divergence has the rest"
    )
    distill_temperature: float = Field(
        default=1.0, gt=0, description="both distributions are softened by it; the divergence counts its square"
    )
    divergence: DivergenceKind = Field(
        default="forward_kl", description="of student from teacher: KL(teacher || student), its reverse, Jensen-Shannon"
    )
    jsd_beta: float = Field(default=0.5, gt=0, lt=1, description="weight of the teacher in the mixture of jsd")
    distill_top_k: int | None = Field(
        default=None, ge=1, description="tokens of the teacher told apart, the others are one; none: all"
    )
    teacher_cache: str | None = Field(
        default=None, min_length=1, description="folder where the teacher's top-k log-probs are kept"
    )
    opd_loss: Literal["sampled", "full"] = Field(
        default="sampled",
        description="opd: the teacher judges the sampled token (policy gradient), or all of them (divergence)",
    )
    reward_coef: float = Field(
        default=0.0, ge=0, description="opd: weight of the group's advantages from rewards, beside the teacher"
    )


class BackendKeys(BaseModel):
    """What samples: an engine in this process, or SGLang servers, and how these get the weights."""

    backend: Literal["torch", "sglang"] = Field(default="torch", description="what samples")
    sglang_url: list[str] = Field(default=[], description="addresses of the servers, all with this model")
    sglang_launch: bool = Field(default=False, description="start a server for this run, and end it with the run")
    sglang_args: list[str] = Field(default=[], description="more flags for the server that is started")
    sglang_python: str | None = Field(
        default=None, min_length=1, description="Python that has sglang; none: the one that runs gymtune"
    )
    weight_sync: Literal["disk", "tensor", "distributed", "adapter"] = Field(
        default="disk",
        description="how servers get the weights: through files, in the request, by a process group, or as an adapter",
    )
    weight_sync_dir: str | None = Field(
        default=None, min_length=1, description="folder that trainer and servers see; none: in the run folder"
    )
    sync_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="a server's log-probs may differ so far from the trainer's after a sync; none: by dtype",
    )
    max_staleness: int = Field(
        default=0, ge=0, description="steps that sampling may run ahead of training; 0: one waits for the other"
    )
    drop_staleness: int | None = Field(
        default=None, ge=0, description="episodes sampled by weights older than so many steps are left out; none: kept"
    )


class AllKeys(
    BackendKeys,
    DistillKeys,
    PreferenceKeys,
    CriticKeys,
    CreditKeys,
    LossKeys,
    SamplingKeys,
    BatchKeys,
    OptimizerKeys,
    RunKeys,
):
    """Every key of a run."""
