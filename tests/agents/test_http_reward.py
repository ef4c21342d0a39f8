"""Rewards from a server, against one that listens: what is sent, what is tried again, what silence makes of a batch."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from gymtune.agents import ScriptedAgent, Trajectory, rollout
from gymtune.agents.http_reward import HttpReward
from gymtune.agents.scorer import Scorer, function_part, split_rewards
from gymtune.tools.errors import ConfigError

Answer = tuple[int, bytes]


class Server:
    """A reward server on a free port. `answers` come one after another, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[Answer | None] = []
        self.asked: list[dict[str, Any]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answer = owner.answers.pop(0) if len(owner.answers) > 1 else owner.answers[0]
                if answer is None:  # hang up
                    self.close_connection = True
                    return
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(answer[1])))
                self.end_headers()
                self.wfile.write(answer[1])

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # whoever hung up, a test knows
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"

    def says(self, *answers: Answer | None) -> "Server":
        self.answers = list(answers)
        return self


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.server.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def ask(server: Server) -> Callable[..., tuple[list[Trajectory], Scorer]]:
    """Score three sums by the server, half a point a score; retries wait a millisecond."""

    def scored(*answers: Answer | None, **options: Any) -> tuple[list[Trajectory], Scorer]:
        server.says(*answers)
        reward = HttpReward(server.url, **({"backoff": 0.001, "retries": 2} | options))
        scorer = Scorer([function_part("reward_model", 0.5, reward)])
        trajectories = rollout("gymtune/Arithmetic-v0", ScriptedAgent(), 3)
        scorer.score(trajectories)
        return trajectories, scorer

    return scored


def scores(*values: Any) -> Answer:
    return 200, json.dumps({"scores": values}).encode()


def test_a_server_sees_the_episodes_and_its_scores_are_a_component(server: Server, ask: Any) -> None:
    trajectories, scorer = ask(scores(1.5, None, -2))
    assert scorer.fault is None
    assert [t.rewards.get("reward_model", "no say") for t in trajectories] == [1.5, "no say", -2.0]
    assert [t.reward for t in trajectories] == [1 + 0.5 * 1.5, 1.0, 1 + 0.5 * -2]
    (sent,) = server.asked
    assert sent["messages"] == [t.messages for t in trajectories]
    assert [p + c for p, c in zip(sent["prompts"], sent["completions"], strict=True)] == sent["messages"]
    assert [len(p) for p in sent["prompts"]] == [1, 1, 1]
    assert sent["gt"] == [t.gt for t in trajectories]
    assert sent["level"] == [1, 1, 1]
    assert "trajectories" not in sent


@pytest.mark.parametrize(
    ("answers", "tries"),
    [
        ([(500, b"busy"), (503, b"busy"), scores(1, 2, 3)], 3),
        ([None, scores(1, 2, 3)], 2),
    ],
    ids=["status", "lost connection"],
)
def test_faults_that_pass_are_tried_again(server: Server, ask: Any, answers: list[Answer | None], tries: int) -> None:
    trajectories, scorer = ask(*answers)
    assert [t.rewards["reward_model"] for t in trajectories] == [1.0, 2.0, 3.0]
    assert scorer.fault is None
    assert len(server.asked) == tries
    assert all(sent == server.asked[0] for sent in server.asked)


@pytest.mark.parametrize(
    ("answer", "tries", "fault"),
    [
        ((500, b"out of memory"), 3, "ConnectionError: status 500: out of memory"),
        (None, 3, "ConnectionError: no answer: RemoteProtocolError"),
        ((404, b"no such page"), 1, "ConnectionError: status 404: no such page"),
        ((302, b""), 1, "ConnectionError: status 302"),
        ((200, b"<html>"), 1, "ValueError: the answer is no JSON: '<html>'"),
        ((200, b"[1, 2, 3]"), 1, """ValueError: wanted {"scores": [...]}, came '[1, 2, 3]'"""),
        ((200, b'{"scores": "123"}'), 1, "ValueError: wanted"),
        ((200, b'{"scores": [1, NaN, 3]}'), 1, "ValueError: a score must be a finite number or None, got nan"),
        ((200, b'{"scores": [1, "2", 3]}'), 1, "ValueError: a score must be a finite number or None, got '2'"),
        ((200, b'{"scores": [1, [2], 3]}'), 1, "TypeError"),
    ],
)
def test_without_a_right_answer_nobody_has_a_reward(
    server: Server, ask: Any, answer: Answer | None, tries: int, fault: str
) -> None:
    trajectories, scorer = ask(answer)
    assert [t.rewards["reward_model"] for t in trajectories] == [None] * 3
    assert [t.reward for t in trajectories] == [None] * 3
    assert scorer.fault is not None
    assert scorer.fault.startswith(f"{server.url}: {fault}")
    assert len(server.asked) == tries


def test_another_number_of_scores_ends_the_run(server: Server, ask: Any) -> None:
    with pytest.raises(ConfigError, match=rf"reward function '{server.url}' must return 3 scores, got 2"):
        ask(scores(1, 2))


def test_nobody_listens(server: Server) -> None:
    server.server.server_close()
    with pytest.raises(ConnectionError, match="no answer: ConnectError"):
        HttpReward(server.url, retries=1, backoff=0.001)([[]], [[]])


def test_a_slow_server_is_not_asked_again(server: Server) -> None:
    waits, tries = threading.Event(), []
    handler: Any = server.server.RequestHandlerClass
    plain = handler.do_POST

    def slow(request: Any) -> None:
        tries.append(request)
        waits.wait()
        plain(request)

    handler.do_POST = slow
    server.says(scores(1))
    with pytest.raises(ConnectionError, match="no answer: ReadTimeout"):
        HttpReward(server.url, timeout=0.2, retries=3, backoff=0.001)([[]], [[]])
    waits.set()
    assert len(tries) == 1


def test_what_has_no_json_form_is_told(server: Server) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        HttpReward(server.url)([[]], [[]], gt=[object()])


def test_an_address_is_a_reward_model_and_a_wrong_one_is_told() -> None:
    _, scorer = split_rewards({"reward_model": 0.25}, "http://127.0.0.1:9/score")
    assert [(part.name, part.weight) for part in scorer.parts] == [("reward_model", 0.25)]
    for url, message in [
        ("http://", "names no host"),
        ("http://host:port/", "is no address"),
        ("http://me:secret@host/", r"reward model http://host/: the address holds a password"),
    ]:
        with pytest.raises(ConfigError, match=message):
            split_rewards({}, url)
    assert issubclass(httpx.ConnectTimeout, httpx.TimeoutException)
