"""PPO: losses by hand and by finite differences, whitening, invariances of the whole update, what ends it early."""

import math
from random import Random

import pytest
import torch

from gymtune.agents.models import CausalAttend
from gymtune.trainers.annotate import token_numbers
from gymtune.trainers.batch import make_rows
from gymtune.trainers.critic import Critic
from gymtune.trainers.experience import Experience, experiences_of
from gymtune.trainers.policy import policy_logprobs
from gymtune.trainers.ppo import PPO, value_token_loss
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

FP64 = 1e-10  # two float64 ways to the same number
STORED = 1e-6  # advantages, values and returns are kept in float32 in a batch
EXACT = 1e-12
MAX_TOKENS = 12


def close(left, right, tolerance=FP64):
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(left, right, strict=True))


def size(gradients):
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


# --- the value loss -------------------------------------------------------------------------------------------------


def test_value_losses_by_hand():
    """Old value 0, range 0.5, return 1: at 0.25 plain, at 0.75 the clipped 0.5 is further off, at -2 the plain -2."""
    values = torch.tensor([0.25, 0.75, -2.0, 0.75], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([1.0, 1.0, 1.0, 0.75], dtype=torch.float64)
    loss, clipped = value_token_loss(values, torch.zeros(4, dtype=torch.float64), returns, 0.5)
    assert loss.tolist() == [0.75**2 / 2, 0.5**2 / 2, 9 / 2, 0.25**2 / 2]
    assert clipped.tolist() == [False, True, False, True]
    loss.sum().backward()
    assert values.grad.tolist() == [-0.75, 0.0, -3.0, 0.0]


def test_value_losses_without_clipping_by_hand():
    values = torch.tensor([0.75, -2.0], dtype=torch.float64)
    loss, clipped = value_token_loss(values, torch.zeros(2), torch.ones(2), None)
    assert loss.tolist() == [0.25**2 / 2, 9 / 2]
    assert not clipped.any()


@pytest.mark.parametrize("cliprange", [0.3, None])
def test_the_gradient_of_the_value_loss_is_that_of_finite_differences(cliprange):
    generator = torch.Generator().manual_seed(0)
    old, returns, moved = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(3))
    values = (old + 0.6 * moved).requires_grad_(True)
    _, clipped = value_token_loss(values, old, returns, cliprange)
    assert bool(clipped.any()) == (cliprange is not None)
    assert torch.autograd.gradcheck(lambda v: value_token_loss(v, old, returns, cliprange)[0], values)


def test_the_value_loss_reaches_the_values_alone():
    values, old, returns = (torch.tensor([x], requires_grad=True) for x in (0.3, 0.1, 0.9))
    value_token_loss(values, old, returns, 0.5)[0].sum().backward()
    assert values.grad.item() != 0
    assert old.grad is None
    assert returns.grad is None


def test_half_precision_values_are_compared_in_float32():
    loss, _ = value_token_loss(torch.ones(1, dtype=torch.bfloat16), torch.zeros(1), torch.zeros(1), None)
    assert loss.dtype == torch.float32


# --- credit ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trajectories(episode):
    """Eight episodes of 5 tokens that predict: three turns, one that was cut off, one in two segments, a lone token."""
    made = [
        episode((0, [3]), (1, [5, 6]), (0, [9]), (1, [7, 0]), name="t0", group="g0", reward=1.0),
        episode((0, [3, 4]), (1, [7, 8, 11, 0]), name="t1", group="g1", reward=0.0),
        episode((0, [3, 4, 5]), (1, [7, 8, 0]), name="t2", group="g2", reward=2.0, truncated=True, terminated=False),
        episode((0, [3, 4, 5, 6]), (1, [7, 0]), name="t3", group="g3", reward=-1.0),
        episode((0, [3, 4, 5, 6, 7]), (1, [0]), name="t4", group="g4", reward=0.5),
        episode((0, [3]), (1, [12, 13, 14, 15, 0]), name="t5", group="g5", reward=0.5),
        episode((0, [2]), (1, [5, 6, 7]), (0, [9]), (1, [0]), name="t6", group="g6", reward=0.25),
        episode((0, [2, 6]), (1, [16, 17, 18, 0]), name="t7", group="g7", reward=1.5),
    ]
    made[0].turns[0].reward = 0.5
    return made


