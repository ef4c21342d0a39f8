"""What a plan finds out about files and environments: what each of them has to learn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from ..agents.recorded import lacks_results, recorded
from ..agents.store import read_trajectories
from ..agents.trajectory import Trajectory
from ..envs.chat_env import ChatEnv
from ..envs.files import Kind, Label, Record, parse_record, read_rows
from ..envs.files.validate import validate
from ..envs.registration import make_env
from ..envs.tasks import gold_texts
from ..rewards.preference import PreferenceChecker
from ..tools.chat_format import get_chat_format
from ..tools.errors import DataError, GymtuneError
from .stored import spoke

_HOMES = ("gymtune/ToolUse-v0", "gymtune/Preference-v0", "gymtune/Math-v0")  # tried on a file; the last takes most


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """An environment: what pays in it, whether it has tools, whether its tasks know the gold episode.

    `data` is the file that it reads, None where it makes its own tasks. A component that pays for the very texts on
    file alone (pairs, labelled replies) is not in `pays`: what a policy says by itself would earn nothing.
    """

    env_id: str
    data: str | None
    tasks: int
    pays: tuple[str, ...]
    tools: bool
    gold: bool


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A data file: its kind, its faults, and how much of each thing it has.

    Args:
        path: As it was given or found.
        kind: None where it could not be told.
        records: Rows of the file.
        faults: All that is wrong, each with its line. Of a file with faults nothing below is known.
        replies: Records that say what is to be imitated.
        pairs: Pairs (files of pairs), or groups whose episodes earned different rewards (trajectories).
        good: Replies that are known to be good.
        bad: Replies that are known to be bad.
        episodes: Trajectories whose reward is known.
        sampled: Of these, sampled by a policy, with the log-probs of what it said.
        groups: Groups of two or more such episodes.
        home: The environment of ours that takes the file, if one does; of trajectories the one that they are of.
    """

    path: str
    kind: Kind | None
    records: int = 0
    faults: tuple[str, ...] = ()
    replies: int = 0
    pairs: int = 0
    good: int = 0
    bad: int = 0
    episodes: int = 0
    sampled: int = 0
    groups: int = 0
    home: EnvFacts | None = None


def look_at_file(path: str) -> FileFacts:
    """Return what is in a data file; what is wrong with it comes as `faults`, all of it."""
    try:
        report = validate(path)
    except GymtuneError as error:
        return FileFacts(path, None, faults=(str(error),))
    faults = [str(fault) for fault in report.faults]
    if report.unlisted:
        faults.append(f"and {report.unlisted} more")
    if faults:
        return FileFacts(path, report.kind, report.rows, tuple(faults))
    if report.kind == "trajectories":
        try:
            return _of_episodes(path, read_trajectories(path))
        except DataError as error:
            return FileFacts(path, report.kind, report.rows, (str(error),))
    return _of_records(path, report.kind)


def _of_records(path: str, kind: Kind) -> FileFacts:
    """Count what the records of a file without faults say, one at a time; replies that nobody learns from are none."""
    said = Counter[Label]()
    rows = pairs = 0
    for row in read_rows(path):
        record = parse_record(row, kind)
        if isinstance(record, Record):
            rows += 1
            replies = _usable(record)
            said.update(list(replies))
            pairs += replies.keys() == {"chosen", "rejected"} and replies["chosen"] != replies["rejected"]
    return FileFacts(
        path,
        kind,
        rows,
        replies=said["chosen"] + said["good"] + said["reference"],
        pairs=pairs,
        good=said["chosen"] + said["good"],
        bad=said["rejected"] + said["bad"],
        home=next((home for env_id in _HOMES if (home := _takes(env_id, path))), None),
    )


def _usable(record: Record) -> dict[Label, list[str]]:
    """Return what is said in the replies that can be learnt from, by label."""
    try:
        episodes = recorded(record, "", get_chat_format("hermes"))
    except DataError:
        return {}
    labels = (reply.label for reply in record.replies)
    return {
        label: [turn.text for turn in episode.turns]
        for label, episode in zip(labels, episodes, strict=True)
        if spoke(episode) and not lacks_results(episode)
    }


def _of_episodes(path: str, episodes: Iterable[Trajectory]) -> FileFacts:
    """Count what episodes are good for; those that failed or said nothing are good for nothing."""
    count = replies = 0
    scored, sampled, success = Counter[str](), Counter[str](), Counter[bool | None]()
    rewards: dict[str, set[float]] = {}
    names = set[str]()
    first: Trajectory | None = None
    for episode in episodes:
        count += 1
        first = first or episode
        if episode.trajectory_id in names:
            raise DataError(f"trajectory {episode.trajectory_id} stands there twice: keep one of them")
        names.add(episode.trajectory_id)
        if episode.error is not None or not spoke(episode):
            continue
        replies += 1
        success[episode.success] += 1
        if episode.reward is not None:
            rewards.setdefault(episode.group_id, set()).add(episode.reward)
            scored[episode.group_id] += 1
            sampled[episode.group_id] += is_sampled(episode)
    return FileFacts(
        path,
        "trajectories",
        count,
        replies=replies,
        pairs=sum(len(earned) > 1 for earned in rewards.values()),
        good=success[True],
        bad=success[False],
        episodes=scored.total(),
        sampled=sampled.total(),
        groups=sum(size > 1 for size in sampled.values()),
        home=_own(first) if first is not None else None,
    )


def is_sampled(episode: Trajectory) -> bool:
    """Tell whether a policy sampled what was said, at a temperature above 0, and its log-probs are known."""
    said = [p for p, trained in zip(episode.logprobs, episode.response_mask, strict=True) if trained]
    greedy = episode.sampling is not None and episode.sampling.temperature == 0
    return bool(said) and None not in said and not greedy


def look_at_env(env_id: str, data: str | None = None) -> EnvFacts:
    """Return what an environment is like. Raises ConfigError or DataError when it cannot be made."""
    with closing(make_env(env_id, **({"data": data} if data is not None else {}))) as env:
        return _facts(env_id, data, env)


def _facts(env_id: str, data: str | None, env: ChatEnv) -> EnvFacts:
    _, info = env.reset(options={"task_index": 0})
    assert env.task is not None  # reset has begun one
    return EnvFacts(
        env_id=env_id,
        data=data,
        tasks=len(env.tasks),
        pays=tuple(name for name, weight in env.weights.items() if weight and not _by_heart(env, name)),
        tools=bool(info["tools"]),
        gold=bool(gold_texts(env.task.gold or (), env.chat_format)),
    )


def _own(episode: Trajectory) -> EnvFacts | None:
    """Return the facts of the env that an episode is of; None where that has no such task without arguments.

    Which file or arguments it had, no trajectory says.
    """
    try:
        with closing(make_env(episode.env_id)) as env:
            known = episode.task_index < len(env.tasks)
            same = known and env.tasks[episode.task_index].task_id == episode.task_id
            return _facts(episode.env_id, None, env) if same else None
    except GymtuneError:
        return None


def _by_heart(env: ChatEnv, name: str) -> bool:
    return isinstance(getattr(env.components[name], "checker", None), PreferenceChecker)


def _takes(env_id: str, path: str) -> EnvFacts | None:
    """Return the facts of an env of ours on a file, or None where it does not take the file."""
    try:
        return look_at_env(env_id, path)
    except GymtuneError:
        return None
