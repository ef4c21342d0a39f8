import subprocess
import sys
from pathlib import Path

import pytest

from gymtune.rewards import Checker, Component
from gymtune.rewards.registry import (
    CHECKERS,
    component_names,
    get_checker,
    get_component,
    get_preset,
    load_object,
    preset_names,
)
from gymtune.tools.errors import ConfigError


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's."""
    (tmp_path / "own_rewards.py").write_text(
        "from gymtune.rewards import Checker, Component, Verdict\n"
        "class Even(Checker):\n"
        "    def __init__(self, zero: bool = True):\n"
        "        self.zero = zero\n"
        "    def verdict(self, answer, gt):\n"
        "        return Verdict.of(int(answer) % 2 == 0)\n"
        "class Nothing(Checker):\n"
        "    pass\n"
        "polite = Component('polite', 'end', lambda episode: 1.0)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_rewards"


@pytest.mark.parametrize("name", CHECKERS)
def test_every_checker_can_be_made_by_its_name(name: str) -> None:
    checker = get_checker(name)
    assert isinstance(checker, Checker)
    assert f"{type(checker).__module__}:{type(checker).__name__}" == CHECKERS[name]


def test_options_reach_the_checker() -> None:
    assert get_checker("tool_calls_match", ordered=True).ordered is True  # type: ignore[attr-defined]
    assert get_checker("json_equal", unordered_lists=True).unordered_lists is True  # type: ignore[attr-defined]
    assert get_checker("state_equal", partial=True).partial is True  # type: ignore[attr-defined]


def test_a_checker_and_a_component_of_the_users(own: str) -> None:
    even = get_checker(f"{own}:Even", zero=False)
    assert (even.verdict("4", None).success, even.zero) == (True, False)  # type: ignore[attr-defined]
    assert get_component(f"{own}:polite").name == "polite"


def test_every_component_is_found_by_its_name() -> None:
    assert component_names() == sorted(component_names())
    assert {"unfinished", "failed_calls", "repetition", "length"} <= set(component_names())
    for name in component_names():
        assert isinstance(get_component(name), Component)
        assert get_component(name).name == name


def test_every_preset_is_found_by_its_name() -> None:
    assert preset_names() == ["gsm8k", "minimind_agent", "minimind_chat"]
    assert all(get_preset(name).name == name for name in preset_names())


def test_errors_name_what_was_meant(own: str) -> None:
    for wrong, message in [
        (lambda: get_checker("numerik"), "no checker is named 'numerik'. Did you mean 'numeric'"),
        (lambda: get_checker("numeric", tolerance=1), "takes no option 'tolerance'. It takes none"),
        (
            lambda: get_checker("json_equal", unordered=1),
            "takes no option 'unordered'.* Did you mean 'unordered_lists'",
        ),
        (lambda: get_checker("no_such_module_here:X"), "cannot import 'no_such_module_here'"),
        (lambda: get_checker(f"{own}:Evan"), "has no 'Evan'. Did you mean 'Even'"),
        (lambda: get_checker(f"{own}:polite"), "must be a class below gymtune.rewards.Checker"),
        (lambda: get_checker(f"{own}:Nothing"), "must be a class below gymtune.rewards.Checker with a verdict"),
        (lambda: get_checker("json:loads"), "must be a class below gymtune.rewards.Checker"),
        (lambda: get_checker("json:JSONDecoder"), "must be a class below gymtune.rewards.Checker"),
        (lambda: get_component("lenght"), "no reward component is named 'lenght'. Did you mean 'length'"),
        (lambda: get_component(f"{own}:Even"), "must be a gymtune.rewards.Component"),
        (lambda: get_preset("minimind"), "no reward preset is named 'minimind'. Did you mean 'minimind_"),
        (lambda: load_object("module", "thing"), "thing 'module' must have the form 'module:name'"),
        (lambda: load_object(":name", "thing"), "must have the form"),
        (lambda: load_object(f"{own}:", "thing"), "must have the form"),
    ]:
        with pytest.raises(ConfigError, match=message):
            wrong()


def test_listing_the_names_loads_nothing_heavy() -> None:
    code = (
        "import sys; from gymtune.rewards import component_names, preset_names; component_names(), preset_names()\n"
        "heavy = {'torch', 'transformers', 'math_verify', 'sympy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
