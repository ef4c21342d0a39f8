import copy
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest

from gymtune.envs import Action, MessagesSpace, TextSpace
from gymtune.tools.messages import system, user

SPACES = [TextSpace, MessagesSpace]


@pytest.mark.parametrize("space", SPACES)
def test_spaces_of_one_kind_are_equal(space: type[gymnasium.Space[Any]]) -> None:
    assert space(seed=1) == space(seed=2)
    assert hash(space(seed=1)) == hash(space())
    assert space() == copy.deepcopy(space()) == pickle.loads(pickle.dumps(space(seed=3)))
    assert repr(space()) == f"{space.__name__}()"
    assert not space().is_np_flattenable


def test_spaces_of_two_kinds_differ() -> None:
    assert TextSpace() != MessagesSpace()
    assert MessagesSpace() != TextSpace()
    assert TextSpace() != gymnasium.spaces.Text(5)
    assert TextSpace() != "TextSpace()"


@pytest.mark.parametrize("space", SPACES)
def test_samples_are_members_and_follow_the_seed(space: type[gymnasium.Space[Any]]) -> None:
    first, second = space(seed=5), space(seed=5)
    drawn = [first.sample() for _ in range(20)]
    assert drawn == [second.sample() for _ in range(20)]
    assert all(sample in first for sample in drawn)
    assert len({str(sample) for sample in drawn}) == 20
    first.seed(5)
    assert first.sample() == drawn[0]
    assert space(seed=6).sample() != drawn[0]


@pytest.mark.parametrize(
    "text", ["", " ", "a b, c!\n", "\u4e2d\u6587", "\x00", "<|im_end|>", Action("x", "length"), np.str_("x")]
)
def test_any_text_is_an_action(text: str) -> None:
    assert text in TextSpace()


@pytest.mark.parametrize("other", [None, 5, b"bytes", ["text"], ("text",)])
def test_nothing_else_is(other: Any) -> None:
    assert other not in TextSpace()


@pytest.mark.parametrize(
    ("value", "member"),
    [
        ((), True),
        ((user("hi"),), True),
        ([system("s"), user("hi")], True),
        (({"role": "tool", "content": "5", "tool_call_id": "c", "name": "t"},), True),
        (user("hi"), False),
        (("hi",), False),
        (({"role": "user"},), False),
        (({"role": "user", "content": None},), False),
        (({"role": "somebody", "content": ""},), False),
        ("", False),
    ],
)
def test_members_of_the_space_of_messages(value: Any, member: bool) -> None:
    assert (value in MessagesSpace()) is member
