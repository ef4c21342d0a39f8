"""The files that a run learns from, looked at before it: what they hold, and that held-out records are held out."""

from __future__ import annotations

import json
import math
from hashlib import blake2b

from ..agents.models.inspection import ModelFacts
from ..agents.renderer import Renderer
from ..agents.store import read_trajectories
from ..agents.trajectory import Trajectory
from ..envs.files.validate import validate
from ..tools.errors import ConfigError, DataError
from .config import TrainConfig
from .dataset import GroupDataset, TrajectoryDataset
from .findings import Preflight
from .pairs import LabelledDataset, PairDataset
from .presets import PRESETS, Want, looks_for
from .registry import ALGORITHMS
from .reward import ConversationPairs
from .stored import HOLDS, FileDataset, listed

_WANTED: dict[Want, str] = {
    "replies": "episodes, conversations or answers to imitate",
    "pairs": "pairs, or groups of episodes that earned different rewards",
    "labels": "replies that are known to be good or bad, some of both",
}


def look_at_data(found: Preflight, config: TrainConfig) -> None:
    """Read the files that are learnt from; line by line alone where tokenizer or context of the model are not known."""
    if config.trajectories is not None:
        _look_at_stored(found, config, config.trajectories)
    if config.data is None:
        return
    data = found.dataset = _look_at_file(found, config, "data", config.data)
    held = found.held_out = _look_at_file(found, config, "eval_data", config.eval_data) if config.eval_data else None
    if data is not None and (asked := _asked(config)):
        files = [data] if held is None else [data, held]
        wanted = "options that the file has a use for"
        found.look("data options", wanted, "leave them out", lambda: _options(asked, files))
    if data is not None and held is not None:
        mend = "take these lines out of one of the files"
        found.look("held out", "records that are not trained on", mend, lambda: _apart(data, held))


def _look_at_stored(found: Preflight, config: TrainConfig, path: str) -> None:
    """Look at stored episodes, which an algorithm learns from as if it had sampled them."""
    what, wanted = "trajectories", "sampled episodes with log-probs, of this tokenizer"
    mend = "`gymtune rollout` writes such a file"
    renderer, facts = found.renderer, found.facts
    if renderer is None or facts is None:
        found.look(what, wanted, mend, lambda: _count(path))
        return
    groups = found.dataset = found.look(what, wanted, mend, lambda: _groups(config, path, renderer, facts))
    for note in groups.notes if groups is not None else ():
        found.note(what, wanted, note)


def _count(path: str) -> tuple[int, str]:
    count = sum(1 for _ in read_trajectories(path))
    return count, f"{count} episodes, looked at no further without a model"


def _groups(config: TrainConfig, path: str, renderer: Renderer, facts: ModelFacts) -> tuple[GroupDataset, str]:
    groups = GroupDataset(
        path,
        renderer,
        min_group_size=config.min_group_size if "min_group_size" in PRESETS[config.algo].reads else 1,
        max_length=config.max_model_length or facts.context,
        seed=config.seed,
    )
    return groups, f"{len(groups.groups)} groups of {sum(map(len, groups.groups))} episodes"


def _look_at_file(found: Preflight, config: TrainConfig, what: str, path: str) -> FileDataset | None:
    """Look at a file of records or episodes as what the algorithm learns from it."""
    wanted, mend = (
        _WANTED[looks_for(config.algo) or "replies"],
        f"`gymtune plan --data {path}` says what the file is good for",
    )
    renderer, facts = found.renderer, found.facts
    if renderer is None or facts is None:
        found.look(what, wanted, mend, lambda: _records(path))
        return None
    longest = min(facts.context, found.teacher.context if found.teacher is not None else facts.context)
    data = found.look(what, wanted, mend, lambda: _told(file_dataset(config, path, renderer, longest)))
    for note in data.notes if data is not None else ():
        found.note(what, wanted, note)
    return data


def file_dataset(config: TrainConfig, path: str, renderer: Renderer, max_length: int) -> FileDataset:
    """Return what the algorithm of a config learns from a file. Raises DataError; see the classes."""
    match looks_for(config.algo):
        case "pairs":
            pairs = ConversationPairs if ALGORITHMS[config.algo].scores else PairDataset
            return pairs(
                path,
                renderer,
                max_length=max_length,
                seed=config.seed,
                how=config.pairs,
                ties=config.ties == "half",
                drop_long=config.drop_long,
            )
        case "labels":
            return LabelledDataset(
                path,
                renderer,
                max_length=max_length,
                seed=config.seed,
                threshold=config.label_threshold,
                drop_long=config.drop_long,
            )
    return TrajectoryDataset(
        path,
        renderer,
        max_length=max_length,
        seed=config.seed,
        min_reward=config.min_reward,
        best_of=config.best_of,
        drop_long=config.drop_long,
    )


def _told(data: FileDataset) -> tuple[FileDataset, str]:
    return data, data.summary


def _records(path: str) -> tuple[int, str]:
    report = validate(path)
    if not report.ok:
        more = f"; and {report.unlisted} more" if report.unlisted else ""
        raise DataError(f"{path}: {listed([str(fault) for fault in report.faults], '; ')}{more}")
    return report.rows, f"{report.rows} {HOLDS[report.kind][0]}, looked at no further without a model"


def _asked(config: TrainConfig) -> list[str]:
    """Return the options that say something of rewards and groups, or of a column, where they are not the default."""
    away = {
        "min_reward": config.min_reward is not None,
        "best_of": config.best_of is not None,
        "pairs": config.pairs != "best_worst",
        "ties": config.ties != "drop",
        "label_threshold": config.label_threshold is not None,
        "margin": config.margin == "column",
    }
    return [key for key, there in away.items() if there and key in PRESETS[config.algo].reads]


def _options(asked: list[str], files: list[FileDataset]) -> tuple[list[str], str]:
    """Refuse options on the rewards of episodes where the file that is trained on has none; look for the margins."""
    data, idle = files[0], [key for key in asked if key != "margin"]
    if idle and data.kind != "trajectories":
        raise ConfigError(
            f"{', '.join(idle)}: read of the rewards of episodes alone, and {data.path} is of the kind {data.kind}"
        )
    if "margin" in asked:
        for file in files:
            _check_margins(file)
    return asked, ", ".join(asked)


def _check_margins(data: FileDataset) -> None:
    """Raise DataError naming the lines whose record has no number `margin`."""
    bare = [data.lines[one.trajectory_id] for one in data.everything() if not _is_number(one.metadata.get("margin"))]
    if bare:
        lines = listed([str(line) for line in dict.fromkeys(bare)])
        raise DataError(f"{data.path}: margin='column' wants a number in the column margin, not so on lines {lines}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _apart(data: FileDataset, held: FileDataset) -> tuple[int, str]:
    """Refuse held-out replies that are trained on: the same prompt, tools and words."""
    trained = {_mark(one): data.lines[one.trajectory_id] for one in data.everything()}
    both = {
        held.lines[one.trajectory_id]: trained[mark] for one in held.everything() if (mark := _mark(one)) in trained
    }
    if both:
        lines = listed([f"line {line} is line {other} of {data.path}" for line, other in both.items()])
        raise DataError(f"{held.path}: {len(both)} held-out records are trained on: {lines}")
    return len(held.lines), f"no reply of {held.path} stands in {data.path}"


def _mark(trajectory: Trajectory) -> bytes:
    content = json.dumps([trajectory.messages, trajectory.tools], sort_keys=True)
    return blake2b(content.encode(), digest_size=16).digest()
