"""Arguments of envs on a command line."""

import inspect

import pytest

from gymtune.envs import ChatEnv, make_env
from gymtune.envs.arguments import parse_env_args, takes_argument
from gymtune.envs.calculator import CalculatorEnv
from gymtune.envs.registration import env_arguments
from gymtune.tools.errors import ConfigError


@pytest.mark.parametrize(
    ("items", "wanted"),
    [
        ([], {}),
        (["split=test"], {"split": "test"}),
        (["levels=[1, 2]", "size=5"], {"levels": [1, 2], "size": 5}),
        (["rewards.gt=1.0", "rewards.failed_calls=0.2"], {"rewards": {"gt": 1.0, "failed_calls": 0.2}}),
        (["rewards={gt = 2}"], {"rewards": {"gt": 2}}),
        (["flag=true", "text='true'"], {"flag": True, "text": "true"}),
        (['system_prompt=Say = only "yes" \u4e2d'], {"system_prompt": 'Say = only "yes" \u4e2d'}),
        (["text="], {"text": ""}),
        (["day=2024-01-01", "path=a\\b"], {"day": "2024-01-01", "path": "a\\b"}),
        (["text=1\nother = 2"], {"text": "1\nother = 2"}),
    ],
)
def test_values_are_toml_else_text(items: list[str], wanted: dict[str, object]) -> None:
    assert parse_env_args(items) == wanted


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["split"], "wants key=value, came 'split'"),
        (["=3"], "wants key=value, came '=3'"),
        (["size=3", "size=4"], "size=3 size=4: Cannot overwrite a value"),
        (["two words=3"], "two words=3"),
    ],
)
def test_what_cannot_be_read_is_told(items: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_env_args(items)


def test_every_argument_that_is_listed_can_be_given_its_default() -> None:
    for env_id in ("gymtune/Calculator-v0", "gymtune/Arithmetic-v0"):
        listed = env_arguments(type(make_env(env_id)))
        defaults = {name: p.default for name, p in listed.items() if p.default is not inspect.Parameter.empty}
        assert "split" in listed
        make_env(env_id, **defaults)


def test_a_subclass_takes_what_its_parents_name() -> None:
    class Mine(CalculatorEnv):
        def __init__(self, mine: int, **options: object) -> None:
            super().__init__(**options)

    assert list(env_arguments(Mine))[:3] == ["mine", "split", "levels"]


def test_an_argument_of_no_class_in_the_line_is_not_taken() -> None:
    assert takes_argument("gymtune/Calculator-v0", "split")
    assert not takes_argument("gymtune/Calculator-v0", "splt")
    assert set(env_arguments(ChatEnv)) == {"system_prompt"}
    with pytest.raises(ConfigError, match="unknown env"):
        takes_argument("gymtune/None-v0", "split")
