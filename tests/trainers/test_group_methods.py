"""Credit and loss of the group methods, from episodes to the numbers that a token gets."""

import math
import statistics

import pytest
import torch

from gymtune.agents.models import CausalAttend
from gymtune.trainers.algorithm import TokenBatch
from gymtune.trainers.batch import make_rows
from gymtune.trainers.experience import Experience
from gymtune.trainers.presets import PRESETS
from gymtune.trainers.registry import ALGORITHMS
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

FP64 = 1e-12  # two float64 ways to the same number
FP32 = 1e-6  # advantages are kept in float32
EPS = 1e-4  # added to deviations
GROUPED = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
METHODS = [*GROUPED, "reinforce++"]
#: The last by its advantage, in groups of rewards 0, 3, 3: the deviation is sqrt 3.
OF_GROUP = {"dr_grpo": 1.0, "rloo": 1.5}


@pytest.fixture
def credit(config):
    """Give episodes their advantages as `algo` does, and return those of their tokens."""

    def make(algo, trajectories, prepare=lambda experiences: None, **changes):
        # without a KL unless it is asked for: the reference's log-probs are not there
        settings = config(algo, **({"beta": 0.0} | changes))
        experiences = [Experience.of(trajectory, need_logprobs=True) for trajectory in trajectories]
        prepare(experiences)
        ALGORITHMS[algo](settings).credit(experiences)
        assert all(len(experience.advantages) == len(experience.places) for experience in experiences)
        return [experience.advantages for experience in experiences]

    return make


def paid(episode, *rewards, group="g0", tokens=2):
    """Return one turn an episode, all of one group."""
    return [
        episode((0, [3]), (1, [5] * tokens), name=f"{group}{i}", group=group, reward=reward)
        for i, reward in enumerate(rewards)
    ]


def turns(episode, *rewards, name="t", group="g0"):
    """Return an episode with a turn for each reward, the first of two tokens and the others of one."""
    parts = [part for i in range(len(rewards)) for part in ((0, [3]), (1, [5] * (1 if i else 2)))]
    trajectory = episode(*parts, name=name, group=group)
    for turn, reward in zip(trajectory.turns, rewards, strict=True):
        turn.reward = reward
    return trajectory


def fail(trajectory):
    trajectory.error = "the server went away"
    return trajectory


# --- credit -----------------------------------------------------------------------------------------------------------


def test_every_preset_has_its_class():
    assert ALGORITHMS.keys() == PRESETS.keys()


@pytest.mark.parametrize("algo", GROUPED)
def test_advantages_of_a_group_by_hand(episode, credit, algo):
    low, *high = credit(algo, paid(episode, 0.0, 3.0, 3.0))
    wanted = OF_GROUP.get(algo, 1 / (math.sqrt(3) + EPS))
    assert high == [pytest.approx([wanted, wanted], rel=FP32)] * 2
    assert low == pytest.approx([-2 * wanted] * 2, rel=FP32)


@pytest.mark.parametrize("algo", METHODS)
@pytest.mark.parametrize("changes", [{}, {"credit": "turn", "importance_sampling_level": "token"}])
def test_equal_rewards_give_exactly_zero(episode, credit, algo, changes):
    if algo == "gspo":
        changes = {key: value for key, value in changes.items() if key == "credit"}
    if algo == "cispo":
        changes = {key: value for key, value in changes.items() if key != "importance_sampling_level"}
    value = 0.1 + 0.2
    advantages = credit(algo, [turns(episode, 0.0, value, name=str(i)) for i in range(7)], **changes)
    assert advantages == [[0.0] * 3] * 7


@pytest.mark.parametrize("algo", METHODS)
def test_an_episode_without_a_reward_is_no_baseline(episode, credit, algo):
    whole = paid(episode, 0.0, 1.0)
    failed = fail(episode((0, [3]), (1, [5, 6, 7]), name="failed", reward=100.0))
    assert credit(algo, [*whole, failed]) == [*credit(algo, whole), [0.0] * 3]


