"""Vector envs step whole episodes, in this process and in workers, each sub-env restarting by itself at its end."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

from gymtune.envs import TextSpace, make_env
from gymtune.envs.tasks import gold_texts
from gymtune.tools import get_chat_format

ENVS, EPISODES = 3, 2
MODES = {"sync": None, "async": {"shared_memory": False}}


@pytest.fixture(params=MODES)
def vector(request: pytest.FixtureRequest) -> Iterator[gymnasium.vector.VectorEnv[Any, Any, Any]]:
    envs = gymnasium.make_vec(
        "gymtune.envs:gymtune/Calculator-v0",
        num_envs=ENVS,
        vectorization_mode=request.param,
        vector_kwargs=MODES[request.param],
        seed=4,
    )
    yield envs
    envs.close()


def gold_of(task_id: str) -> list[str]:
    """The texts of a task by its id: the task is the same in every process."""
    task = make_env("gymtune/Calculator-v0", seed=4).tasks[int(task_id.rpartition("/")[2])]
    assert task.gold is not None
    return gold_texts(task.gold, get_chat_format("hermes"))


def test_whole_episodes(vector: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
    assert vector.single_action_space == TextSpace()
    observations, infos = vector.reset(seed=11)
    assert observations in vector.observation_space
    scripts = [gold_of(task_id) for task_id in infos["task_id"]]
    assert len({tuple(script) for script in scripts}) == ENVS  # seeds 11, 12, 13
    finished = np.zeros(ENVS, dtype=int)
    rewards, over = np.zeros(ENVS), np.zeros(ENVS, dtype=bool)
    for _ in range(40):
        # After its end a sub-env takes one action for its own reset and ignores it (gymnasium's NEXT_STEP autoreset).
        actions = tuple("ignored" if over[i] else scripts[i].pop(0) for i in range(ENVS))
        observations, reward, terminated, truncated, infos = vector.step(actions)
        assert observations in vector.observation_space
        assert not truncated.any()
        for i in np.flatnonzero(over):
            assert reward[i] == 0
            assert [m["role"] for m in observations[i]] == ["system", "user"]
            scripts[i] = gold_of(infos["task_id"][i])
        rewards += reward
        assert [len(script) == 0 for script in scripts] == list(terminated)
        finished += terminated
        over = terminated
        if (finished >= EPISODES).all():
            break
    assert (finished >= EPISODES).all()
    assert list(rewards) == list(finished)  # each finished episode earned exactly 1


def test_the_same_seed_gives_the_same_episodes(vector: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
    first, second = vector.reset(seed=0), vector.reset(seed=0)
    assert first[0] == second[0]
    assert list(first[1]["task_id"]) == list(second[1]["task_id"])
    stepped = vector.step(("hello",) * ENVS)
    assert list(stepped[2]) == [True] * ENVS
    assert list(stepped[4]["stop_reason"]) == ["stop"] * ENVS