def valued(trajectories, seed=0):
    rng = Random(seed)
    experiences = experiences_of(trajectories, need_logprobs=True)
    for experience in experiences:
        experience.values = [rng.gauss(0, 1) for _ in experience.places]
        experience.returns = []
    return experiences


def test_advantages_of_an_episode_by_hand(episode, config):
    """Two turns of two tokens that earn 1 and 2, all values 0.5, gamma 1, lambda 0.5; cut off, with 0.5 to come.

    d = 0, 1, 0, 2; A_3 = 2, A_2 = 0 + 1, A_1 = 1 + 0.5, A_0 = 0 + 0.75
    """
    one = episode((0, [3]), (1, [5, 6]), (0, [9]), (1, [7, 8]), reward=2.0, truncated=True, terminated=False)
    one.turns[0].reward = 1.0
    experience = Experience.of(one, need_logprobs=True)
    experience.values, experience.value_after = [0.5] * 4, 0.5
    PPO(config("ppo", lam=0.5, whiten_advantages=False)).credit([experience])
    assert experience.advantages == [0.75, 1.5, 1.0, 2.0]
    assert experience.returns == [1.25, 2.0, 1.5, 2.5]


def test_whitened_advantages_are_centred_with_deviation_one(trajectories, config):
    experiences, plain = valued(trajectories), valued(trajectories)
    PPO(config("ppo")).credit(experiences)
    PPO(config("ppo", whiten_advantages=False)).credit(plain)
    found = [a for e in experiences for a in e.advantages]
    mean = math.fsum(found) / len(found)
    assert mean == pytest.approx(0, abs=EXACT)
    deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in found) / (len(found) - 1))
    assert deviation == pytest.approx(1, abs=1e-3)
    order = sorted(range(len(found)), key=found.__getitem__)
    raw = [a for e in plain for a in e.advantages]
    assert order == sorted(range(len(raw)), key=raw.__getitem__)
    assert [e.returns for e in experiences] == [e.returns for e in plain]  # the critic's aim is not whitened


def test_equal_advantages_are_whitened_to_nothing(episode, config):
    same = [episode((0, [3]), (1, [5]), name=f"t{i}", reward=0.1 + 0.2) for i in range(3)]
    experiences = valued(same)
    for experience in experiences:
        experience.values = [0.1]
    PPO(config("ppo")).credit(experiences)
    assert [e.advantages for e in experiences] == [[0.0]] * 3


def test_who_is_not_in_the_loss_is_not_whitened_with(trajectories, config):
    broken, cut = trajectories[1], trajectories[2]
    broken.rewards = {"gt": None}
    settings = config("ppo", mask_truncated_completions=True)
    with_them, without = valued(trajectories), valued(trajectories)
    PPO(settings).credit(with_them)
    rest = [e for e in without if e.trajectory not in (broken, cut)]
    PPO(settings).credit(rest)
    assert with_them[1].advantages == [0.0] * len(with_them[1].places)
    assert with_them[1].returns == with_them[1].values
    assert [e.advantages for e in with_them if e.trajectory not in (broken, cut)] == [e.advantages for e in rest]


def test_the_order_of_episodes_changes_no_bit_of_credit(trajectories, config):
    plain, shuffled = valued(trajectories), valued(trajectories)
    PPO(config("ppo")).credit(plain)
    PPO(config("ppo")).credit(Random(1).sample(shuffled, len(shuffled)))
    assert [e.advantages for e in plain] == [e.advantages for e in shuffled]


# --- the whole update -----------------------------------------------------------------------------------------------


@pytest.fixture
def made(decoder, config):
    """Make an updater with a critic whose head is not 0 any more; separate critics are another model."""

    def make(backbone="separate", **changes):
        settings = config("ppo", critic_backbone=backbone, max_grad_norm=1e9, **changes)
        policy = decoder()
        critic = Critic(policy, decoder(seed=5) if backbone == "separate" else None)
        with torch.no_grad():
            critic.head.weight.copy_(torch.linspace(-0.2, 0.3, 16))
        reference = decoder(seed=1).requires_grad_(False) if settings.beta > 0 else None
        return Updater(policy, PPO(settings), settings, reference, MAX_TOKENS, critic)

    return make


