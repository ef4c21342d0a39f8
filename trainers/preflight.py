"""Preflight: everything a config names is looked at before a run, and all that is wrong is told at once.

Weights are not read, only the headers of their files. What is read all the same (tokenizer, data, rewards) is kept, so
that the run which follows does not read it again.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx

from ..agents.agent import ScriptedAgent
from ..agents.http_reward import is_url
from ..agents.loading import DTYPES, check_device
from ..agents.models import check_vocabulary
from ..agents.models.inspection import ModelFacts, inspect_model
from ..agents.models.lora import check_targets
from ..agents.renderer import Renderer
from ..agents.rollout import env_factory
from ..agents.scorer import Scorer, split_rewards
from ..envs.chat_env import ChatEnv
from ..envs.contract import check_briefly
from ..envs.files.validate import validate
from ..tools.errors import ConfigError, DataError, EnvError
from .config import TrainConfig
from .critic import check_critic
from .evaluation import HeldOut, held_out_env
from .findings import Finding, Preflight
from .mirrors import Mirrors
from .preflight_data import look_at_data
from .preflight_servers import look_at_servers
from .run_folder import RunFolder
from .teacher import check_teacher, vocabulary_note

_FAULTS = 5  # of a data file, in a finding
_CONNECT_SECONDS = 5.0


def preflight(config: TrainConfig, *, resume: bool = False) -> Preflight:
    """Look at everything that `config` names and return what was found; nothing is written.

    With `resume` the output folder holds a run, which `RunFolder.resume` compares.
    """
    found = Preflight()
    _look_at_model(found, config)
    found.look("device", f"{config.device} with {config.dtype}", "--device cpu", lambda: _device(config))
    look_at_data(found, config)
    if config.env is not None:
        _look_at_env(found, config)
    if config.backend == "sglang":
        look_at_servers(found, config)
    if not resume:
        found.look("output", "an empty folder, or none", "another --output", lambda: _output(config))
    if config.report_to:
        found.look("logs", "an installed package", "--log, or leave it out", lambda: _logs(config))
    _look_at_room(found, config)
    return found


# -- the model and its tokenizer ---------------------------------------------------------------------------------------


def _look_at_model(found: Preflight, config: TrainConfig) -> None:
    """Look at the policy's folder, its tokenizer, and what else has to fit them: LoRA, the critic."""
    folder = Path(config.model)
    mend = "`gymtune models init` makes one, `gymtune models import` takes other forms"
    facts = found.facts = found.look(
        "model", "config and every weight, of a family that runs", mend, lambda: _told(inspect_model(folder))
    )
    if folder.is_dir():
        found.renderer = found.look(
            "tokenizer",
            "a tokenizer with a chat template, no bigger than the embedding",
            "the tokenizer that the model was trained with",
            lambda: _tokenizer(config, facts),
        )
    if config.algo == "ppo" and config.critic_model is not None:
        found.look(
            "critic", "a model with the policy's vocabulary", "--critic-model", lambda: _critic(config, found.renderer)
        )
    if facts is not None and config.algo == "reward":
        found.look("score", "layers of our own decoder", "another --model", lambda: _score(config, facts))
    if config.teacher_model is not None:
        _look_at_teacher(found, Path(config.teacher_model), config)
    if facts is None:
        return
    found.look(
        "context", "max_model_length within the model's", "a smaller max_model_length", lambda: _context(config, facts)
    )
    if config.lora_r is not None:
        found.look("LoRA", "matrices of these names", "--set lora_target_modules", lambda: _adapters(config, facts))
    if config.gradient_checkpointing:
        found.look("gradient_checkpointing", "our own decoder", "leave it out", lambda: _checkpointing(facts))


def _told(facts: ModelFacts) -> tuple[ModelFacts, str]:
    return facts, str(facts)


def _tokenizer(config: TrainConfig, facts: ModelFacts | None) -> tuple[Renderer, str]:
    renderer = Renderer.from_folder(config.model, template_options=config.chat_template_kwargs)
    size = len(renderer.tokenizer)
    if facts is not None:
        check_vocabulary(size, facts, config.model)
    if config.thinking_ratio is not None:
        renderer.thinking(True)
    return renderer, f"{size} tokens, call format {renderer.chat_format.name}"