def test_a_group_that_lost_too_many_teaches_nothing(episode, credit):
    small = [*paid(episode, 0.0, 1.0), *(fail(t) for t in paid(episode, 0.0, 0.0))]
    large = paid(episode, 0.0, 1.0, 1.0, group="g1")
    advantages = credit("grpo", [*small, *large], min_group_size=3)
    assert advantages[:4] == [[0.0, 0.0]] * 4
    assert all(value != 0 for values in advantages[4:] for value in values)


def test_the_kl_is_in_the_baseline(episode, credit):
    """Equal rewards, unequal KL: the sample that stayed nearer to the reference is the better one."""

    def leave(experiences):
        for experience, gap in zip(experiences, (0.5, 1.0), strict=True):
            experience.ref_logprobs = [old - gap for old in experience.old_logprobs]

    # returns 1 - 0.1 x 2 tokens x gap: 0.9 and 0.8; leave one out
    advantages = credit("rloo", paid(episode, 1.0, 1.0), leave, beta=0.1)
    assert advantages == [pytest.approx([0.1] * 2, rel=FP32), pytest.approx([-0.1] * 2, rel=FP32)]


@pytest.mark.parametrize("algo", METHODS)
def test_a_turn_that_nearly_did_not_end_loses_by_its_length(episode, credit, algo):
    short, long = (paid(episode, 1.0, tokens=n)[0] for n in (2, 4))
    lengths = {"overlong_buffer": 2, "max_completion_length": 4}
    (better, *_), (worse, *_) = credit(algo, [short, long], **lengths)
    assert better > 0 > worse
    assert credit(algo, [short, long]) == [[0.0] * 2, [0.0] * 4]


def test_turns_are_compared_with_the_same_turn_of_the_others(episode, credit):
    # to come: 3 2 | 1 1 | 5 (the second sample's turns earn 0 and 1; the third has no second turn)
    group = [turns(episode, 1.0, 2.0), turns(episode, 0.0, 1.0), turns(episode, 5.0)]
    advantages = credit("dr_grpo", group, credit="turn")
    assert advantages == [[0.0, 0.0, 0.5], [-2.0, -2.0, -0.5], [2.0, 2.0]]
    # by episode the rewards 3, 1, 5 are compared
    assert credit("dr_grpo", group) == [[0.0] * 3, [-2.0] * 3, [2.0] * 2]


def test_turns_are_scaled_by_the_deviation_of_their_turn(episode, credit):
    group = [turns(episode, 0.0, 2.0), turns(episode, 0.0, 8.0), turns(episode, -6.0, 8.0)]
    others = [turns(episode, 1.0, 1.0, group="g1"), turns(episode, 0.0, 1.0, group="g1")]
    for scale in ("group", "batch"):
        advantages = credit("grpo", [*group, *others], credit="turn", scale_rewards=scale)
        first, second = [2.0, 8.0, 2.0], [2.0, 8.0, 8.0]
        spreads = [first, second] if scale == "group" else [[*first, 2.0, 1.0], [*second, 1.0, 1.0]]
        for index in range(3):
            wanted = [
                (values[index] - statistics.mean(values)) / (statistics.stdev(spread) + EPS)
                for values, spread in zip((first, second), spreads, strict=True)
            ]
            assert advantages[index] == pytest.approx([wanted[0], wanted[0], wanted[1]], rel=FP32)
        assert advantages[3][2] == advantages[4][2] == 0.0  # equal in the second turn


def test_a_lone_turn_and_a_failed_episode_teach_nothing_by_turns(episode, credit):
    failed = fail(turns(episode, 0.0, 7.0, 7.0))  # it has more turns than any other
    silent = fail(episode((0, [3])))
    alone = turns(episode, 1.0, 2.0)
    advantages = credit("grpo", [alone, turns(episode, 0.0), failed, silent], credit="turn")
    assert advantages[0][2] == 0.0  # nobody else has a second turn
    assert advantages[0][0] > 0 > advantages[1][0]
    assert advantages[2:] == [[0.0] * 4, []]


