"""GAE by hand, against a slow sum, and what it must not see: masked tokens, segments, where turns lie."""

from random import Random

import pytest

from gymtune.agents.trajectory import Turn
from gymtune.tools.errors import EnvError, RunError
from gymtune.trainers.experience import Experience
from gymtune.trainers.gae import gae, token_rewards

FP64 = 1e-12  # two float64 ways to the same number


def looked_at(trajectory, values=(), **more):
    experience = Experience.of(trajectory, need_logprobs=True)
    experience.values = list(values)
    for name, value in more.items():
        setattr(experience, name, value)
    return experience


# --- the recursion --------------------------------------------------------------------------------------------------


def test_by_hand():
    """Three tokens of an episode that ended, rewards 0, 1, 2, values 0.5, 1, 1.5, gamma 0.5, lambda 0.5.

    d_2 = 2 + 0.5 * 0 - 1.5 = 0.5            A_2 = 0.5
    d_1 = 1 + 0.5 * 1.5 - 1 = 0.75           A_1 = 0.75 + 0.25 * 0.5 = 0.875
    d_0 = 0 + 0.5 * 1 - 0.5 = 0              A_0 = 0 + 0.25 * 0.875 = 0.21875
    """
    advantages, returns = gae([0.0, 1.0, 2.0], [0.5, 1.0, 1.5], 0.0, 0.5, 0.5)
    assert advantages == [0.21875, 0.875, 0.5]
    assert returns == [0.71875, 1.875, 2.0]


def test_a_cut_off_episode_goes_on_at_its_last_value():
    """As above with a value of 4 after the last token: d_2 grows by 0.5 * 4, A_1 by a quarter of that, A_0 again."""
    advantages, returns = gae([0.0, 1.0, 2.0], [0.5, 1.0, 1.5], 4.0, 0.5, 0.5)
    assert advantages == [0.34375, 1.375, 2.5]
    assert returns == [0.84375, 2.375, 4.0]


def slow(rewards, values, after, gamma, lam):
    """Every advantage as its own sum of discounted errors, every error from its own terms."""
    line = [*values, after]
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(t, len(rewards)):
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * line[k + 1] - line[k])
        advantages.append(total)
    return advantages


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_equals_the_slow_sum(count, gamma, lam):
    rng = Random(f"{count} {gamma} {lam}")
    rewards, values = ([rng.gauss(0, 1) for _ in range(count)] for _ in range(2))
    after = rng.gauss(0, 1)
    advantages, returns = gae(rewards, values, after, gamma, lam)
    assert advantages == pytest.approx(slow(rewards, values, after, gamma, lam), abs=FP64)
    assert returns == pytest.approx([a + v for a, v in zip(advantages, values, strict=True)], abs=FP64)


def test_lambda_one_is_what_came_less_what_was_expected():
    advantages, returns = gae([1.0, 2.0, 4.0], [0.3, 0.5, 0.7], 0.0, 1.0, 1.0)
    assert returns == pytest.approx([7.0, 6.0, 4.0], abs=FP64)
    assert advantages == pytest.approx([6.7, 5.5, 3.3], abs=FP64)


# --- rewards of tokens ----------------------------------------------------------------------------------------------


def three_turns(episode, between=(9, 9), rewards=(1.0, 2.0, 4.0), **fields):
    """Turns of 2, 1 and 3 tokens; what stands between them is not trained."""
    parts = [(0, [3, 4]), (1, [5, 6]), (0, list(between)), (1, [7]), (0, list(between)), (1, [8, 9, 0])]
    made = episode(*parts, **fields)
    for turn, reward in zip(made.turns, rewards, strict=True):
        turn.reward = reward
    return made


def test_a_turns_reward_sits_on_its_last_token(episode, config):
    experience = looked_at(three_turns(episode))
    assert experience.turns == [0, 0, 1, 2, 2, 2]
    assert token_rewards(experience, config("ppo")) == [0, 1, 2, 0, 0, 4]


def test_a_turn_without_tokens_pays_at_the_end(episode, config):
    made = three_turns(episode)
    made.turns.insert(1, Turn(start=4, end=4, text="", finish_reason="deadline", reward=8.0))
    assert token_rewards(looked_at(made), config("ppo")) == [0, 1, 2, 0, 0, 12]


def test_rewards_sum_to_the_episodes_own(episode, config):
    rewards = (0.1, 0.2, 0.3)  # whose sum is no round float
    experience = looked_at(three_turns(episode, rewards=rewards))
    assert token_rewards(experience, config("ppo")) == [0, 0.1, 0.2, 0, 0, 0.3]


def test_a_control_run_tells_nothing_by_turns(episode, config):
    experience = looked_at(three_turns(episode), reward=-3.0)
    assert token_rewards(experience, config("ppo", control="shuffle_rewards")) == [0, 0, 0, 0, 0, -3]


def test_a_long_turn_is_punished_where_it_ends(episode, config):
    """Turns of 2, 1 and 3 tokens of at most 3, with a buffer of 2: penalties 1/2, 0 and 1."""
    settings = config("ppo", max_completion_length=3, overlong_buffer=2)
    assert token_rewards(looked_at(three_turns(episode)), settings) == [0, 0.5, 2, 0, 0, 3]


def test_the_kl_is_taken_off_each_token(episode, config):
    experience = looked_at(three_turns(episode))
    experience.old_logprobs = [-1.0] * 6
    experience.ref_logprobs = [-1.5, -1.0, -1.0, -1.0, -0.5, -1.0]
    settings = config("ppo", beta=0.1, kl_in="reward", kl_estimator="k1")
    assert token_rewards(experience, settings) == pytest.approx([-0.05, 1, 2, 0, 0.05, 4], abs=FP64)
    in_loss = config("ppo", beta=0.1, kl_in="loss", kl_estimator="k1")
    assert token_rewards(experience, in_loss) == [0, 1, 2, 0, 0, 4]
    experience.ref_logprobs = []
    with pytest.raises(RunError, match=r"came 0; call Updater\.annotate"):
        token_rewards(experience, settings)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(episode, config, reward):
    experience = looked_at(three_turns(episode), reward=reward)
    with pytest.raises(EnvError, match=r"trajectory t0 has the reward (nan|inf): wanted a finite number"):
        token_rewards(experience, config("ppo"))


def test_no_token_no_reward(episode, config):
    assert token_rewards(looked_at(episode((0, [3, 4]))), config("ppo")) == []


# --- what it does not see -------------------------------------------------------------------------------------------


def credit(trajectory, settings):
    experience = looked_at(trajectory, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    return gae(token_rewards(experience, settings), experience.values, 0.0, settings.gamma, settings.lam)


def test_what_stands_in_masked_slots_changes_nothing(episode, config):
    settings = config("ppo", gamma=0.9)
    plain = credit(three_turns(episode), settings)
    assert credit(three_turns(episode, between=(20, 21, 22, 23, 24)), settings) == plain
    assert credit(three_turns(episode, between=()), settings) == plain
    assert credit(three_turns(episode, rewards=(1.0, 2.5, 4.0)), settings) != plain


def test_time_goes_on_across_segments(episode, config):
    settings = config("ppo", gamma=0.9)
    parts = [(0, [3, 4]), (1, [5, 6]), "segment", (0, [3, 5, 9]), (1, [7]), "segment", (0, [2]), (1, [8, 9, 0])]
    made = episode(*parts)
    for turn, reward in zip(made.turns, (1.0, 2.0, 4.0), strict=True):
        turn.reward = reward
    assert credit(made, settings) == credit(three_turns(episode), settings)
