"""A GRPO step against TRL's: sample 2 prompts x 8 x 64 tokens, score, update. Prompts of 45 and of 680 tokens.

TRL lives in an environment of its own (`pip install 'gymtune[peers]'` there, or `trl==1.16.*`) and works in a process
of its own, which waits while we work and works while we wait. What a step is on both sides: sampling at temperature 1,
a reward by the text, advantages, one forward and backward over the 16 samples, clipping, AdamW. No KL term; with one
update a batch, TRL takes the current log-probs for the old ones and computes none, and ours come with the samples.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from gymtune.agents import ModelAgent, Renderer, Sampling
from gymtune.agents.rollout import env_factory
from gymtune.agents.torch_engine import TorchEngine
from gymtune.envs.chat_env import ChatEnv
from gymtune.envs.tasks import Task
from gymtune.rewards.components import Component
from gymtune.tools.messages import user
from gymtune.trainers import TrainConfig
from gymtune.trainers.loop import Trainer
from gymtune.trainers.run_folder import RunFolder
from gymtune.trainers.update_stats import UpdateStats

from .groups import GROUPS, NEW_TOKENS, PROMPTS, SAMPLES
from .harness import Result, Settings, compete, results
from .shapes import SMOLLM2, folder_of, open_ours, question

PEER = "TRL GRPOTrainer"
WANTED = {PROMPTS[0]: 1.8, PROMPTS[1]: 5.0}
_QUESTIONS = 64  # of equal length; each step draws two
_ROUNDS = 3  # at most: a step of the peer takes minutes
_LEARNING_RATE = 1e-6
_MICRO_BATCH = {PROMPTS[0]: 8, PROMPTS[1]: 2}  # of the peer: 8 is its default, and 20 GB with long prompts
_CHECKPOINTING = False  # TRL's default is True, and a third more forward work

Step = dict[str, Any]
"""`seconds` of a step, of them `rollout`, and `tokens`: of the prompts, and sampled."""


class Answer(ChatEnv):
    """One turn, paid by the letters of its text: as the peer's reward."""

    def __init__(self, questions: Sequence[str], **options: Any) -> None:
        tasks = [Task(str(i), (user(text),), None) for i, text in enumerate(questions)]
        letters = Component("letters", "end", lambda episode: float(sum(map(ord, episode.answer)) % 97))
        super().__init__(tasks, [letters], max_turns=1, **options)


class Ours:
    """A trainer whose steps are taken one by one, with the seconds of their parts."""

    def __init__(self, folder: Path, questions: Sequence[str], samples: int, new_tokens: int) -> None:
        model, renderer = open_ours(folder)
        renderer.stop_ids = ()  # every completion has its full length, on both sides
        engine = TorchEngine(model, max_sequences=GROUPS * samples)
        agent = ModelAgent(engine, renderer, Sampling(max_new_tokens=new_tokens))
        config = TrainConfig(
            algo="grpo", model=str(folder), output_dir=str(folder.with_name("run")), env="-", max_steps=10_000,
            prompts_per_step=GROUPS, num_generations=samples, max_completion_length=new_tokens,
            learning_rate=_LEARNING_RATE, lr_scheduler_type="constant", save_trajectories=False,
        )  # fmt: skip
        env = env_factory(lambda: Answer(questions), agent)
        self.trainer = Trainer(config, model, agent, RunFolder(Path(config.output_dir)), env=env)

    def step(self) -> Step:
        """Take a step, as `Trainer.train` does, without its report."""
        trainer = self.trainer
        began = perf_counter()
        trajectories, _ = trainer.collect()
        sampled = perf_counter()
        for mini_batches in trainer.batches(trainer.credit(trajectories)):
            trainer.updater.update(mini_batches, trainer.step, UpdateStats())
        trainer.step += 1
        trainer.agent.backend.load_weights(trainer.step, dict(trainer.model.named_parameters()))
        prompts = sum(len(t.tokens) - t.sampled_tokens for t in trajectories)
        tokens = [prompts, sum(t.sampled_tokens for t in trajectories)]
        return {"seconds": perf_counter() - began, "rollout": sampled - began, "tokens": tokens}