def credited(updater, trajectories, spread=0.6):
    """Look at episodes whose old log-probs are the policy's own, moved by up to `spread`."""
    experiences = experiences_of(trajectories, need_logprobs=True)
    exact = token_numbers(experiences, lambda b: policy_logprobs(updater.model, b)[0], 1000, updater.device)
    for experience, logprobs in zip(experiences, exact, strict=True):
        rng = Random(experience.trajectory.trajectory_id)
        experience.old_logprobs = [value + spread * rng.choice([-1, -0.2, 0.2, 1]) for value in logprobs]
    updater.annotate(experiences)
    updater.algorithm.credit(experiences)
    return experiences


def rows_of(updater, trajectories):
    experiences = credited(updater, trajectories)
    for experience in experiences:  # a step of the critic ago: some values are clipped, some are not
        experience.values = [value - (-1) ** i * 0.15 * (i + 1) for i, value in enumerate(experience.values)]
    return make_rows(experiences)


def gradient(updater, rows):
    """Return the stats and gradients of one optimizer batch, and leave the weights as they are."""
    stats = UpdateStats()
    updater.update([rows], 0, stats, dry=True)
    return stats, [updater.named[name].grad.clone() for name in sorted(updater.named)]


def slow_loss(updater, trajectories, rows):
    """Return policy and value loss of a batch, token by token, from one forward pass for each token."""
    config, policy, value, count = updater.config, 0.0, 0.0, 0
    for row in rows:
        for i, place in enumerate(row.places):
            ids, positions = torch.tensor([row.tokens[:place]]), torch.arange(place)[None]
            hidden = updater.model(ids, positions, CausalAttend())[0, -1]
            logprob = updater.model.logits(hidden).log_softmax(-1)[row.tokens[place]]
            if updater.critic.backbone is not None:
                hidden = updater.critic.backbone(ids, positions, CausalAttend())[0, -1]
            said = (updater.critic.head.weight[0] * hidden).sum()
            ratio = (logprob - row.old_logprobs[i]).exp()
            bounded = ratio.clamp(1 - config.epsilon, 1 + config.epsilon)
            policy = policy - min(ratio * row.advantages[i], bounded * row.advantages[i])
            near = row.values[i] + (said - row.values[i]).clamp(-config.cliprange_value, config.cliprange_value)
            value = value + max((said - row.returns[i]) ** 2, (near - row.returns[i]) ** 2) / 2
            count += 1
    return policy / count, value / count


@pytest.mark.parametrize("backbone", ["separate", "shared"])
def test_a_whole_step_equals_the_formulas(made, trajectories, backbone):
    updater = made(backbone, vf_coef=0.3, micro_batch_tokens=12)
    rows = rows_of(updater, trajectories)
    stats, fast = gradient(updater, rows)
    policy, value = slow_loss(updater, trajectories, rows)
    slow = torch.autograd.grad(policy + 0.3 * value, [updater.named[name] for name in sorted(updater.named)])
    assert stats.policy_loss == pytest.approx(policy.item(), abs=STORED)
    assert stats.value_loss == pytest.approx(value.item(), abs=STORED)
    assert stats.loss == pytest.approx(policy.item() + 0.3 * value.item(), abs=STORED)
    assert close(fast, slow, STORED)
    assert 0 < stats.value_clipped < stats.tokens
    names = sorted(updater.named)
    for part in (True, False):
        assert size(g for name, g in zip(names, slow, strict=True) if name.startswith("critic.") == part) > 0.01


@pytest.mark.parametrize("backbone", ["separate", "shared"])
@pytest.mark.parametrize("averaging", ["token_mean", "sequence_mean", "constant"])
def test_every_split_into_micro_batches_gives_one_gradient(made, trajectories, backbone, averaging):
    results = []
    for limit in (1000, 20, 10, 1):
        updater = made(backbone, averaging=averaging, micro_batch_tokens=limit)
        results.append(gradient(updater, rows_of(updater, trajectories)))
    (first, gradients), *others = results
    for stats, other in others:
        assert stats.loss == pytest.approx(first.loss, abs=STORED)
        assert close(gradients, other, STORED)
    assert size(gradients) > 0.01


