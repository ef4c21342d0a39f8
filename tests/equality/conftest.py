"""Both sides of a comparison with TRL: the same weights, tokens, masks, rewards and settings, through each one's code.

Nothing is sampled. TRL is handed completions where it would generate (`rollout_func`; `RLOOTrainer` has none, so in
place of its `_generate`), and all behind that is its own: old log-probs, reference, advantages, loss. Its correction of
the sampler goes with vLLM, which is not here: the flag is set on the finished trainer, and the sampler's log-probs are
those that the rollout gives.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gymtune.agents import Sampling, Trajectory
from gymtune.agents.models import load_model
from gymtune.trainers import TrainConfig
from gymtune.trainers.annotate import token_numbers
from gymtune.trainers.batch import make_rows
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.policy import policy_logprobs
from gymtune.trainers.registry import ALGORITHMS
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

GROUPS, GROUP_SIZE = 3, 4
LONGEST = 24  # tokens of a completion, those of its tools too
NO_TRL = "TRL is not installed, so nothing was compared with it: pip install -e '.[dev]'"
LOSS_TYPES = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
REWARDS: Mapping[str, list[float | None]] = {
    "all differ": [1.0, 0.0, 0.25, -0.5, 0.0, 0.0, 2.0, 0.5, 1.0, 0.75, 0.0, 0.1],
    "one group of equals": [1.0, 0.0, 0.25, -0.5, 0.3, 0.3, 0.3, 0.3, 1.0, 0.75, 0.0, 0.1],
    "two unknown": [1.0, None, 0.25, -0.5, 0.0, 0.0, 2.0, None, 1.0, 0.75, 0.0, 0.1],
}


@dataclass(frozen=True)
class Sample:
    """A prompt and what was said after it, in parts of (mask, ids); noise is between sampler and old policy."""

    prompt: list[int]
    parts: list[tuple[int, list[int]]]
    noise: list[float]
    reward: float | None
    group: str
    truncated: bool

    @property
    def completion(self) -> list[int]:
        return [token for _, ids in self.parts for token in ids]

    @property
    def mask(self) -> list[int]:
        return [mask for mask, ids in self.parts for _ in ids]


@dataclass(frozen=True)
class Outcome:
    """What one side computed: an advantage a sample, loss of the batch, gradients by parameter, metrics by name."""

    advantages: list[float]
    loss: float
    gradient: dict[str, Tensor]
    metrics: dict[str, float]


Weights = Callable[[float], dict[str, Tensor]]
Side = Callable[[TrainConfig, list[Sample], float], Outcome]


def make_samples(rewards: list[float | None], *, tools: bool, eos: int, vocabulary: int) -> list[Sample]:
    """Return three groups of four of unequal lengths, a third of them cut off (no stop token).

    With `tools` most have a turn and a tool's answer before the last turn.
    """
    rng = Random(0)

    def ids(least: int, most: int) -> list[int]:
        return [rng.randrange(20, vocabulary) for _ in range(rng.randint(least, most))]

    samples = []
    for group in range(GROUPS):
        prompt = ids(3, 7)
        for index in range(GROUP_SIZE):
            truncated = (group + index) % 3 == 1
            parts = [(1, [*ids(1, 6), *([] if truncated else [eos])])]
            if tools and index != 2:
                parts = [(1, [*ids(1, 4), eos]), (0, ids(2, 5)), *parts]
            noise = [rng.gauss(0, 0.3) for mask, part in parts if mask for _ in part]
            samples.append(Sample(prompt, parts, noise, rewards[group * GROUP_SIZE + index], f"g{group}", truncated))
    return samples


@pytest.fixture(scope="session")
def trl() -> Any:
    """TRL, or the test is skipped and says why."""
    with warnings.catch_warnings(action="ignore"):
        module = pytest.importorskip("trl", minversion="1.16", reason=NO_TRL)
        from transformers.utils import logging
        from trl import GRPOTrainer, RLOOTrainer  # noqa: F401 - TRL imports them when asked

    logging.disable_progress_bar()  # one for each model that is opened
    return module


@pytest.fixture(scope="session")
def weights(tiny_model: Path) -> Weights:
    """Return the policy's weights after it moved by a share of their spread; the reference stays where it was."""
    reference = dict(load_model(tiny_model).named_parameters())

    @cache
    def moved(drift: float) -> dict[str, Tensor]:
        first, then = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        found = {}
        for name, weight in reference.items():
            spread = weight.detach().std() if weight.dim() > 1 else torch.tensor(0.3)
            away = torch.randn(weight.shape, generator=first) + drift * torch.randn(weight.shape, generator=then)
            found[name] = weight.detach() + spread * away
        return found

    return moved