@pytest.mark.parametrize("algo", GROUPED)
def test_with_one_turn_both_credits_are_one(episode, credit, algo):
    level = {} if algo in {"gspo", "cispo"} else {"importance_sampling_level": "token"}
    group = paid(episode, 0.0, 0.25, 1.0)
    assert credit(algo, group, credit="turn", **level) == credit(algo, group, **level)


# --- REINFORCE++ ------------------------------------------------------------------------------------------------------


def test_reinforce_plus_plus_by_hand(episode, credit):
    """Two tasks of one sample each: 2 tokens that earn 1, 1 token that earns 0, with a KL of 1 a token."""

    def leave(experiences):
        for experience in experiences:
            experience.ref_logprobs = [old - 1.0 for old in experience.old_logprobs]

    tasks = [*paid(episode, 1.0, group="a"), *paid(episode, 0.0, group="b", tokens=1)]
    advantages = credit("reinforce++", tasks, leave, beta=0.25, num_generations=1)
    # returns 1 - 0.5, 1 - 0.25 and 0 - 0.25: mean 1/3, deviations 1/6, 5/12, -7/12, variance (4 + 25 + 49) / 144 / 2
    deviation = math.sqrt(78 / 288) + EPS
    assert advantages[0] == pytest.approx([1 / 6 / deviation, 5 / 12 / deviation], rel=FP64)
    assert advantages[1] == pytest.approx([-7 / 12 / deviation], rel=FP64)


def test_reinforce_plus_plus_is_centred_over_the_tokens_in_the_loss(episode, credit):
    long = episode((0, [3]), (1, [5] * 9), name="cut", reward=5.0, truncated=True, terminated=False)
    tasks = [*paid(episode, 0.0, 1.0, 3.0), long]
    values = [value for values in credit("reinforce++", tasks) for value in values]
    assert statistics.fmean(values) == pytest.approx(0.0, abs=FP64)
    assert statistics.stdev(values) == pytest.approx(1.0, rel=1e-3)
    masked = credit("reinforce++", tasks, mask_truncated_completions=True)
    assert masked == [*credit("reinforce++", tasks[:3]), [0.0] * 9]


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens():
    """Two sequences of three and two tokens that have moved, one advantage each."""
    old = torch.tensor([-1.0, -0.5, -2.0, -0.7, -0.2], dtype=torch.float64)
    change = torch.tensor([0.3, -0.4, 0.25, -0.5, -0.3], dtype=torch.float64)
    advantages = torch.tensor([1.5, 1.5, 1.5, -2.0, -2.0], dtype=torch.float64)
    row = torch.tensor([0, 0, 0, 1, 1])
    return TokenBatch((old + change).requires_grad_(), old, advantages, row, row, row, torch.full_like(old, math.nan))


def slow_loss(algo, settings, tokens):
    """Return the loss of each token, from the formulas of the papers, one number at a time."""
    low = settings.epsilon
    high = low if settings.epsilon_high is None else settings.epsilon_high
    losses = []
    for t, advantage in enumerate(tokens.advantages.tolist()):
        same = [i for i, row in enumerate(tokens.row.tolist()) if row == tokens.row[t]]
        moved = {i: tokens.logprobs[i] - tokens.old_logprobs[i] for i in same}
        if algo == "cispo":
            losses.append(-min(math.exp(moved[t].item()), high) * advantage * tokens.logprobs[t])
            continue
        if algo == "gspo":  # eq. 5 to 7
            ratio = (sum(moved.values()) / len(same)).exp()
        elif algo == "rloo":
            ratio = sum(moved.values()).exp()
        else:
            ratio = moved[t].exp()
        clipped = ratio.clamp(1 - low, 1 + high)
        losses.append(-torch.minimum(ratio * advantage, clipped * advantage))
    return torch.stack(losses)


