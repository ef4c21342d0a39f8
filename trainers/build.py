"""`train(config)`: look at everything a config names, build it, run the loop, leave the finished model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..agents.agent import ModelAgent
from ..agents.backend import Backend
from ..agents.loading import place_model
from ..agents.models import LanguageModel, apply_lora, load_adapter
from ..agents.rollout import env_factory
from ..agents.threads import use_threads
from ..agents.trajectory import Sampling
from .backends import make_backend
from .checkpoint import ADAPTER, load_state
from .config import Resolved, TrainConfig
from .dataset import GroupDataset
from .evaluation import HeldOut, held_out_env
from .findings import Preflight
from .held_out_file import HeldOutFile
from .loop import OnEpisode, OnStall, OnStep, Trainer
from .offline import check_stored
from .preflight import preflight
from .registry import ALGORITHMS
from .run_folder import RunFolder

#: Called with each thing that is worth knowing and stops nobody.
OnNote = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who wants to hear of progress: each line of metrics, each finished episode, what is pending too long, notes."""

    on_step: OnStep = lambda _: None
    on_episode: OnEpisode = lambda _: None
    on_stall: OnStall = lambda _: None
    on_note: OnNote = lambda _: None


def train(config: TrainConfig | Resolved, *, resume: bool = False, listeners: Listeners = Listeners()) -> Path:
    """Run `config` and return the folder of the finished model.

    With `resume`, go on from the latest checkpoint of `config.output_dir`. Raises GymtuneError for everything a user
    can mend, all that `preflight` finds in one; what was finished before stays in the run folder.
    """
    resolved = config if isinstance(config, Resolved) else Resolved(config, {})
    config = resolved.config
    use_threads(config.torch_threads)
    run = RunFolder.resume(resolved) if resume else RunFolder(Path(config.output_dir))
    steps = run.checkpoint_steps() if resume else []
    start = run.checkpoint_path(steps[-1]) if steps else None
    with ExitStack() as stack:
        trainer = _prepare(config, run, listeners, stack, resume=resume, start=start)
        if not resume:  # only now: a config that cannot be built leaves no folder behind
            RunFolder.create(resolved)
        if start is not None:
            trainer.restore(start, load_state(start))
        elif resume:
            run.rewind(0)
        return trainer.train(Path(config.model))


def dry_run(config: TrainConfig, *, listeners: Listeners = Listeners()) -> dict[str, Any]:
    """Return the metrics of the first batch, sampled or read, as `metrics.jsonl` would have them; change nothing.

    No folder is made, no optimizer step: a model is loaded, its loss and gradient computed, and that is all. Raises
    GymtuneError as `train` does.
    """
    use_threads(config.torch_threads)
    only_one = {"max_staleness": 0, "drop_staleness": None}  # no batch after it
    config = config.model_copy(update={"save_trajectories": False, "teacher_cache": None} | only_one)
    with ExitStack() as stack:
        return _prepare(config, RunFolder(Path(config.output_dir)), listeners, stack).dry_run()


def _prepare(
    config: TrainConfig,
    run: RunFolder,
    listeners: Listeners,
    stack: ExitStack,
    *,
    resume: bool = False,
    start: Path | None = None,
) -> Trainer:
    """Return the trainer of a config, and tell what was noted on the way. Writes nothing but a server's log.

    `stack` ends what the trainer samples with.
    """
    found = preflight(config, resume=resume)
    found.refuse()
    model = _policy(config, start)
    notes = found.notes
    if isinstance(found.dataset, GroupDataset) and start is None:
        notes += check_stored(model, found.dataset, config)
    for note in notes:
        listeners.on_note(note)
    trainer = _build(config, model, found, run, make_backend(config, model, stack))
    stack.callback(trainer.close)
    trainer.on_step, trainer.on_episode = listeners.on_step, listeners.on_episode
    trainer.on_stall = listeners.on_stall
    return trainer


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


def _build(config: TrainConfig, model: LanguageModel, found: Preflight, run: RunFolder, backend: Backend) -> Trainer:
    """Return the trainer of a config: its agent, its env or its data, and the models beside the policy."""
    if config.gradient_checkpointing:
        model.checkpoint_layers()
    assert found.renderer is not None
    sampling = Sampling(temperature=config.temperature, max_new_tokens=config.max_completion_length)
    agent = ModelAgent(backend, found.renderer, sampling, thinking_ratio=config.thinking_ratio)
    own, scorer = found.rewards or ({}, None)
    env = None
    if config.env is not None and config.trajectories is None:
        env = env_factory(config.env, agent, config.env_args, own)
    reference, beside = None, ALGORITHMS[config.algo].reference_model(config)
    if beside is not None and (config.lora_r is None or beside != config.model):  # an adapter off is the start
        reference = _load(Path(beside), config).requires_grad_(False)
    trainer = Trainer(config, model, agent, run, env=env, dataset=found.dataset, reference=reference)
    if scorer is not None:
        trainer.scorer = scorer
    if found.held_out is not None:
        trainer.held_out = HeldOutFile(found.held_out.everything(), trainer.credit, trainer.updater)
    elif config.eval_steps > 0:
        trainer.held_out = HeldOut(held_out_env(config, agent, own), agent, config, scorer)
    return trainer
