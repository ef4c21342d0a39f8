import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import gymtune.envs
from gymtune.envs import ChatEnv, Task, env_ids, make_env, register_all
from gymtune.rewards import unfinished
from gymtune.tools.errors import ConfigError
from gymtune.tools.messages import user


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_ids() -> None:
    names = ["Arithmetic", "Calculator", "Dialog", "Math", "Preference", "ToolUse"]
    assert env_ids() == [f"gymtune/{name}-v0" for name in names]
    register_all()  # again: no warning about an id that is overridden
    assert gymtune.envs.__all__ == sorted(gymtune.envs.__all__)
    assert all(hasattr(gymtune.envs, name) for name in gymtune.envs.__all__)


@pytest.mark.parametrize("env_id", env_ids())
def test_check_env_without_a_warning(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gymnasium.make(env_id) as env:
            check_env(env.unwrapped)
        with gymnasium.make(env_id, render_mode="ansi") as env:
            env.reset(seed=0)
            env.step("hello")
            assert "\n[assistant] hello" in env.render()


def test_the_prefix_form_works_alone() -> None:
    code = (
        "import gymnasium; env = gymnasium.make('gymtune.envs:gymtune/Calculator-v0', levels=(1,));"
        "env.reset(seed=0); print(env.step('hello')[1:4])"
    )
    assert run_python(code) == "(0.0, True, False)\n"


def test_importing_envs_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, gymtune.envs, gymtune.rewards, gymtune.envs.calculator, gymtune.envs.arithmetic;"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]\n"


def test_make_env_gives_the_bare_env() -> None:
    for env_id in ("gymtune/Calculator-v0", "gymtune.envs:gymtune/Calculator-v0"):
        env = make_env(env_id, levels=(1,), split="test", system_prompt="Hello.")
        assert type(env).__name__ == "CalculatorEnv"
        assert env.spec is not None
        assert env.spec.id == "gymtune/Calculator-v0"
        assert env.reset(options={"task_index": 0})[0][0]["content"] == "Hello."


class OwnEnv(ChatEnv):
    def __init__(self, level: int = 1, **kwargs: object) -> None:
        raise TypeError("something else")


class FixedEnv(ChatEnv):
    def __init__(self, **options: Any) -> None:
        super().__init__([Task("t", (user("Hello"),), 0)], [unfinished], max_turns=1, **options)


@pytest.fixture(scope="module", autouse=True)
def _own() -> None:
    gymnasium.register("tests/Own-v0", entry_point=OwnEnv)
    gymnasium.register("tests/Fixed-v0", entry_point=FixedEnv)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "words"),
    [
        ("gymtune/Calculater-v0", {}, r"unknown env 'gymtune/Calculater-v0'\. Did you mean 'gymtune/Calculator-v0'"),
        ("gymtune/Calculator", {}, r"Did you mean 'gymtune/Calculator-v0'"),
        ("no_such_module_at_all:X-v0", {}, "cannot import 'no_such_module_at_all'"),
        ("CartPole-v1", {}, r"must be a gymtune\.envs\.ChatEnv, got CartPoleEnv"),
        ("gymtune/Calculator-v0", {"level": (1,)}, r"takes no argument 'level'\. Did you mean 'levels'"),
        ("gymtune/Calculator-v0", {"tasks": []}, "takes no argument 'tasks'"),
        ("tests/Fixed-v0", {"max_turns": 3}, "multiple values for keyword argument 'max_turns'"),
        ("gymtune/Calculator-v0", {"max_turns": "3"}, "cannot be made with"),
        ("gymtune/Calculator-v0", {"rewards": {"tg": 1.0}}, "no component 'tg'"),
        ("tests/Own-v0", {"levle": 1}, "Did you mean 'level'"),
        ("tests/Own-v0", {}, "something else"),
    ],
)
def test_make_env_refuses(env_id: str, kwargs: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_env(env_id, **kwargs)