@pytest.mark.parametrize("algo", METHODS)
@pytest.mark.parametrize("wide", [False, True])
def test_loss_and_gradient_equal_the_formulas(config, tokens, algo, wide):
    """`wide`: nothing is clipped. Summed, for GSPO's gradient is shared out among the tokens of a sequence."""
    changes = {"epsilon_high": 9.0} if wide else {}
    settings = config(algo, **(changes if algo == "cispo" else changes | ({"epsilon": 0.9} if wide else {})))
    out = ALGORITHMS[algo](settings).loss(tokens)
    wanted = slow_loss(algo, settings, tokens)
    torch.testing.assert_close(out.loss, wanted, rtol=FP64, atol=FP64)
    found, expected = (torch.autograd.grad(loss.sum(), tokens.logprobs)[0] for loss in (out.loss, wanted))
    torch.testing.assert_close(found, expected, rtol=FP64, atol=FP64)
    assert bool((out.clip_low | out.clip_high).any()) == (not wide and algo != "cispo")


def test_grpo_on_sequences_is_gspo(config, tokens):
    bounds = {"epsilon": 0.05, "epsilon_high": 0.1}
    grpo = config("grpo", importance_sampling_level="sequence", **bounds)
    gspo = config("gspo", **bounds)
    losses = [ALGORITHMS[settings.algo](settings).loss(tokens).loss for settings in (grpo, gspo)]
    assert torch.equal(*losses)
    token = config("grpo", **bounds)
    assert not torch.equal(losses[0], ALGORITHMS["grpo"](token).loss(tokens).loss)


def test_the_higher_bound_lets_unlikely_tokens_rise(config):
    """DAPO's clip-higher: between 1.2 and 1.28 a token that was good still gets its gradient."""
    old = torch.zeros(1, dtype=torch.float64)
    new = torch.tensor([math.log(1.25)], dtype=torch.float64, requires_grad=True)
    row = torch.zeros(1, dtype=torch.int64)
    tokens = TokenBatch(new, old, torch.ones(1, dtype=torch.float64), row, row, row, torch.full_like(old, math.nan))
    for algo, gradient in (("dapo", -1.25), ("dr_grpo", 0.0)):
        loss = ALGORITHMS[algo](config(algo)).loss(tokens).loss
        assert torch.autograd.grad(loss.sum(), new)[0].item() == pytest.approx(gradient, rel=FP64)


# --- entropy bonus ----------------------------------------------------------------------------------------------------

DECODER = 1e-10  # two float64 ways through a decoder


def slow_entropies(model, trajectory):
    """Return the entropy before each trainable token: one forward a token, all logits."""
    found = []
    for place in (t for t, trained in enumerate(trajectory.response_mask) if trained):
        hidden = model(torch.tensor([trajectory.tokens[:place]]), torch.arange(place)[None], CausalAttend())
        logs = model.logits(hidden[0, -1]).log_softmax(-1)
        found.append(-(logs.exp() * logs).sum())
    return found


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_an_entropy_bonus_by_the_gradient_of_the_update(decoder, config, episode, reward):
    """Taken off the loss of each token and averaged like it, also where the group teaches nothing (reward 0)."""
    group = [
        episode((0, [3, 4]), (1, [7, 8, 0]), name="a", reward=reward),
        episode((0, [3, 4]), (1, [9]), name="b"),
    ]
    grads = []
    for coef in (0.0, 0.3):
        settings = config("grpo", averaging="token_mean", entropy_coef=coef, max_grad_norm=1e9)
        updater = Updater(decoder(), ALGORITHMS["grpo"](settings), settings)
        experiences = [Experience.of(trajectory, need_logprobs=True) for trajectory in group]
        updater.algorithm.credit(experiences)
        updater.optimizer.step = lambda: None
        updater.update([make_rows(experiences)], 0, UpdateStats())
        grads.append([parameter.grad for parameter in updater.model.parameters()])
    model = decoder()
    entropies = [entropy for trajectory in group for entropy in slow_entropies(model, trajectory)]
    bonus = torch.autograd.grad(-0.3 * sum(entropies) / len(entropies), list(model.parameters()))
    for plain, found, wanted in zip(*grads, bonus, strict=True):
        torch.testing.assert_close(found - plain, wanted, rtol=0, atol=DECODER)
    assert max(float(wanted.abs().max()) for wanted in bonus) > 1e-3
