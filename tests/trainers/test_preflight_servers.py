"""What preflight says of servers: dead ones, those that cannot do what is asked, a Python without SGLang."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from gymtune.trainers import TrainConfig
from gymtune.trainers.findings import Preflight
from gymtune.trainers.preflight_servers import look_at_servers


def server(**facts: Any) -> Callable[[str, str, Any], tuple[int, Any]]:
    """Answer as a server does that says this of itself."""
    pages = {
        "/model_info": {"model_path": "m", "is_generation": facts.get("is_generation", True)},
        "/server_info": {"version": "0.5.23", "enable_lora": facts.get("enable_lora", False)},
    }

    def handle(method: str, path: str, body: Any) -> tuple[int, Any]:
        assert method == "GET"  # nothing is changed on it
        return (200, pages[path]) if path in pages else (404, {"detail": "Not Found"})

    return handle


def look(config: TrainConfig) -> list[tuple[str, str, str]]:
    found = Preflight()
    look_at_servers(found, config)
    return [(one.what, one.verdict, one.came) for one in found.findings if one.what != "servers"]


def test_a_server_that_is_there_and_one_that_is_not(config, double):
    live = double(server()).url
    told = look(config("grpo", backend="sglang", sglang_url=[live, "http://127.0.0.1:9"]))
    assert told[0] == ("server", "fits", f"{live}, SGLang 0.5.23, serving m")
    assert told[1][:2] == ("server", "wrong")
    assert "no server can be reached" in told[1][2]


@pytest.mark.parametrize(
    ("facts", "changes", "told"),
    [
        ({"is_generation": False}, {}, "samples nothing"),
        ({"enable_lora": False}, {"weight_sync": "adapter", "lora_r": 4}, "enable-lora"),
    ],
)
def test_a_server_that_cannot_do_what_is_asked(config, double, facts, changes, told):
    url = double(server(**facts)).url
    ((what, verdict, came),) = look(config("grpo", backend="sglang", sglang_url=[url], **changes))
    assert (what, verdict) == ("server", "wrong")
    assert told in came


def test_a_python_without_sglang(config):
    ((what, verdict, came),) = look(
        config("grpo", backend="sglang", sglang_launch=True, sglang_python=f"{sys.base_prefix}/bin/python3")
    )
    assert (what, verdict) == ("sglang", "wrong")
    assert "it has no sglang" in came
