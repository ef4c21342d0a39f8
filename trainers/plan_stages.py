"""The stages of the chain base -> sft -> reward / dpo / ppo / grpo / agent: what each needs, its command, what is left.

A stage starts from what is there, or from what an earlier stage will write; so all commands, in order, are a script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from .plan_files import EnvFacts, FileFacts
from .plan_models import FoundModel, Unfinished
from .plan_routes import lacks, unpaid
from .presets import PRESETS, Want
from .run_folder import HANDOFF, PREFIXES

State = Literal["done", "open", "later", "closed"]
_DEMONSTRATIONS, _TASKS, _SAMPLES, _EVALUATED = 2000, 200, 8, 200
_LARGE = 20_000_000  # parameters; more are a pretrained model, which the rates of the presets are too high for
_RATES = {"file": "1e-5", "env": "1e-6"}
_KIN = tuple(algo for algo, preset in PRESETS.items() if {"scale_rewards", "trajectories"} <= preset.reads)
"""GRPO and its kin: what compares groups, and has no teacher."""
_IMITATED = ("sft", "trajectories", "agentic", "verifiable", "preference", "unpaired")  # the best to imitate first


@dataclass(frozen=True, slots=True)
class Seen:
    """All that was looked at. What cannot be used is in none of these but `faults`: what, what is wrong, the mend."""

    folder: str
    models: tuple[FoundModel, ...]
    unfinished: tuple[Unfinished, ...]
    files: tuple[FileFacts, ...]
    env: EnvFacts | None
    example: bool
    faults: tuple[tuple[str, str, str], ...]

    def model(self, *roles: str) -> FoundModel | None:
        """Return the last usable model of the first role that has one; those of runs come in the order they ended."""
        for role in roles:
            found = [model for model in self.models if model.role == role and not model.fault]
            if found:
                return found[-1]
        return None

    def file(self, want: Want) -> FileFacts | None:
        """Return the best file that has what is wanted, or None."""
        fit = [file for file in self.files if not file.faults and not lacks(want, file)]
        return min(fit, key=_by_worth if want == "replies" else _is_stored, default=None)


def _by_worth(file: FileFacts) -> tuple[bool, int]:
    """Order files to imitate: what holds bad episodes beside good ones comes last."""
    rank = _IMITATED.index(file.kind) if file.kind in _IMITATED else len(_IMITATED)
    return _is_stored(file) and file.bad > 0, rank


def _is_stored(file: FileFacts) -> bool:
    return file.kind == "trajectories"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Args:
        name: What it is called: `base`, `demonstrations`, `sft`, `groups`, `reward`, `dpo`, ...
        does: What happens in it.
        state: `done` (its result is there), `open` (can be run now), `later` (after earlier stages), `closed`.
        needs: What it starts from: each with whether it is there.
        command: The words of its command; none where it is done or closed.
        writes: What it leaves, or what it left.
        mark: The file that tells that it was finished.
        why: Why it is closed.
    """

    name: str
    does: str
    state: State
    needs: tuple[tuple[str, bool], ...] = ()
    command: tuple[str, ...] = ()
    writes: str = ""
    mark: str = ""
    why: str = ""


def stages(seen: Seen) -> list[Stage]:
    """Return the chain, in the order of running."""
    chain = _Chain(seen)
    steps = (chain.base, chain.demonstrations, chain.sft, chain.groups, chain.reward, chain.preference, chain.ppo)
    for step in (*steps, chain.grpo, chain.evaluation):
        step()
    return chain.stages


