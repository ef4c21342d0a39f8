"""The client against servers in this process that answer, refuse, break off, die and come back."""

import asyncio
import threading
import time
from typing import Any

import pytest
from sglang_fixtures import Double, a_free_port

from gymtune.agents.sglang import (
    Aborted,
    BadAnswer,
    Busy,
    Refused,
    ServerError,
    Servers,
    Unreachable,
    WrongVersion,
    servers,
)
from gymtune.agents.sglang.wire import Answer
from gymtune.tools.errors import ConfigError, RunError

BODY = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4, "stop": None, "stop_token_ids": None}}
INFO = {"model_path": "m", "weight_version": "default"}


def good(body: Any, version: str = "default", token: int = 5) -> tuple[int, Any]:
    """A whole answer of one token."""
    meta = {
        "id": body["rid"],
        "finish_reason": {"type": "length", "length": 1},
        "output_token_logprobs": [[-1.0, token, None]],
        "weight_versions": [{"version": version, "start": 0, "end": 1}],
    }
    return 200, {"output_ids": [token], "meta_info": meta}


def aborted(body: Any) -> tuple[int, Any]:
    return 200, {"output_ids": [], "meta_info": {"id": body["rid"], "finish_reason": {"type": "abort", "message": "X"}}}


class Script:
    """Answers `/generate` by a list of functions, the last one over and over; `/model_info` by `info`."""

    def __init__(self, *answers: Any, info: Any = None) -> None:
        self.answers, self.info = list(answers), info or INFO

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any] | None:
        if path == "/model_info":
            return 200, self.info
        if path == "/abort_request":
            return 200, None
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(body) if callable(answer) else answer