class Theirs:
    """TRL in its own process; a context manager that ends it."""

    def __init__(self, python: str, job: dict[str, Any]) -> None:
        worker = Path(__file__).with_name("trl_worker.py")
        self.process = subprocess.Popen(
            [python, "-P", str(worker), json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._hear()

    def step(self) -> Step:
        """Ask for a step and wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said:
            raise RuntimeError(f"the peer's process ended with {self.process.wait()}; its stderr says why")
        found: dict[str, Any] = json.loads(said)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate()


def find_peer(asked: str | None) -> str | None:
    """Return the interpreter that was asked for, or our own where it has TRL."""
    if asked is not None:
        return asked
    return sys.executable if importlib.util.find_spec("trl") is not None else None


def run(settings: Settings) -> list[Result]:
    """Measure both prompts; without a peer, our own figures alone."""
    settings = replace(settings, rounds=min(settings.rounds, _ROUNDS))
    folder = folder_of(SMOLLM2, settings)
    renderer = Renderer.from_folder(folder)
    python = find_peer(settings.peer_python)
    return [result for tokens in PROMPTS for result in _contest(settings, folder, renderer, tokens, python)]


def _contest(settings: Settings, folder: Path, renderer: Renderer, tokens: int, python: str | None) -> list[Result]:
    questions = [question(renderer, tokens, seed) for seed in range(_QUESTIONS)]
    samples, new_tokens = settings.pick(SAMPLES, 2), settings.pick(NEW_TOKENS, 4)
    name = f"GRPO step, {GROUPS} prompts of {tokens} x {samples}"
    ours = Ours(folder, questions, samples, new_tokens)
    steps: dict[str, list[Step]] = {"gymtune": [], PEER: []}

    def taken(who: str, step: Step) -> float:
        steps[who].append(step)
        return 1 / float(step["seconds"])

    contenders = {"gymtune": lambda: taken("gymtune", ours.step())}
    if python is None:
        found = compete(name, "steps/s", contenders, settings)
        note = "no TRL: give --peer-python"
        return [*found, Result(name, PEER, "steps/s", wanted=WANTED[tokens], note=note)]
    job = {
        "model": str(folder), "scratch": str(settings.scratch / "trl"), "threads": settings.threads,
        "steps": settings.rounds + 1, "questions": [[user(text)] for text in questions], "prompts": GROUPS,
        "generations": samples, "new_tokens": new_tokens, "learning_rate": _LEARNING_RATE,
        "micro_batch": min(_MICRO_BATCH[tokens], GROUPS * samples), "checkpointing": _CHECKPOINTING,
    }  # fmt: skip
    with Theirs(python, job) as theirs:
        contenders[PEER] = lambda: taken(PEER, theirs.step())
        about = {**theirs.about, "checkpointing": _CHECKPOINTING, "micro_batch": job["micro_batch"]}
        found = compete(
            name, "steps/s", contenders, settings, wanted={PEER: WANTED[tokens]}, detail={"peer": about, "steps": steps}
        )
    prompts = {who: taken[0]["tokens"][0] for who, taken in steps.items()}
    if len(set(prompts.values())) > 1:
        raise RuntimeError(f"the prompts of a step must have equally many tokens on both sides, they have {prompts}")
    return found + _parts(steps)


def _parts(steps: dict[str, list[Step]]) -> list[Result]:
    """Return lines for the parts of the step, the warm-up left out."""
    sampling = {who: [1 / step["rollout"] for step in taken[1:]] for who, taken in steps.items()}
    update = {who: [1 / (step["seconds"] - step["rollout"]) for step in taken[1:]] for who, taken in steps.items()}
    found = results("  of it sampling and scoring", "steps/s", sampling)
    return found + results("  of it the update", "steps/s", update)
