"""The plan of stages: what is there, which routes are open, which command comes next. It looks; it runs nothing.

`make_plan` looks at a folder, a model, data files and an environment; `Plan` says it as tables, JSON, or a script.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from ..envs.files import KINDS
from ..tools.errors import DataError, GymtuneError
from .plan_files import EnvFacts, FileFacts, look_at_env, look_at_file
from .plan_models import FoundModel, descended, find_models, find_unfinished, look_at_model
from .plan_routes import Route, by_reason, routes
from .plan_stages import Seen, Stage, stages

_EXAMPLE = "gymtune/Calculator-v0"
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet")  # of data files in a folder
_WIDE = 100  # columns of a command, after which it goes on in the next line


class Table(NamedTuple):
    """A table to be printed."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What was seen, the routes of each file, the stages in order. Made by `make_plan`."""

    seen: Seen
    routes: dict[str, list[Route]]
    stages: list[Stage]

    @property
    def ok(self) -> bool:
        """Whether nothing is malformed or missing of what was given."""
        return not self.seen.faults

    @property
    def next(self) -> Stage | None:
        """The first stage that can be run now."""
        return next((stage for stage in self.stages if stage.state == "open"), None)

    @property
    def commands(self) -> list[tuple[str, ...]]:
        """The commands of all stages that are not done, in order."""
        return [stage.command for stage in self.stages if stage.command]

    def to_json(self) -> str:
        """Return all of it as JSON text."""
        told = asdict(self) | {"ok": self.ok, "next": self.next.name if self.next is not None else None}
        for stage, made in zip(told["stages"], self.stages, strict=True):
            stage["shell"] = shlex.join(made.command)
        return json.dumps(told, ensure_ascii=False, indent=2)

    def tables(self) -> list[Table]:
        """Return what there is to print; a table without rows is left out."""
        seen = self.seen
        there: list[tuple[str, ...]] = [(model.path, model.role, model.told) for model in seen.models]
        there += [(file.path, file.kind or "?", _told(file)) for file in seen.files]
        there += [
            (
                run.path,
                "run",
                f"{run.algo}, stopped or running at step {run.steps} of {run.max_steps}: --resume goes on",
            )
            for run in seen.unfinished
        ]
        if seen.env is not None:
            there.append((seen.env.env_id, "example" if seen.example else "environment", _told_env(seen.env)))
        found = [
            Table("wrong", ("what", "came", "mend"), [*seen.faults]),
            Table("there", ("what", "is", "told"), there),
            Table(
                "routes",
                ("file", "how", "algorithms", "because"),
                [
                    (path, how, ", ".join(algos), why)
                    for path, each in self.routes.items()
                    for how, algos, why in by_reason(each)
                ],
            ),
            Table(
                "stages",
                ("stage", "", "what it does", "needs", "writes"),
                [
                    (stage.name, stage.state, stage.why or stage.does, _needs(stage), stage.writes)
                    for stage in self.stages
                ],
            ),
        ]
        return [table for table in found if table.rows]

    def lines(self) -> Iterator[str]:
        """Yield the commands of the stages with a word on each, and what comes next."""
        if self.seen.example:
            yield f"Nothing is here yet. For example, with {_EXAMPLE}:\n"
        for stage in self.stages:
            if stage.command:
                yield f"# {stage.name}: {stage.does}"
                yield f"{shell(stage.command)}\n"
        if self.seen.example:
            yield "A model of yours: gymtune plan --model DIR; `gymtune models import` takes GGUF and MiniMind's .pth."
            yield f"Data of yours: gymtune plan --data FILE, of one of the kinds {', '.join(KINDS)}."
            yield "Another task: gymtune plan --env ID; `gymtune envs list` names them."
        if self.next is not None:
            yield f"next: {self.next.name}, which writes {self.next.writes}"
        else:
            yield "next: nothing that can be run is left; stages that are closed say what they need"

    def script(self) -> str:
        """Return the chain as a bash script: what is finished is not run again, what was stopped says how to go on."""
        told = [
            "#!/usr/bin/env bash",
            "# base -> sft -> reward / dpo / ppo / grpo / agent, by `gymtune plan --pipeline`",
        ]
        told += ["set -euo pipefail", ""]
        for number, stage in enumerate(self.stages, 1):
            told.append(f"# {number}. {stage.name}: {stage.does}")
            if stage.state == "done":
                told.append(f"#    done: {stage.writes}")
            elif stage.state == "closed":
                told.append(f"#    left out: {stage.why}")
            else:
                guard = f"[ -e {shlex.quote(stage.mark)} ] || " if stage.mark else ""
                told += [f"#    writes {stage.writes}", guard + shell(stage.command)]
            told.append("")
        return "\n".join(told)


