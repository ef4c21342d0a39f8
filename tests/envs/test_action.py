import copy
import pickle

import pytest

from gymtune.envs import Action
from gymtune.tools.errors import EnvError

CUT = Action("half a tho", "length", thinking_open=True)


def test_an_action_is_a_str() -> None:
    assert isinstance(CUT, str)
    assert CUT == "half a tho"
    assert hash(CUT) == hash("half a tho")
    assert f"{CUT}ught" == "half a thought"
    assert {CUT: 1}["half a tho"] == 1


@pytest.mark.parametrize(
    "copied", [copy.copy(CUT), copy.deepcopy(CUT), *(pickle.loads(pickle.dumps(CUT, p)) for p in range(2, 6))]
)
def test_copies_keep_how_it_ended(copied: Action) -> None:
    assert type(copied) is Action
    assert (copied, copied.finish_reason, copied.thinking_open) == ("half a tho", "length", True)


def test_a_plain_str_means_stop() -> None:
    action = Action.of("hello")
    assert (action, action.finish_reason, action.thinking_open) == ("hello", "stop", False)
    assert Action.of(CUT) is CUT


def test_an_unknown_finish_reason_is_not_taken_for_stop() -> None:
    with pytest.raises(EnvError, match=r"'lenght'\. Did you mean 'length'"):
        Action("x", "lenght")  # type: ignore[arg-type]