class _Chain:
    """Builds the stages one after another; `at` is where the result of a stage is, or will be."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.env = seen, seen.env
        self.stages: list[Stage] = []
        self.at: dict[str, str] = {}
        self.results: list[str] = []
        start = seen.model("full_sft", "full_dist", "base")
        self.parameters = start.parameters if start is not None else 0

    # -- the stages ----------------------------------------------------------------------------------------------

    def base(self) -> None:
        """A model to start from: one that is there, else a tiny one from scratch."""
        found = self.seen.model("base", "full_sft", "full_dist")
        does = "a model to start from"
        if found is not None:
            self._done("base", does, found.path)
            return
        home = self.env.env_id if self.env is not None else "gymtune/Calculator-v0"
        data = self.env.data if self.env is not None else None
        words = ("--env-arg", f"data={data}") if data is not None else ()
        out = self._free("base")
        command = ("gymtune", "models", "init", "--out", out, "--env", home, *words)
        self._add(Stage("base", f"{does}: tiny, from scratch", "open", (), command, out, f"{out}/config.json"))

    def demonstrations(self) -> None:
        """Episodes of the script that knows the gold, where no file has anything to imitate."""
        if self.seen.file("replies") is not None or self.env is None or not self.env.gold:
            return
        out = self._free("expert.jsonl")
        few = min(_DEMONSTRATIONS, self.env.tasks)
        command = ("gymtune", "rollout", *self._env(), "--agent", "scripted", "-n", str(few), "--out", out, "--resume")
        self._add(Stage("demonstrations", "episodes of an expert to imitate", "open", (), command, out))

    def sft(self) -> None:
        """Imitation; its model is what the later stages start from."""
        does = "imitate what is on file"
        found = self.seen.model("full_sft", "full_dist")
        if found is not None:
            self._done("sft", does, found.path)
            return
        file = self.seen.file("replies")
        data = file.path if file is not None else self.at.get("demonstrations")
        if data is None:
            self._closed(
                "sft", does, "nothing to imitate: give --data FILE with answers, or --env ID that has a script"
            )
            self.at["sft"] = self.at["base"]
            return
        best = ("--best", "1") if file is not None and file.kind == "trajectories" and file.pairs else ()
        self._train("sft", does, self.at["base"], ("--data", data, *best))

    def groups(self) -> None:
        """Several episodes of each task, where no file has pairs: the better and the worse of a group are one."""
        if self.seen.file("pairs") is not None or self.env is None or not self.env.pays:
            return
        out = self._free("groups.jsonl")
        few = str(min(_TASKS, self.env.tasks))
        command = ("gymtune", "rollout", *self._env(), "--model", self.at["sft"], "-n", few, "--num-generations")
        command = (*command, str(_SAMPLES), "--out", out, "--resume")
        does = "several tries at each task: better and worse ones make pairs"
        self._add(self._planned(Stage("groups", does, "open", (), command, out), [self.at["sft"]]))

    def reward(self) -> None:
        """A reward model, from pairs."""
        does = "a model that scores replies, from pairs"
        found = self.seen.model("reward")
        if found is not None:
            self._done("reward", does, found.path)
        elif (data := self._pairs()) is None:
            self._closed(
                "reward", does, "no pairs: give --data FILE of them, or --env ID that pays, to sample groups in"
            )
        else:
            self._train("reward", does, self.at["sft"], ("--data", data))

    def preference(self) -> None:
        """DPO from pairs, or KTO where there are labels alone."""
        found = self.seen.model("dpo", "ipo", "orpo", "simpo", "kto")
        labelled = self.seen.file("labels")
        only_labels = self.seen.file("pairs") is None and labelled is not None and labelled.kind == "unpaired"
        algo = (found.role if found is not None else None) or ("kto" if only_labels else "dpo")
        does = "prefer good replies to bad ones" if algo == "kto" else "prefer the better reply of a pair"
        data = labelled.path if only_labels and labelled is not None else self._pairs()
        if found is not None:
            self._done(algo, does, found.path)
            self.results.append(found.path)
        elif data is None:
            self._closed(algo, does, "no pairs and no labels: give --data FILE of them")
        else:
            self._train(algo, does, self.at["sft"], ("--data", data))

    def ppo(self) -> None:
        """PPO, paid by the reward model where there is or will be one, else by the env."""
        scorer = self.at.get("reward")
        does = "act in the environment, paid by the reward model" if scorer else "act in the environment"
        paid: tuple[str, ...] = ()
        if scorer is not None and self.env is not None:
            off = (word for name in self.env.pays for word in ("--reward", f"{name}=0"))
            paid = ("--reward-model", scorer, *off)
        self._act("ppo", "ppo", does, paid)

    def grpo(self) -> None:
        """GRPO, paid by the env's own checker; it leaves an `agent` where the env has tools."""
        tools = self.env is not None and self.env.tools
        paid: tuple[str, ...] = ()
        if self.env is not None and not self.env.pays and "reward" in self.at:
            paid = ("--reward-model", self.at["reward"])
        does = "act with tools, paid by the checker" if tools else "answer, paid by the checker"
        self._act("agent" if tools else "grpo", "grpo", does.replace("checker", "reward model") if paid else does, paid)

    def evaluation(self) -> None:
        """All that there is and will be, on the same tasks."""
        if self.env is None or not self.env.pays:
            return
        models = list(dict.fromkeys(self.results))
        few = str(min(_EVALUATED, self.env.tasks))
        words = [word for model in models for word in ("--model", model)]
        command = ("gymtune", "eval", *self._env(), "-n", few, "--greedy", *words)
        does = "success of all models on the same tasks"
        self._add(self._planned(Stage("eval", does, "open", (), command, "a table"), models))

    # -- how they are made ---------------------------------------------------------------------------------------

    def _act(self, name: str, algo: str, does: str, paid: Sequence[str]) -> None:
        """Add a stage that samples in the env."""
        roles = (PREFIXES[algo],) if algo in PREFIXES else ("agent",) if name == "agent" else _KIN
        found = self.seen.model(*roles)
        if found is not None:
            self._done(name, does, found.path)
            self.results.append(found.path)
        elif self.env is None:
            self._closed(name, does, "no tasks to act in: give --env ID, or --data FILE of questions, tasks or prompts")
        elif unpaid(self.env) and not paid:
            self._closed(name, does, f"{self.env.env_id} pays for nothing on this file: it needs a reward model")
        else:
            self._train(algo, does, self.at["sft"], (*self._env(), *paid), name=name)

    def _train(self, algo: str, does: str, model: str, rest: tuple[str, ...], name: str | None = None) -> None:
        name = name or algo
        out = self._free(name)
        rate: tuple[str, ...] = ()
        if self.parameters > _LARGE:
            rate = ("--learning-rate", _RATES["env" if "--env" in rest else "file"])
        command = ("gymtune", "train", "--algo", algo, "--model", model, *rest, "--output", out, *rate)
        left = f"{out}/{PREFIXES.get(algo, name)}"
        needed = [model, *(after for word, after in pairwise(rest) if word in ("--data", "--reward-model"))]
        self._add(self._planned(Stage(name, does, "open", (), command, left, f"{out}/{HANDOFF}"), needed))
        if algo != "reward":
            self.results.append(left)

    def _planned(self, stage: Stage, needed: Sequence[str]) -> Stage:
        """Return the stage with its needs: open where all of them are there, later where a stage makes one first."""
        made = {earlier.writes for earlier in self.stages if earlier.state in ("open", "later")}
        needs = tuple((path, path not in made) for path in dict.fromkeys(needed))
        return replace(stage, needs=needs, state="open" if all(there for _, there in needs) else "later")

    def _done(self, name: str, does: str, path: str) -> None:
        self._add(Stage(name, does, "done", writes=path))
        if name in ("base", "sft"):
            self.results.append(path)

    def _closed(self, name: str, does: str, why: str) -> None:
        self.stages.append(Stage(name, does, "closed", why=why))

    def _add(self, stage: Stage) -> None:
        self.stages.append(stage)
        self.at[stage.name] = stage.writes

    def _pairs(self) -> str | None:
        file = self.seen.file("pairs")
        return file.path if file is not None else self.at.get("groups")

    def _env(self) -> tuple[str, ...]:
        assert self.env is not None
        return ("--env", self.env.env_id, *(("--data", self.env.data) if self.env.data is not None else ()))

    def _free(self, name: str) -> str:
        """Return a path below the folder that is not there yet: `sft`, else `sft-2`, `sft-3`, ..."""
        stem, dot, ending = name.partition(".")
        path, number = Path(self.seen.folder) / name, 1
        while path.exists():
            number += 1
            path = path.with_name(f"{stem}-{number}{dot}{ending}")
        return str(path)