def make_plan(
    folder: str | Path = ".", *, model: str | None = None, data: Sequence[str] = (), env: str | None = None
) -> Plan:
    """Look at all of it and return the plan. Nothing is run and nothing is written.

    What is given and malformed or missing is in `seen.faults`, with the mend. Without `data` the data files of the
    folder itself are looked at, without `env` that of the first file that has one; where nothing at all is there, an
    example stands in.
    """
    place, faults = Path(folder), list[tuple[str, str, str]]()
    if not place.is_dir():
        faults.append((str(folder), "there is no such folder", "make it, or name the one that your runs are in"))
    models = _models(place, model, faults)
    files = [look_at_file(path) for path in data or _find_data(place)]
    if not data:
        files = [file for file in files if file.kind is not None]  # what else lies there is nobody's data
    for file in files:
        mend = f"`gymtune validate {file.path}` tells all of it" if file.kind else "name a file of one of the kinds"
        faults += [(file.path, fault, mend) for fault in file.faults]
    acting = _env(env, files, faults)
    nothing = not (models or files or env or model or data)
    if nothing:
        acting = look_at_env(_EXAMPLE)
    unfinished = tuple(find_unfinished(place))
    seen = Seen(str(folder), tuple(models), unfinished, tuple(files), acting, nothing, tuple(faults))
    return Plan(seen, {file.path: routes(file) for file in files}, stages(seen))


def _models(folder: Path, given: str | None, faults: list[tuple[str, str, str]]) -> list[FoundModel]:
    """Return the models of a folder; where one is given, that one and what runs have made of it."""
    found = find_models(folder)
    if given is not None:
        first = look_at_model(Path(given))
        if first.role == "reward":
            mend = "give the model that is to learn; this one serves by --reward-model"
            faults.append((given, "a reward model, which says nothing by itself", mend))
        found = descended(found, first)
    mend = "`gymtune models init` makes a model, `gymtune models import` takes other forms"
    faults += [(model.path, model.told, mend) for model in found if model.fault]
    return found


def _find_data(folder: Path) -> list[str]:
    """Return the data files that lie in a folder itself, by name."""
    return sorted(str(path) for path in folder.glob("*") if path.name.endswith(_SUFFIXES) and path.is_file())


def _env(given: str | None, files: Sequence[FileFacts], faults: list[tuple[str, str, str]]) -> EnvFacts | None:
    """Return the env to act in: the given one, on the first file that it takes; else the home of the first file."""
    if given is None:
        return next((file.home for file in files if file.home is not None), None)
    for path in [file.path for file in files if not file.faults and file.kind != "trajectories"]:
        try:
            return look_at_env(given, path)
        except GymtuneError:
            continue
    try:
        return look_at_env(given)
    except GymtuneError as error:
        mend = f"`gymtune envs {'show ' + given if isinstance(error, DataError) else 'list'}`"
        faults.append((given, str(error), mend))
        return None


def shell(words: Sequence[str]) -> str:
    """Return a command as it is typed; a long one goes on in indented lines, an option never apart from its value."""
    lines, line = [], ""
    parts: list[str] = []
    for word in words:
        if parts and not word.startswith("-") and parts[-1].startswith("-"):
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    for part in parts:
        if line and len(line) + len(part) + 3 > _WIDE:
            lines.append(f"{line} \\")
            line = f"    {part}"
        else:
            line = f"{line} {part}" if line else part
    return "\n".join([*lines, line])


def _needs(stage: Stage) -> str:
    return ", ".join(path if there else f"{path} (not yet)" for path, there in stage.needs)


def _told(file: FileFacts) -> str:
    """Say how much of what a file has."""
    if file.faults:
        return f"{len(file.faults)} errors"
    counts = {
        "records": file.records, "replies to imitate": file.replies, "pairs": file.pairs, "good": file.good,
        "bad": file.bad, "sampled with log-probs": file.sampled, "groups": file.groups,
    }  # fmt: skip
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _told_env(env: EnvFacts) -> str:
    paid = ", ".join(env.pays) or "nothing by itself: it needs a reward model"
    tools = "with tools" if env.tools else "without tools"
    return f"{env.tasks:,} tasks, {tools}, pays {paid}" + (f", reads {env.data}" if env.data else "")