def test_the_order_of_episodes_changes_nothing(made, trajectories):
    updater = made()
    rows = rows_of(updater, trajectories)
    _, plain = gradient(updater, rows)
    _, other = gradient(updater, Random(2).sample(rows, len(rows)))
    assert close(plain, other)


def test_what_is_said_after_the_last_token_changes_nothing(made, episode):
    """The env's last words are masked, and nothing that trains comes after them."""

    def found(tail):
        updater = made()
        one = episode((0, [3, 4]), (1, [5, 6]), (0, tail), reward=1.0)
        return gradient(updater, rows_of(updater, [one]))[1]

    plain, noisy = found([7, 8, 9]), found([20, 21, 22])
    assert all(torch.equal(a, b) for a, b in zip(plain, noisy, strict=True))


@pytest.mark.parametrize("backbone", ["separate", "shared"])
def test_no_trainable_token_is_a_step_of_gradient_zero(made, backbone):
    stats, gradients = gradient(made(backbone), [])
    assert (stats.loss, stats.grad_norm, stats.value_grad_norm, stats.tokens) == (0.0, 0.0, 0.0, 0)
    assert size(gradients) == 0


def test_a_shared_critic_reaches_the_policy_and_a_separate_one_does_not(made, trajectories):
    """Without advantages the policy's loss has no gradient; what is left is the critic's."""
    moved = {}
    for backbone in ("shared", "separate"):
        updater = made(backbone, vf_coef=0.5)
        experiences = credited(updater, trajectories)
        for experience in experiences:
            experience.give(0.0)
        gradient(updater, make_rows(experiences))
        moved[backbone] = size(parameter.grad for parameter in updater.parameters)
        assert size(parameter.grad for parameter in updater.critic_parameters) > 0.01
    assert moved["shared"] > 0.01
    assert moved["separate"] == 0.0


def test_norms_of_policy_and_critic_are_clipped_apart(decoder, config, trajectories):
    settings = config("ppo", max_grad_norm=0.01, vf_coef=50.0)
    policy = decoder()
    critic = Critic(policy, decoder(seed=5))
    updater = Updater(policy, PPO(settings), settings, None, MAX_TOKENS, critic)
    stats, _ = gradient(updater, rows_of(updater, trajectories))
    assert stats.grad_norm > 0.02
    assert stats.value_grad_norm > 0.02
    assert size(p.grad for p in updater.parameters) == pytest.approx(0.01, rel=1e-3)
    assert size(p.grad for p in updater.critic_parameters) == pytest.approx(0.01, rel=1e-3)


# --- learning rates, warm-up, the end of a step ---------------------------------------------------------------------


def test_the_critic_has_a_learning_rate_of_its_own(made):
    updater = made(learning_rate=0.1, critic_learning_rate=0.4, warmup_steps=2, max_steps=4)
    updater.update([[]], 0, UpdateStats())
    own = {id(p) for p in updater.critic_parameters}
    rates = {id(p) in own: group["lr"] for group in updater.optimizer.param_groups for p in group["params"]}
    assert rates == {True: pytest.approx(0.2), False: pytest.approx(0.05)}
    updater = made(learning_rate=0.1)
    assert {group["lr"] for group in updater.optimizer.param_groups} == {0.1}


@pytest.mark.parametrize("backbone", ["separate", "shared"])
def test_first_steps_train_the_critic_alone(made, trajectories, backbone):
    updater = made(backbone, critic_warmup_steps=2, weight_decay=0.1, learning_rate=0.01, entropy_coef=0.1)
    rows = rows_of(updater, trajectories)
    before = {name: p.detach().clone() for name, p in updater.named.items()}
    for step in range(2):
        stats = UpdateStats()
        updater.update([rows], step, stats)
        assert set(updater.optimizer.state) == set(updater.critic_parameters)
        assert stats.loss == pytest.approx(0.5 * stats.value_loss, abs=FP64)
        assert abs(stats.policy_loss) > 0.01  # measured, and not in the loss
    for name, parameter in updater.named.items():
        assert torch.equal(parameter, before[name]) == (not name.startswith("critic."))
    assert updater.moved(2).keys() == {name for name in updater.named if name.startswith("critic.")}
    updater.update([rows], 2, UpdateStats())
    assert not any(torch.equal(p, before[name]) for name, p in updater.named.items())
    assert updater.moved(3) == updater.named