def _context(config: TrainConfig, facts: ModelFacts) -> tuple[int, str]:
    wanted = config.max_model_length
    if wanted is not None and wanted > facts.context:
        raise ConfigError(f"max_model_length {wanted} is more than the {facts.context} the model was made for")
    return facts.context, f"{wanted or facts.context} tokens"


def _adapters(config: TrainConfig, facts: ModelFacts) -> tuple[int, str]:
    if facts.outline is None:
        raise ConfigError(
            f"LoRA trains models that our own decoder runs, {config.model} is a {facts.family}: train all"
        )
    count = check_targets(facts.outline, config.lora_target_modules)
    return count, f"{count} matrices get an adapter of rank {config.lora_r}"


def _checkpointing(facts: ModelFacts) -> tuple[bool, str]:
    if not facts.native:
        raise ConfigError(f"gradient_checkpointing needs a model of our own decoder, not {facts.family!r}")
    return True, "layers are computed again in the backward pass"


def _critic(config: TrainConfig, renderer: Renderer | None) -> tuple[ModelFacts, str]:
    folder = Path(config.critic_model or config.model)
    facts = inspect_model(folder, classifier=True)
    if renderer is not None:
        check_critic(folder, renderer, config.model)
    return facts, str(facts)


def _score(config: TrainConfig, facts: ModelFacts) -> tuple[str, str]:
    if not facts.native:
        raise ConfigError(
            f"--algo reward saves models that our own decoder runs as sequence classifiers, {config.model} is a "
            f"{facts.family}: take a base of another family"
        )
    return config.model, f"a head of {facts.hidden_size} numbers"


def _look_at_teacher(found: Preflight, folder: Path, config: TrainConfig) -> None:
    wanted, facts, renderer = "a model that knows every token of the policy", found.facts, found.renderer
    if facts is None or renderer is None:
        found.look("teacher", "a model that runs", "--teacher-model", lambda: _told(inspect_model(folder)))
        return
    found.teacher = found.look(
        "teacher", wanted, "--teacher-model", lambda: _told(check_teacher(folder, renderer, facts, config))
    )
    if found.teacher is not None and (note := vocabulary_note(found.teacher, facts)):
        found.note("teacher", wanted, note)


# -- env and rewards ---------------------------------------------------------------------------------------------------


def _look_at_env(found: Preflight, config: TrainConfig) -> None:
    """Look at the rewards, the env's data file, the env itself and its contract, and at the env of evaluations."""
    found.rewards = found.look(
        "rewards",
        "functions and a reward model that can be loaded",
        "--reward, --reward-model",
        lambda: _scorer(config),
    )
    if config.reward_model is not None and is_url(config.reward_model):
        found.look("reward server", "somebody who answers", "start it", lambda: _answers(config.reward_model or ""))
    own, scorer = found.rewards or ({}, Scorer([]))
    for key, args in (("env_args", config.env_args), ("eval_env_args", config.eval_env_args)):
        if isinstance(path := args.get("data"), str):
            found.look(
                f"{key}.data", "records that the validator finds right", f"`gymtune validate {path}`", _valid(path)
            )
    agent = ScriptedAgent(found.renderer)
    assert config.env is not None
    make = env_factory(config.env, agent, config.env_args, own)
    mend = "`gymtune envs show ID` names its arguments and components"
    env = found.look("env", "a registered env that takes these arguments", mend, lambda: _env(make))
    if env is None:
        return
    teacher_alone = config.algo == "opd" and config.reward_coef == 0
    if config.trajectories is None and not teacher_alone:
        found.look("reward", "a component that pays", "--reward, --reward-model", lambda: _pays(config, env, scorer))
    plain = env_factory(config.env, agent, config.env_args)
    found.look("env contract", "what every env promises", "`gymtune envs check ID`", lambda: _contract(config, plain))
    if config.eval_steps > 0:
        found.look("evaluation", "held-out tasks", "eval_env_args, eval_tasks", lambda: _held_out(config, agent, own))


def _scorer(config: TrainConfig) -> tuple[tuple[dict[str, float], Scorer], str]:
    weights, scorer = split_rewards(
        config.reward_weights, config.reward_model, normalize=config.normalize_scores, clip=config.score_clip
    )
    return (weights, scorer), ", ".join([*weights, *(part.name for part in scorer.parts)]) or "those of the env"


