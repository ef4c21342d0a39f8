"""`train(config)`: build everything a config names, run the loop, leave the finished model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..agents.agent import ModelAgent
from ..agents.loading import place_model
from ..agents.models import LanguageModel, apply_lora, check_vocabulary, load_adapter
from ..agents.renderer import Renderer
from ..agents.rollout import env_factory
from ..agents.scorer import split_rewards
from ..agents.threads import use_threads
from ..agents.torch_engine import TorchEngine
from ..agents.trajectory import Sampling
from ..tools.errors import ConfigError
from .checkpoint import ADAPTER, load_state
from .config import Resolved, TrainConfig
from .dataset import TrajectoryDataset
from .loop import OnEpisode, OnStall, OnStep, Trainer
from .run_folder import RunFolder

_MOST_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who wants to hear of progress: each line of metrics, each finished episode, and what is pending too long."""

    on_step: OnStep = lambda _: None
    on_episode: OnEpisode = lambda _: None
    on_stall: OnStall = lambda _: None


def train(config: TrainConfig | Resolved, *, resume: bool = False, listeners: Listeners = Listeners()) -> Path:
    """Run `config` and return the folder of the finished model.

    With `resume`, go on from the latest checkpoint of `config.output_dir`. Raises GymtuneError for everything a user
    can mend; what was finished before stays in the run folder.
    """
    resolved = config if isinstance(config, Resolved) else Resolved(config, {})
    config = resolved.config
    use_threads(config.torch_threads)
    run = RunFolder.resume(resolved) if resume else RunFolder(Path(config.output_dir))
    steps = run.checkpoint_steps() if resume else []
    start = run.checkpoint_path(steps[-1]) if steps else None
    trainer = _build(config, _policy(config, start), Renderer.from_folder(config.model), run)
    if not resume:  # only now: a config that cannot be built leaves no folder behind
        RunFolder.create(resolved)
    if start is not None:
        trainer.restore(start, load_state(start))
    elif resume:
        run.rewind(0)
    trainer.on_step, trainer.on_episode = listeners.on_step, listeners.on_episode
    trainer.on_stall = listeners.on_stall
    return trainer.train(Path(config.model))


def _load(folder: Path, config: TrainConfig) -> LanguageModel:
    return place_model(folder, device=config.device, dtype=config.dtype)


def _policy(config: TrainConfig, start: Path | None) -> LanguageModel:
    """Return the model to train, as it was in the checkpoint `start`; with LoRA it is the base with its adapter."""
    base = Path(config.model)
    if config.lora_r is None:
        return _load(start or base, config)
    model = _load(base, config)
    if start is not None:
        load_adapter(model, start / ADAPTER)
        return model
    apply_lora(
        model,
        r=config.lora_r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=config.lora_target_modules,
        seed=config.seed,
    )
    return model


def _build(config: TrainConfig, model: LanguageModel, renderer: Renderer, run: RunFolder) -> Trainer:
    """Return the trainer of a config: its agent, and its env or its data."""
    check_vocabulary(len(renderer.tokenizer), model.config, config.model)
    if config.gradient_checkpointing:
        model.checkpoint_layers()
    longest = model.config.max_position_embeddings
    if config.max_model_length is not None and config.max_model_length > longest:
        raise ConfigError(
            f"max_model_length {config.max_model_length} is more than the {longest} the model was made for"
        )
    sequences = min(config.prompts_per_step * config.num_generations, _MOST_SEQUENCES)
    engine = TorchEngine(
        model,
        max_model_length=config.max_model_length,
        max_sequences=sequences,
        max_cache_tokens=config.max_cache_tokens,
        layers=config.layers,
    )
    sampling = Sampling(temperature=config.temperature, max_new_tokens=config.max_completion_length)
    agent = ModelAgent(engine, renderer, sampling)
    if config.env is None:
        assert config.data is not None
        dataset = TrajectoryDataset(
            config.data, renderer, min_reward=config.min_reward, max_length=longest, seed=config.seed
        )
        return Trainer(config, model, agent, run, dataset=dataset)
    weights, scorer = split_rewards(config.reward_weights, config.reward_model)
    env = env_factory(config.env, agent, config.env_args, weights)
    reference = None
    if config.beta > 0 and config.lora_r is None:  # an adapter switched off is the starting model
        reference = _load(Path(config.model), config).requires_grad_(False)
    trainer = Trainer(config, model, agent, run, env=env, reference=reference)
    trainer.scorer = scorer
    if not scorer and trainer.probe_env is not None and not any(trainer.probe_env.weights.values()):
        raise ConfigError(
            f"env {config.env!r} pays for nothing, so nothing can be learnt: give --reward-model FOLDER, --reward "
            "module:function, or --reward NAME=WEIGHT for one of its components"
        )
    return trainer