def give(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write weights into a model, ours or that of transformers: parameters have the same names."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def gradient_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every parameter."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


# --- ours -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ours(tiny_model: Path, weights: Weights) -> Side:
    """Run a setting as `Trainer` does: experiences, annotate, credit, rows, gradient."""

    def run(config: TrainConfig, samples: list[Sample], drift: float) -> Outcome:
        model = load_model(tiny_model)
        give(model, weights(0.0))
        algorithm = ALGORITHMS[config.algo](config)
        reference = load_model(tiny_model) if config.beta > 0 else None
        updater = Updater(model, algorithm, config, reference, LONGEST)
        trajectories = [_trajectory(i, sample, config.temperature) for i, sample in enumerate(samples)]
        experiences = experiences_of(trajectories, need_logprobs=True)
        old = token_numbers(experiences, lambda batch: policy_logprobs(model, batch)[0], 4096, updater.device)
        corrected = config.importance_sampling_correction != "none"
        for experience, sample, values in zip(experiences, samples, old, strict=True):
            said = [value - noise * corrected for value, noise in zip(values, sample.noise, strict=True)]
            for place, value in zip(experience.places, said, strict=True):
                experience.trajectory.logprobs[place] = value
        experiences = experiences_of(trajectories, need_logprobs=True)
        updater.annotate(experiences)
        algorithm.credit(experiences)
        stats = UpdateStats()
        stats.note_credit(experiences, config.importance_sampling_correction)
        give(model, weights(drift))
        rows = make_rows([experience for experience in experiences if algorithm.trains(experience)])
        loss = updater._gradient(rows, stats, warming=False)
        advantages = [experience.advantages[0] for experience in experiences]
        return Outcome(advantages, loss, gradient_of(model), stats.metrics())

    return run


def _trajectory(index: int, sample: Sample, temperature: float) -> Trajectory:
    """Return a sample as a trajectory, its log-probs still 0."""
    trajectory = Trajectory(
        trajectory_id=f"t{index}",
        group_id=sample.group,
        task_id=sample.group,
        env_id="E-v0",
        task_index=0,
        sampling=Sampling(temperature=temperature),
        terminated=not sample.truncated,
        truncated=sample.truncated,
        error=None if sample.reward is not None else "its checker broke",
    )
    trajectory.start_segment()
    trajectory.append_context(sample.prompt)
    for mask, ids in sample.parts:
        if mask:
            trajectory.append_turn("said", "stop", ids, [0.0] * len(ids))
        else:
            trajectory.append_context(ids)
    trajectory.turns[-1].reward = sample.reward or 0.0
    return trajectory


# --- TRL's ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def theirs(trl: Any, tiny_model: Path, weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Side:
    """Run a setting through a real trainer of TRL, from the completions on."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scratch = tmp_path_factory.mktemp("trl")

    def run(config: TrainConfig, samples: list[Sample], drift: float) -> Outcome:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        give(model, weights(0.0))
        common = {
            "model": model,
            "reward_funcs": lambda prompts, completions, **_: [sample.reward for sample in samples],
            "args": _arguments(trl, config, scratch),
            "train_dataset": Dataset.from_dict({"prompt": ["unused"] * GROUPS}),
            "processing_class": AutoTokenizer.from_pretrained(tiny_model),
        }
        if config.algo == "rloo":
            trainer = trl.RLOOTrainer(**common)
            prompts, answers = [s.prompt for s in samples], [s.completion for s in samples]
            trainer._generate = lambda _: (prompts, answers, ["unused"] * len(samples))
        else:
            rollout = _rollout(samples, _sampler_logprobs(model, samples, config.temperature))
            trainer = trl.GRPOTrainer(**common, rollout_func=lambda prompts, trainer: dict(rollout))
            trainer.use_vllm = config.importance_sampling_correction != "none"
            trainer._last_loaded_step = 0  # as after vLLM's last sync
        trainer.current_gradient_accumulation_steps = 1  # as `Trainer.train` sets it
        model.train()
        inputs = trainer._generate_and_score_completions([{"prompt": "unused"} for _ in samples])
        give(model, weights(drift))
        loss = trainer._compute_loss(model, inputs)
        loss.backward()
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        return Outcome(inputs["advantages"].tolist(), float(loss.detach()), gradient_of(model), metrics)

    return run


def _arguments(trl: Any, config: TrainConfig, scratch: Path) -> Any:
    """Return the same settings under TRL's names."""
    keys: dict[str, Any] = {
        "output_dir": str(scratch),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_steps": 1,
        "per_device_train_batch_size": GROUPS * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": LONGEST,
        "temperature": config.temperature,
        "beta": config.beta,
        "epsilon": config.epsilon,
        "epsilon_high": config.epsilon_high,
        "mask_truncated_completions": config.mask_truncated_completions,
        "num_iterations": config.num_iterations,
    }
    if config.algo == "rloo":
        return trl.RLOOConfig(**keys, normalize_advantages=config.scale_rewards == "batch")
    correction = config.importance_sampling_correction
    return trl.GRPOConfig(
        **keys,
        loss_type="cispo" if config.algo == "cispo" else LOSS_TYPES[config.averaging],
        scale_rewards=config.scale_rewards,
        importance_sampling_level=config.importance_sampling_level,
        entropy_coef=config.entropy_coef,
        use_bias_correction_kl=False,  # its default multiplies the KL by the ratio, which we do not
        vllm_importance_sampling_mode="token_truncate" if correction == "none" else correction,
        vllm_importance_sampling_clip_max=config.importance_sampling_cap,
    )


def _rollout(samples: list[Sample], said: list[list[float]]) -> dict[str, Any]:
    """Return what TRL wants of a rollout; the sampler's log-probs are read by the correction alone."""
    return {
        "prompt_ids": [sample.prompt for sample in samples],
        "completion_ids": [sample.completion for sample in samples],
        "logprobs": said,
        "env_mask": [sample.mask for sample in samples],
    }


@torch.no_grad()
def _sampler_logprobs(model: Any, samples: list[Sample], temperature: float) -> list[list[float]]:
    """Return for each id of a completion the old policy's log-prob less the noise; 0 where a tool said it."""
    found = []
    for sample in samples:
        ids = torch.tensor([sample.prompt + sample.completion])
        logprobs = (model(ids).logits[0] / temperature).log_softmax(-1)
        noise, start = iter(sample.noise), len(sample.prompt)
        found.append(
            [
                float(logprobs[start + t - 1, token]) - next(noise) if mask else 0.0
                for t, (token, mask) in enumerate(zip(sample.completion, sample.mask, strict=True))
            ]
        )
    return found


# --- together -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compare(ours: Side, theirs: Side, tiny_model: Path) -> Callable[..., tuple[list[Sample], Outcome, Outcome]]:
    """Return the samples and what both sides make of them, ours first.

    `changes`: to the preset of `algo`. `drift`: how far the policy moves after its old log-probs were taken, see
    `weights`; 0 is on policy. `rewards`: a key of `REWARDS`. `tools`: see `make_samples`.
    """
    decoder = load_model(tiny_model).config

    def both(
        algo: str, changes: Mapping[str, Any], *, drift: float, rewards: str, tools: bool
    ) -> tuple[list[Sample], Outcome, Outcome]:
        where = {"model": "unused", "output_dir": "unused", "env": "gymtune/Arithmetic-v0"}
        sizes = {"prompts_per_step": GROUPS, "num_generations": GROUP_SIZE, "max_completion_length": LONGEST}
        passes = 2 if drift else 1  # at one pass TRL takes the policy for its own old one
        config = TrainConfig(algo=algo, num_iterations=passes, **(where | sizes | dict(changes)))
        eos, vocabulary = decoder.eos_token_ids[0], decoder.vocab_size
        samples = make_samples(REWARDS[rewards], tools=tools, eos=eos, vocabulary=vocabulary)
        mine = ours(config, samples, drift)
        with warnings.catch_warnings(action="ignore"):  # TRL calls what transformers will drop
            return samples, mine, theirs(config, samples, drift)

    return both
