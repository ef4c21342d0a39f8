"""The dialog env: a scripted user, and one of your own."""

import pytest

from gymtune.agents import ScriptedAgent, rollout
from gymtune.envs import make_env
from gymtune.envs.dialog import BookingUser, DialogEnv, held_out
from gymtune.rewards import Episode


def test_the_user_answers_one_question_at_a_time() -> None:
    env = make_env("gymtune/Dialog-v0")
    env.reset(options={"task_index": 0})
    assert env.task is not None
    wishes = env.task.metadata
    said = []
    for text in ("Which day?", "What time?", "And how many people?", "Day and time?", "Hello."):
        (reply,), reward, terminated, truncated, info = env.step(text)
        said.append(reply["content"])
        assert (reply["role"], reward, terminated, truncated, info["success"]) == ("user", 0.0, False, False, None)
    assert said[:3] == [wishes["day"], wishes["time"], str(wishes["people"])]
    assert said[3:] == ["Pardon? One question at a time."] * 2
    _, reward, terminated, _, info = env.step(f"Booked: {said[0]}, {said[1]}, {said[2]} people.")
    assert (reward, terminated, info["success"], info["stop_reason"]) == (1.0, True, True, "stop")


def test_a_wrong_booking_earns_nothing() -> None:
    env = make_env("gymtune/Dialog-v0")
    env.reset(options={"task_index": 0})
    *_, reward, terminated, _, info = env.step("Booked: Monday, 3:00, 99 people.")
    assert (reward, terminated, info["success"]) == (0.0, True, False)


def test_talking_on_ends_at_max_turns_unscored() -> None:
    env = make_env("gymtune/Dialog-v0", max_turns=2, rewards={"gt": 1.0, "unfinished": 0.5})
    env.reset(options={"task_index": 0})
    env.step("Hello?")
    _, reward, terminated, truncated, info = env.step("Hello?")
    assert (reward, terminated, truncated) == (-0.5, False, True)
    assert (info["success"], info["stop_reason"]) == (None, "max_turns")


def test_bookings_are_disjoint_and_the_script_knows_them() -> None:
    for split in ("train", "test"):
        env = make_env("gymtune/Dialog-v0", split=split)
        for index in range(200):
            wishes = env.tasks[index].metadata
            assert held_out(**wishes) == (split == "test")
    trajectories = rollout("gymtune/Dialog-v0", ScriptedAgent(), 5)
    assert [t.reward for t in trajectories] == [1.0] * 5
    roles = [m["role"] for m in trajectories[0].messages]
    assert roles == ["system", "user", *["assistant", "user"] * 3, "assistant"]
    assert trajectories[0].opening == 2


def test_a_user_of_your_own_plugs_in() -> None:
    class Impatient:
        def reply(self, episode: Episode) -> str | None:
            return "Hurry!" if episode.turn < 2 else None

    env = DialogEnv(user=Impatient())
    env.reset(options={"task_index": 0})
    replies, *_ = env.step("Which day?")
    assert [m["content"] for m in replies] == ["Hurry!"]
    *_, terminated, _, _ = env.step("Which day?")
    assert terminated


@pytest.mark.parametrize("text", ["", "Tuesday", "day time people"])
def test_what_is_no_question_gets_no_answer(text: str) -> None:
    episode = Episode("", [], {"day": "Monday", "time": "18:00", "people": 2}, answer=text)
    assert BookingUser().reply(episode) == "Pardon? One question at a time."