def _answers(url: str) -> tuple[str, str]:
    address = httpx.URL(url)
    place = (address.host, address.port or (443 if address.scheme == "https" else 80))
    try:
        socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(f"reward model {address.host}: nobody answers at port {place[1]}: {error}") from error
    return url, f"{place[0]}:{place[1]} answers"


def _valid(path: str) -> Callable[[], tuple[int, str]]:
    def check() -> tuple[int, str]:
        report = validate(path, max_faults=_FAULTS)
        if not report.ok:
            faults = "; ".join(f"line {f.line}: {f.path} wanted {f.wanted}, came {f.came}" for f in report.faults)
            more = f"; and {report.unlisted} more" if report.unlisted else ""
            raise DataError(f"{path}: {faults}{more}")
        return report.rows, f"{report.rows} records, {report.kind}"

    return check


def _env(make: Callable[[], ChatEnv]) -> tuple[ChatEnv, str]:
    with closing(make()) as env:
        tools = ", ".join(env.toolbox.names) or "none"
        return env, f"{len(env.tasks)} tasks, {env.max_turns} turns at most, tools: {tools}"


def _pays(config: TrainConfig, env: ChatEnv, scorer: Scorer) -> tuple[bool, str]:
    if not scorer and not any(env.weights.values()):
        raise ConfigError(
            f"env {config.env!r} pays for nothing, so nothing can be learnt: give --reward-model FOLDER, --reward "
            "module:function, or --reward NAME=WEIGHT for one of its components"
        )
    paid = {name: weight for name, weight in env.weights.items() if weight}
    paid |= {part.name: part.weight for part in scorer.parts}
    return True, ", ".join(f"{name} x {weight:g}" for name, weight in paid.items())


def _contract(config: TrainConfig, make: Callable[[], ChatEnv]) -> tuple[int, str]:
    findings = check_briefly(make)
    broken = [f"{finding.promise}: {finding.detail}" for finding in findings if not finding.holds]
    if broken:
        raise EnvError(f"env {config.env!r} breaks its contract: {'; '.join(broken)}")
    return len(findings), f"{len(findings)} promises hold"


def _held_out(config: TrainConfig, agent: ScriptedAgent, weights: dict[str, float]) -> tuple[HeldOut, str]:
    held = HeldOut(held_out_env(config, agent, weights), agent, config)
    return held, f"{config.eval_tasks} tasks every {config.eval_steps} steps"


# -- where it runs and is written --------------------------------------------------------------------------------------


def _device(config: TrainConfig) -> tuple[str, str]:
    check_device(config.device, config.dtype)
    return config.device, "there"


def _output(config: TrainConfig) -> tuple[Path, str]:
    folder = RunFolder(Path(config.output_dir))
    folder.check_free()
    place = _standing(folder.path)
    if not place.is_dir() or not os.access(place, os.W_OK):
        why = "may not be written to" if place.is_dir() else "is no folder"
        raise ConfigError(f"output folder {folder.path}: cannot write: {place} {why}")
    return folder.path, "free"


def _logs(config: TrainConfig) -> tuple[Mirrors, str]:
    return Mirrors(config.report_to), ", ".join(config.report_to)


def _look_at_room(found: Preflight, config: TrainConfig) -> None:
    """Tell when the disk has less room than the run may fill: models, optimizer states, all kept checkpoints."""
    facts, place = found.facts, _standing(Path(config.output_dir))
    if facts is None or not place.is_dir():
        return
    size = facts.parameters * DTYPES[config.dtype].itemsize
    trained = 3 if config.lora_r is None else 1  # weights and AdamW's two moments; those of an adapter are small
    checkpoint = size * (trained + (3 if config.algo == "ppo" and config.critic_backbone == "separate" else 0))
    made = config.max_steps // config.save_steps + 1 if config.save_steps else 1
    kept = min(made, (config.save_total_limit or made) + 1)  # the next is written before the last is removed
    needed = kept * checkpoint + 2 * size  # the finished model and the best one
    free = shutil.disk_usage(place).free
    if needed > free:
        wanted = f"{needed / 1e9:.1f} GB for {kept} checkpoints and the models"
        found.note("disk", wanted, f"{free / 1e9:.1f} GB are free in {place}, about {wanted} are needed")
    else:
        found.findings.append(Finding("disk", "fits", f"about {needed / 1e9:.2g} GB", f"{free / 1e9:.1f} GB free"))


def _standing(path: Path) -> Path:
    """Return the folder (or file) nearest above `path` that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())