def test_a_step_ends_when_the_policy_has_moved_too_far(made, trajectories):
    def passes(limit):
        updater, stats = made(early_stop_kl=limit, learning_rate=5e-4), UpdateStats()
        rows = make_rows(credited(updater, trajectories, spread=0.0))
        on = [updater.update([rows[:4], rows[4:]], 0, stats) for _ in range(4) if stats.steps % 2 == 0]
        return on, stats

    on, stats = passes(None)
    assert on == [True] * 4
    assert (stats.metrics()["ppo/passes"], stats.steps) == (4.0, 8)
    on, stats = passes(1e-6)
    assert on == [False]
    assert (stats.metrics()["ppo/passes"], stats.steps) == (0.5, 1)  # the first optimizer step is always made
    updater, stats = made(early_stop_kl=1e-6), UpdateStats()
    far = make_rows(credited(updater, trajectories))  # beyond the bound before anything has moved
    assert not updater.update([far[:4], far[4:]], 0, stats)
    assert stats.steps == 1
    on, stats = passes(0.05)
    assert 0.5 < stats.metrics()["ppo/passes"] < 4


# --- what is measured -----------------------------------------------------------------------------------------------


def test_explained_variance_and_kl_by_hand(episode):
    """Returns 1, 3, 5, 7 (variance 5) and values 1, 3, 5, 5: what is left, 0, 0, 0, 2, has variance 0.75."""
    one, two = (Experience.of(episode((0, [3]), (1, [5, 6]), reward=1.0), need_logprobs=True) for _ in range(2))
    one.returns, one.values, two.returns, two.values = [1.0, 3.0], [1.0, 3.0], [5.0, 7.0], [5.0, 5.0]
    one.old_logprobs, one.ref_logprobs = [-1.0, -2.0], [-1.5, -1.75]
    two.old_logprobs, two.ref_logprobs = [-1.0, -1.0], [-1.0, -3.0]
    stats = UpdateStats()
    stats.note_credit([one, two], "none")
    assert stats.metrics()["val/explained_variance"] == pytest.approx(1 - 0.75 / 5)
    assert stats.metrics()["objective/kl"] == pytest.approx((0.25 + 2.0) / 2)


def test_the_variance_of_equal_returns_explains_nothing(episode):
    one = Experience.of(episode((0, [3]), (1, [5, 6]), reward=1.0), need_logprobs=True)
    one.returns, one.values = [1.0, 1.0], [0.0, 2.0]
    stats = UpdateStats()
    stats.note_credit([one], "none")
    assert "val/explained_variance" not in stats.metrics()


def test_kl_and_quantiles_of_an_optimizer_step_by_hand(made, trajectories):
    """The sampler's log-probs are the policy's own, less ln 2 on every other token: log-ratios 0 and ln 2."""
    updater = made(debug_log_ratio=True)
    (experience,) = credited(updater, trajectories[:1], spread=0.0)
    experience.old_logprobs = [value - (i % 2) * math.log(2) for i, value in enumerate(experience.old_logprobs)]
    stats = UpdateStats()
    updater.update([make_rows([experience])], 0, stats, dry=True)
    metrics = stats.metrics()
    assert metrics["policy/approxkl_avg"] == pytest.approx((2 - 1 - math.log(2)) / 2, abs=STORED)
    assert metrics["debug/log_ratio/0/min"] == pytest.approx(0, abs=STORED)
    assert metrics["debug/log_ratio/0/median"] == pytest.approx(math.log(2) / 2, abs=STORED)
    assert metrics["debug/log_ratio/0/max"] == pytest.approx(math.log(2), abs=STORED)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.5, abs=STORED)
    assert not any(name.startswith("debug/") for name in gradient(made(), make_rows([experience]))[0].metrics())