@pytest.fixture
def client():
    """Makes clients, and closes them."""
    made: list[Servers] = []

    def make(*urls: str, **options: Any) -> Servers:
        made.append(Servers(urls, **{"patience_seconds": 1.0, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def generate(servers: Servers, times: int = 1) -> list[Answer]:
    async def all_of_them() -> list[Answer]:
        return await asyncio.gather(*(servers.generate(BODY) for _ in range(times)))

    return asyncio.run(all_of_them())


def until(holds: Any, seconds: float = 5.0) -> None:
    """Wait for something that happens in the background."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_each_request_has_its_own_id(double, client):
    server = double(Script(good))
    assert [answer.ids for answer in generate(client(server.url), 5)] == [[5]] * 5
    assert len({body["rid"] for body in server.sent("/generate")}) == 5
    assert server.sent("/abort_request") == []


def test_the_server_with_the_fewest_under_way_is_asked(double, client):
    gate = threading.Event()

    def held(body: Any) -> tuple[int, Any]:
        gate.wait(5)
        return good(body)

    slow, quick = double(Script(held)), double(Script(good))
    servers = client(slow.url, quick.url)

    async def run() -> None:
        first = asyncio.create_task(servers.generate(BODY))
        await asyncio.sleep(0.1)
        for _ in range(4):  # one after the other: the other server holds one all the while
            await servers.generate(BODY)
        gate.set()
        await first

    asyncio.run(run())
    assert (len(slow.sent("/generate")), len(quick.sent("/generate"))) == (1, 4)


def test_requests_are_spread_evenly(double, client):
    first, second = double(Script(good)), double(Script(good))
    generate(client(first.url, second.url), 10)
    assert (len(first.sent("/generate")), len(second.sent("/generate"))) == (5, 5)


@pytest.mark.parametrize("lost", [lambda body: None, (503, {"detail": "The request queue is full."}), aborted])
def test_a_request_that_may_be_sent_again_is(double, client, lost):
    server = double(Script(lost, lost, good))
    (answer,) = generate(client(server.url))
    assert answer.ids == [5]
    assert len({body["rid"] for body in server.sent("/generate")}) == 3


def test_what_broke_off_is_aborted_before_it_is_forgotten(double, client):
    server = double(Script(lambda body: None, good))
    generate(client(server.url))
    until(lambda: server.sent("/abort_request"))
    assert server.sent("/abort_request") == [{"rid": server.sent("/generate")[0]["rid"]}]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((400, {"error": {"message": "temperature must be"}}), Refused, "answered 400: temperature must be"),
        ((500, {"detail": "boom"}), ServerError, "answered 500: boom"),
        ((200, "<html>"), BadAnswer, "an object with meta_info was wanted"),
        ((200, {"output_ids": [1]}), BadAnswer, "meta_info"),
    ],
)
def test_what_would_fail_again_is_not_sent_again(double, client, answer, kind, words):
    server = double(Script(answer))
    with pytest.raises(kind, match=words):
        generate(client(server.url))
    assert len(server.sent("/generate")) == 1


@pytest.mark.parametrize(
    ("lost", "kind"),
    [(aborted, Aborted), ((503, {"detail": "full"}), Busy), (lambda body: None, Unreachable)],
)
def test_one_request_does_not_try_for_ever(double, client, monkeypatch, lost, kind):
    monkeypatch.setattr(servers, "_MOST_TRIES", 3)
    server = double(Script(lost))
    with pytest.raises(kind, match="the last of 3 tries"):
        generate(client(server.url))
    assert len(server.sent("/generate")) == 3


def test_a_dead_servers_requests_go_to_another(double, client):
    dead, alive = f"http://127.0.0.1:{a_free_port()}", double(Script(good))
    servers = client(dead, alive.url)
    assert len(generate(servers, 8)) == 8
    assert servers.down() == [dead]
    assert len(alive.sent("/generate")) == 8
    generate(servers, 4)
    assert servers.down() == [dead]


def test_requests_wait_for_a_server_that_comes_back(client):
    port = a_free_port()
    servers = client(f"http://127.0.0.1:{port}", patience_seconds=10.0)
    late = Double(Script(good))
    timer = threading.Timer(0.5, late.start, [port])
    timer.start()
    try:
        assert len(generate(servers, 8)) == 8
        assert servers.down() == []
    finally:
        timer.join()
        late.stop()


def test_when_nobody_answers_patience_ends(client):
    urls = [f"http://127.0.0.1:{a_free_port()}" for _ in range(2)]
    servers = client(*urls, patience_seconds=0.5)
    with pytest.raises(Unreachable, match=r"no server can be reached.*could be used for 0.5 s \(1 more were tried\)"):
        generate(servers)
    began = time.monotonic()
    with pytest.raises(Unreachable):  # it has been dark for long: the next one need not wait as long
        generate(servers)
    assert time.monotonic() - began < 0.4


def test_cancelling_aborts_on_the_server_and_waits_for_nothing(double, client):
    gate = threading.Event()

    def held(body: Any) -> tuple[int, Any]:
        gate.wait(5)
        return aborted(body)

    server = double(Script(held))
    servers = client(server.url)

    async def run() -> float:
        tasks = [asyncio.create_task(servers.generate(BODY)) for _ in range(4)]
        await asyncio.to_thread(until, lambda: len(server.sent("/generate")) == 4)
        began = time.monotonic()
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in done] == [asyncio.CancelledError] * 4
        return time.monotonic() - began

    assert asyncio.run(run()) < 0.5
    until(lambda: len(server.sent("/abort_request")) >= 4)
    asked = {body["rid"] for body in server.sent("/generate")}
    assert {body["rid"] for body in server.sent("/abort_request")} == asked
    assert len(server.sent("/generate")) == 4  # an abort that we wanted is not tried again
    gate.set()


def test_a_deadline_aborts_too(double, client):
    gate = threading.Event()
    server = double(Script(lambda body: (gate.wait(5), aborted(body))[1]))

    async def run(servers: Servers) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await servers.generate(BODY)

    asyncio.run(run(client(server.url)))
    until(lambda: server.sent("/abort_request"))
    gate.set()


def test_closing_aborts_what_is_under_way(double):
    gate = threading.Event()
    server = double(Script(lambda body: (gate.wait(5), aborted(body))[1]))
    servers = Servers([server.url])

    async def run() -> None:
        task = asyncio.create_task(servers.generate(BODY))
        await asyncio.to_thread(until, lambda: server.sent("/generate"))
        await asyncio.to_thread(servers.close)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert server.sent("/abort_request")[0]["rid"] == server.sent("/generate")[0]["rid"]
    gate.set()
    servers.close()  # a second time is nothing
    with pytest.raises(RunError, match="is closed"):
        generate(servers)


def test_a_server_that_hangs_loses_its_requests(double, client, monkeypatch):
    monkeypatch.setattr(servers, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(servers, "_PROBE_SECONDS", 0.1)
    gate = threading.Event()

    def hangs(method: str, path: str, body: Any) -> None:
        gate.wait(10)

    hung, alive = double(hangs), double(Script(good))
    answers = generate(client(hung.url, alive.url), 2)
    assert len(answers) == 2
    assert len(hung.sent("/model_info")) >= 3  # asked three times before it was given up
    gate.set()


def test_a_server_that_is_slow_keeps_its_requests(double, client, monkeypatch):
    monkeypatch.setattr(servers, "_SILENT_SECONDS", 0.05)
    server = double(Script(lambda body: (time.sleep(0.5), good(body))[1]))
    assert len(generate(client(server.url))) == 1
    assert len(server.sent("/generate")) == 1


# -- versions ------------------------------------------------------------------------------------------------------


def test_answers_of_weights_that_nobody_pushed_are_not_taken(double, client):
    script = Script(good)
    server = double(script)
    servers = client(server.url, patience_seconds=0.5)
    servers.expect("3")
    with pytest.raises(WrongVersion, match="weights of version 'default', wanted '3'"):
        generate(servers)
    assert len(server.sent("/generate")) == 1


def test_a_server_that_came_back_with_old_weights_gets_requests_when_it_has_the_new(double, client):
    script = Script(good, lambda body: good(body, "3", token=6))
    server = double(script)
    servers = client(server.url, patience_seconds=10.0)
    servers.expect("3")
    asked: list[str] = []

    def push(url: str) -> None:
        asked.append(url)
        if len(asked) == 2:  # the first time fails
            script.info = {**INFO, "weight_version": "3"}
        else:
            raise RunError("not yet")

    servers.on_stale = push
    (answer,) = generate(servers)
    assert (answer.ids, answer.spans) == ([6], [("3", 0, 1)])
    assert asked == [server.url] * 2


def test_a_server_that_is_said_to_fail_gets_nothing_until_it_has_the_new_weights(double, client):
    script = Script(lambda body: good(body, "2"))
    failed, other = double(script), double(Script(lambda body: good(body, "3", token=6)))
    servers = client(failed.url, other.url)
    servers.expect("3")
    script.info = {**INFO, "weight_version": "2"}
    servers.fail(failed.url, Unreachable(failed.url, "/x", "gone"))
    assert servers.down() == [failed.url]
    assert [answer.ids for answer in generate(servers, 4)] == [[6]] * 4
    assert failed.sent("/generate") == []
    script.info = {**INFO, "weight_version": "3"}
    until(lambda: servers.down() == [])


def test_versions_that_were_pushed_before_are_taken(double, client):
    server = double(Script(lambda body: good(body, "2")))
    servers = client(server.url)
    servers.expect("2")
    servers.expect("3")  # a request that ran while these arrived
    assert generate(servers)[0].spans == [("2", 0, 1)]


# -- control -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [((200, {"success": True}), {"success": True}), ((200, None), None), ((200, "Cache flushed."), "Cache flushed.")],
)
def test_a_post_returns_what_the_server_says(double, client, answer, expected):
    server = double(lambda method, path, body: answer)
    assert client(server.url).post(server.url + "/", "/pause_generation") == expected
    assert server.seen == [("POST", "/pause_generation", {})]


def test_a_post_that_fails_says_why(double, client):
    server = double(lambda method, path, body: (200, {"success": False, "message": "no such folder"}))
    servers = client(server.url)
    with pytest.raises(Refused, match="/update_weights_from_disk answered 400: no such folder"):
        servers.post(server.url, "/update_weights_from_disk", {"model_path": "x"})
    gone = f"http://127.0.0.1:{a_free_port()}"
    with pytest.raises(Unreachable, match=f"{gone}/x: no server can be reached"):
        servers.post(gone, "/x")
    gate = threading.Event()
    hung = double(lambda method, path, body: (gate.wait(5), (200, None))[1])
    with pytest.raises(Unreachable, match=r"no answer within 0\.1 s"):
        servers.get(hung.url, "/x", seconds=0.1)
    gate.set()


def test_the_key_goes_along_and_is_told_to_nobody(double, client, monkeypatch):
    monkeypatch.setenv("GYMTUNE_SGLANG_API_KEY", "s3cret")
    server = double(Script((401, {"error": "Unauthorized"})))
    servers = client(server.url)
    with pytest.raises(Refused) as caught:
        generate(servers)
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in f"{caught.value!r} {servers!r} {vars(servers)!r}"
    given = client(server.url, api_key="other")
    with pytest.raises(Refused):
        generate(given)
    assert server.headers[-1]["Authorization"] == "Bearer other"


@pytest.mark.parametrize("urls", [[], ["nonsense"], ["ftp://127.0.0.1"], ["http://"], ["http://a:1", "http://a:1/"]])
def test_addresses_that_are_none(urls):
    with pytest.raises(ConfigError, match="address"):
        Servers(urls)
