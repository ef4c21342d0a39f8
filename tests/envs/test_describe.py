"""What an env says of itself."""

import pytest

from gymtune.envs import env_ids, make_env
from gymtune.envs.describe import describe_env


@pytest.mark.parametrize("env_id", env_ids())
def test_the_description_is_the_env_itself(env_id: str) -> None:
    env, said = make_env(env_id), describe_env(env_id)
    messages, info = env.reset(options={"task_index": 0})
    assert said.summary
    assert said.text.startswith(said.summary)
    assert (said.messages, said.tools, said.gt) == (messages, info["tools"], env.tasks[0].gt)
    assert set(said.components) == set(env.components)
    success = None
    for text in said.gold:
        success = env.step(text)[4]["success"]
    assert success is True


def test_arguments_show_in_the_task_and_their_defaults_in_words() -> None:
    said = describe_env("gymtune/Calculator-v0", levels=[4], **{"rewards": {"gt": 2.0}})
    assert said.messages[-1]["content"].startswith("Take ")
    assert said.arguments["split"] == "'train'"
    assert said.components == {"gt": 2.0, "failed_calls": 0.0, "unfinished": 0.0}
