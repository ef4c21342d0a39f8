"""The update against a slow one: gradients of a whole step, every split of it, schedule, clipping, the KL term."""

import math
from itertools import pairwise
from random import Random

import pytest
import torch

from gymtune.agents import Sampling
from gymtune.agents.models import CausalAttend, Decoder, ModelConfig
from gymtune.tools.errors import ConfigError
from gymtune.trainers import batch as batch_module
from gymtune.trainers import update as update_module
from gymtune.trainers.batch import make_rows
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.registry import ALGORITHMS
from gymtune.trainers.update import NonFiniteError, Updater
from gymtune.trainers.update_stats import UpdateStats

FP64 = 1e-10  # two float64 ways to the same number
STORED = 1e-6  # advantages and the sampler's log-probs are kept in float32
AVERAGINGS = ["token_mean", "sequence_mean", "constant"]
MAX_TOKENS = 12


def updater_of(model, config, reference=None):
    return Updater(model, ALGORITHMS[config.algo](config), config, reference, MAX_TOKENS)


def gradient(updater, rows):
    """Return loss and gradients of one optimizer batch, and leave the weights as they are."""
    updater.optimizer.step = lambda: None
    stats = UpdateStats()
    updater.update([rows], 0, stats)
    return stats.loss, [parameter.grad.clone() for parameter in updater.model.parameters()]


def close(left, right, tolerance=FP64):
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(left, right, strict=True))


def size(gradients):
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


@pytest.fixture
def trajectories(episode):
    """Eight episodes, three groups: one of equal rewards, a lone one-token answer, one in two segments."""
    cold = Sampling(temperature=0.75)
    return [
        episode((0, [3, 4, 5]), (1, [7, 8, 0]), (0, [9]), (1, [1, 0]), name="a0", group="a", reward=1.0),
        episode((0, [3, 4, 5]), (1, [7, 0]), name="a1", group="a", reward=0.0),
        episode((0, [3, 4, 5]), (1, [0]), name="a2", group="a", reward=0.25),
        episode((0, [2, 6]), (1, [11, 12, 13, 0]), name="b0", group="b", reward=0.5),
        episode((0, [2, 6]), (1, [11, 0]), name="b1", group="b", reward=0.5),
        episode((0, [2, 6, 6]), (1, [14]), "segment", (0, [2, 9]), (1, [15, 0]), name="c0", group="c", reward=-1.0),
        episode((0, [2, 6, 6]), (1, [16, 0]), name="c1", group="c", reward=2.0, sampling=cold),
        episode((0, [2, 6, 6]), (1, [0]), name="c2", group="c", reward=2.0),
    ]


@pytest.fixture
def rows_of(config):
    """Make the rows of a batch with the advantages that the algorithm of `settings` gives."""

    def make(trajectories, settings):
        algorithm = ALGORITHMS[settings.algo](settings)
        experiences = experiences_of(trajectories, need_logprobs=algorithm.online)
        algorithm.credit(experiences)
        return make_rows(experiences)

    return make


# --- the whole step, slowly -----------------------------------------------------------------------------------------


def slow_logprobs(model, trajectory, temperature):
    """Return the log-prob of every trainable token of an episode, in order: one forward a token, all logits."""
    found = []
    for start, end in trajectory.segments:
        for place in range(start, end):
            if trajectory.response_mask[place]:
                ids = torch.tensor([trajectory.tokens[start:place]])
                hidden = model(ids, torch.arange(place - start)[None], CausalAttend())
                logits = model.logits(hidden[0, -1]) / temperature
                found.append(logits[trajectory.tokens[place]] - logits.exp().sum().log())
    return found


def slow_advantage(trajectory, trajectories):
    rewards = [t.reward for t in trajectories if t.group_id == trajectory.group_id]
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return 0.0 if std == 0 else (trajectory.reward - mean) / (std + 1e-4)


def slow_token(algo, logprob, old, advantage):
    if algo == "sft":
        return -logprob
    ratio = (logprob - old).exp()
    if algo == "cispo":
        return -min(ratio.item(), 1.5) * advantage * logprob
    clipped = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.2))
    return -min(ratio * advantage, clipped * advantage)


def slow_loss(model, reference, trajectories, config):
    """Return the loss of a batch from the formulas, token by token."""
    total, count, sequences = 0.0, 0, 0
    for trajectory in trajectories:
        temperature = 1.0 if config.algo == "sft" else trajectory.sampling.temperature
        current = slow_logprobs(model, trajectory, temperature)
        frozen = [x.detach() for x in slow_logprobs(reference, trajectory, temperature)] if reference else current
        olds = [x for x, mask in zip(trajectory.logprobs, trajectory.response_mask, strict=True) if mask]
        advantage = slow_advantage(trajectory, trajectories)
        losses = []
        for logprob, ref, old in zip(current, frozen, olds, strict=True):
            loss = slow_token(config.algo, logprob, old, advantage)
            if reference:
                loss = loss + config.beta * ((ref - logprob).exp() - (ref - logprob) - 1)
            losses.append(loss)
        total = total + sum(losses) / (len(losses) if config.averaging == "sequence_mean" else 1)
        count, sequences = count + len(losses), sequences + 1
    return (
        total / {"token_mean": count, "sequence_mean": sequences, "constant": sequences * MAX_TOKENS}[config.averaging]
    )


STEPS = [
    *[("grpo", how, beta) for how in AVERAGINGS for beta in (0.0, 0.3)],
    ("cispo", "token_mean", 0.0),
    ("cispo", "token_mean", 0.3),
    ("sft", "token_mean", 0.0),
    ("sft", "sequence_mean", 0.0),
]


@pytest.mark.parametrize(("algo", "averaging", "beta"), STEPS)
def test_a_whole_step_equals_the_formulas(decoder, config, trajectories, rows_of, algo, averaging, beta):
    model, reference = decoder(), decoder(seed=1) if beta else None
    extra = {"beta": beta} if beta else {}
    extra |= {"epsilon_high": 1.5} if algo == "cispo" else {}
    settings = config(algo, averaging=averaging, max_grad_norm=1e9, micro_batch_tokens=20, **extra)
    for trajectory in trajectories:  # old log-probs near the current ones: some ratios inside the bounds, some outside
        near = iter(slow_logprobs(model, trajectory, trajectory.sampling.temperature))
        rng = Random(trajectory.trajectory_id)
        trajectory.logprobs = [
            float(next(near).detach()) + rng.choice([-0.6, -0.1, 0.1, 0.6]) if mask else None
            for mask in trajectory.response_mask
        ]
    loss, fast = gradient(updater_of(model, settings, reference), rows_of(trajectories, settings))
    wanted = slow_loss(model, reference, trajectories, settings)
    slow = torch.autograd.grad(wanted, list(model.parameters()))
    assert loss == pytest.approx(wanted.item(), abs=STORED)
    assert close(fast, slow, STORED)
    assert size(slow) > 0.01


# --- splits, order, what is skipped ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", STEPS)
def test_every_split_into_micro_batches_gives_one_gradient(decoder, config, episode, rows_of, monkeypatch, case):
    algo, averaging, beta = case
    batch = [  # eight rows, 5 tokens each that predict: 40, 20, 10, 5 tokens make 1x8, 2x4, 4x2, 8x1
        episode((0, [3] * p), (1, [i + 1, *range(20, 25 - p)]), name=f"t{i}", group=f"g{i % 2}", reward=float(i))
        for i, p in enumerate([1, 2, 3, 4, 5, 1, 2, 3])
    ]
    sizes = []
    whole = update_module.micro_batches
    monkeypatch.setattr(update_module, "micro_batches", lambda *args: sizes.append(len(made := whole(*args))) or made)
    extra = {"beta": beta} if beta else {}
    results = []
    for limit in (40, 20, 10, 5):
        settings = config(algo, averaging=averaging, max_grad_norm=1e9, micro_batch_tokens=limit, **extra)
        reference = decoder(seed=1) if beta else None
        results.append(gradient(updater_of(decoder(), settings, reference), rows_of(batch, settings)))
    assert sizes == [1, 2, 4, 8]
    (loss, first), *others = results
    for other_loss, other in others:
        assert other_loss == pytest.approx(loss, abs=FP64)
        assert close(first, other)
    assert size(first) > 0.01


@pytest.mark.parametrize("case", STEPS)
def test_shared_beginnings_give_the_gradient_of_rows_alone(decoder, config, trajectories, rows_of, monkeypatch, case):
    algo, averaging, beta = case
    results, computed = [], []
    whole = update_module.micro_batches
    monkeypatch.setattr(update_module, "micro_batches", lambda *args: computed.extend(made := whole(*args)) or made)
    for fork, limit in ((10**9, 1), (1, 1000), (1, 12)):
        monkeypatch.setattr(batch_module, "WORTH_A_FORK", fork)
        extra = {"beta": beta} if beta else {}
        settings = config(algo, averaging=averaging, max_grad_norm=1e9, micro_batch_tokens=limit, **extra)
        reference = decoder(seed=1) if beta else None
        results.append(gradient(updater_of(decoder(), settings, reference), rows_of(trajectories, settings)))
        results[-1] = (*results[-1], sum(batch.ids.numel() for batch in computed))
        computed.clear()
    (loss, first, tokens), *others = results
    for other_loss, other, fewer in others:
        assert other_loss == pytest.approx(loss, abs=FP64)
        assert close(first, other)
        assert fewer < tokens
    assert size(first) > 0.01


@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_the_order_of_episodes_changes_nothing(decoder, config, trajectories, rows_of, averaging):
    settings = config(averaging=averaging, max_grad_norm=1e9)
    plain = gradient(updater_of(decoder(), settings), rows_of(trajectories, settings))
    shuffled = Random(3).sample(trajectories, len(trajectories))
    other = gradient(updater_of(decoder(), settings), rows_of(shuffled, settings))
    assert other[0] == pytest.approx(plain[0], abs=FP64)
    assert close(plain[1], other[1])


@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_rows_without_advantage_count_and_are_not_computed(
    decoder, config, trajectories, rows_of, monkeypatch, averaging
):
    """An advantage of 1e-30 is computed, one of 0 is not: the gradients agree, the work does not."""
    computed = []
    plain = update_module.hidden_states
    monkeypatch.setattr(
        update_module, "hidden_states", lambda model, b: computed.append(len(b.targets)) or plain(model, b)
    )
    settings = config(averaging=averaging, max_grad_norm=1e9)
    experiences = experiences_of(trajectories, need_logprobs=True)
    ALGORITHMS["grpo"](settings).credit(experiences)
    zeros = [experience.advantages[0] for experience in experiences]
    assert zeros.count(0.0) == 2
    results = [
        gradient(
            updater_of(decoder(), settings), make_rows(experiences_of(trajectories, advantages, need_logprobs=True))
        )
        for advantages in (zeros, [a or 1e-30 for a in zeros])
    ]
    assert computed == [14, 20]  # b0 and b1 hold 6 of the 20 tokens
    assert close(results[0][1], results[1][1])


# --- nothing to learn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_no_trainable_token_is_a_step_of_gradient_zero(decoder, config, averaging):
    model = decoder()
    before = [p.detach().clone() for p in model.parameters()]
    stats = UpdateStats()
    updater_of(model, config(averaging=averaging)).update([[]], 0, stats)
    assert (stats.loss, stats.grad_norm, stats.steps, stats.tokens) == (0.0, 0.0, 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert "entropy" not in stats.metrics()  # unknown, which is not 0


def test_without_tokens_weight_decay_and_momentum_go_on(decoder, config, trajectories, rows_of):
    settings = config(weight_decay=0.5, learning_rate=0.1, lr_scheduler_type="constant")
    model = decoder()
    before = [p.detach().clone() for p in model.parameters()]
    updater = updater_of(model, settings)
    updater.update([[]], 0, UpdateStats())
    assert close(model.parameters(), [decayed(p, 0.95) for p in before])  # 1 - 0.1 * 0.5
    updater.update([rows_of(trajectories, settings)], 1, UpdateStats())
    moved = [p.detach().clone() for p in model.parameters()]
    updater.update([[]], 2, UpdateStats())
    assert not close(model.parameters(), [decayed(p, 0.95) for p in moved])


def decayed(parameter, share):
    """Matrices decay; a norm, whose 0 would switch its channel off, does not."""
    return share * parameter if parameter.dim() >= 2 else parameter


# --- optimizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        # peak 0.8, 2 steps of warm-up, 6 steps in all, floor 0.25 of the peak: 4 steps of fall
        ("constant", [0.4, 0.8, 0.8, 0.8, 0.8, 0.8]),
        ("linear", [0.4, 0.8, 0.8, 0.65, 0.5, 0.35]),
        ("cosine", [0.4, 0.8, 0.8, 0.2 + 0.3 * (1 + 0.5**0.5), 0.5, 0.2 + 0.3 * (1 - 0.5**0.5)]),
    ],
)
def test_learning_rates_by_hand(decoder, config, shape, wanted):
    floor = {} if shape == "constant" else {"min_lr_ratio": 0.25}
    settings = config(learning_rate=0.8, lr_scheduler_type=shape, warmup_steps=2, max_steps=6, **floor)
    updater = updater_of(decoder(), settings)
    assert [updater.learning_rate(step) for step in range(6)] == pytest.approx(wanted, rel=1e-12)
    updater.update([[]], 3, UpdateStats())
    assert all(group["lr"] == pytest.approx(wanted[3], rel=1e-12) for group in updater.optimizer.param_groups)


def test_one_step_of_adamw_by_hand(decoder, config, trajectories, rows_of):
    settings = config(
        learning_rate=0.1,
        lr_scheduler_type="constant",
        adam_beta1=0.8,
        adam_beta2=0.6,
        adam_epsilon=0.01,
        weight_decay=0.2,
        max_grad_norm=1e9,
    )
    rows = rows_of(trajectories, settings)
    model = decoder()
    before = [p.detach().clone() for p in model.parameters()]
    _, grads = gradient(updater_of(decoder(), settings), rows)
    updater_of(model, settings).update([rows], 0, UpdateStats())
    # the first moments, corrected for their start at 0, are g and g^2 themselves
    wanted = [decayed(p, 1 - 0.1 * 0.2) - 0.1 * g / (g.abs() + 0.01) for p, g in zip(before, grads, strict=True)]
    assert close(model.parameters(), wanted)


def test_gradients_are_scaled_down_to_the_norm(decoder, config, trajectories, rows_of):
    loose, tight = config(max_grad_norm=1e9), config(max_grad_norm=0.01)
    rows = rows_of(trajectories, loose)
    _, whole = gradient(updater_of(decoder(), loose), rows)
    updater = updater_of(decoder(), tight)
    _, clipped = gradient(updater, rows)
    assert size(whole) > 0.02
    assert size(clipped) == pytest.approx(0.01, rel=1e-3)
    assert close(clipped, [0.01 * g / (size(whole) + 1e-6) for g in whole])
    stats = UpdateStats()
    updater.update([rows], 0, stats)
    assert stats.metrics()["grad_norm"] == pytest.approx(size(whole), rel=1e-9)  # the norm before clipping is logged


@pytest.mark.parametrize("algo", ["grpo", "cispo", "sft"])
def test_a_loss_that_is_not_finite_touches_nothing(decoder, config, trajectories, rows_of, algo):
    settings = config(algo)
    model = decoder()
    updater = updater_of(model, settings)
    rows = rows_of(trajectories, settings)
    updater.update([rows], 0, UpdateStats())
    weights = [p.detach().clone() for p in model.parameters()]
    state = [{k: v.clone() for k, v in updater.optimizer.state[p].items()} for p in model.parameters()]
    with torch.no_grad():
        broken = model.model.norm.weight[0].item()
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(
        NonFiniteError, match=r"step 2: the loss is nan and the gradient norm nan; this update was not made"
    ):
        updater.update([rows], 1, UpdateStats())
    with torch.no_grad():
        model.model.norm.weight[0] = broken
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    for before, parameter in zip(state, model.parameters(), strict=True):
        assert all(torch.equal(before[k], v) for k, v in updater.optimizer.state[parameter].items())


# --- what is trained ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_frozen_parameters_are_left_alone(decoder, config, trajectories, rows_of, weight_decay):
    """Only q_proj trains: the norm that is clipped and logged is that of its gradient, all else keeps its bits."""
    settings = config(learning_rate=0.1, lr_scheduler_type="constant", weight_decay=weight_decay, max_grad_norm=1e9)
    rows = rows_of(trajectories, settings)
    free = decoder()
    _, grads = gradient(updater_of(free, settings), rows)
    wanted = {name: g for (name, _), g in zip(free.named_parameters(), grads, strict=True) if "q_proj" in name}
    model = decoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    updater, stats = updater_of(model, settings), UpdateStats()
    updater.update([rows], 0, stats)
    updater.update([[]], 1, UpdateStats())
    assert stats.grad_norm == pytest.approx(size(wanted.values()), rel=1e-9)
    assert len(updater.optimizer.state) == len(wanted) == 2
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in wanted)
        assert (parameter.grad is None) == (name not in wanted)


def test_a_model_that_is_all_frozen_is_refused(decoder, config):
    with pytest.raises(ConfigError, match="no parameter of the model requires a gradient"):
        updater_of(decoder().requires_grad_(False), config())


def test_a_model_is_in_training_mode_during_the_update_alone(decoder, config, trajectories, rows_of):
    model, modes = decoder().eval(), []
    model.model.norm.register_forward_hook(lambda module, *_: modes.append(module.training))
    updater_of(model, config()).update([rows_of(trajectories, config())], 0, UpdateStats())
    assert set(modes) == {True}
    assert not model.training


# --- the router of a mixture of experts -------------------------------------------------------------------------------


def mixture(coefficient):
    shape = {
        "model_type": "qwen3_moe", "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24,
        "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": 128, "eos_token_id": 0, "router_aux_loss_coef": coefficient,
    }  # fmt: skip
    model = Decoder(ModelConfig.from_dict(shape)).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(
                0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64) + (weight.dim() == 1)
            )
    return model


def routers(model, rows):
    """Return the unscaled router loss of rows, each computed alone."""
    model.train()
    for row in rows:
        ids = torch.tensor([row.tokens[: row.places[-1]]])
        model(ids, torch.arange(ids.shape[1])[None], CausalAttend())
    loss = model.router_loss()
    model.eval()
    return loss


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("limit", [1000, 12])
def test_router_losses_are_averaged_by_the_tokens_of_micro_batches(
    config, trajectories, rows_of, monkeypatch, limit, beta
):
    """0.7 times the mean of the micro-batches' losses by tokens; no beginning here is long enough to be shared."""
    whole, packs = update_module.micro_batches, []
    monkeypatch.setattr(update_module, "micro_batches", lambda *args: packs.append(made := whole(*args)) or made)
    settings = config(max_grad_norm=1e9, micro_batch_tokens=limit, **({"beta": beta} if beta else {}))
    rows = rows_of([t for t in trajectories if t.trajectory_id != "c0"], settings)  # now each is one row
    (loss, grads), (more, more_grads) = (
        gradient(updater_of(mixture(c), settings, mixture(0.0) if beta else None), rows) for c in (0.0, 0.7)
    )
    model, wanted = mixture(0.7), 0.0
    assert (len(packs[0]) == 1) == (limit == 1000)
    total = sum(row.places[-1] for row in rows if beta or row.teaches)
    for pack in packs[0]:
        part = [row for row in rows if row.trajectory in pack.trajectory]
        wanted = wanted + 0.7 * routers(model, part) * sum(row.places[-1] for row in part) / total
    assert more - loss == pytest.approx(wanted.item(), abs=FP64)
    slow = torch.autograd.grad(wanted, list(model.parameters()), materialize_grads=True)
    assert close([a - b for a, b in zip(more_grads, grads, strict=True)], slow)
    assert size(slow) > 0.01


# --- KL term --------------------------------------------------------------------------------------------------------


def test_kl_is_zero_at_first_and_the_reference_stays(decoder, config, trajectories, rows_of):
    settings = config(beta=0.1, learning_rate=0.01)
    reference = decoder().requires_grad_(False)
    updater = updater_of(decoder(), settings, reference)
    rows = rows_of(trajectories, settings)
    kls = []
    for step in range(3):
        stats = UpdateStats()
        updater.update([rows], step, stats)
        kls.append(stats.kl / stats.tokens)
    assert kls[0] == 0.0
    assert all(before < after for before, after in pairwise(kls))
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), decoder().parameters(), strict=True))


def test_kl_reaches_groups_of_equal_rewards(decoder, config, trajectories, rows_of):
    """Group b has advantage 0: with beta it is computed, and pulled to the reference."""
    settings = config(beta=0.1)
    group = [t for t in trajectories if t.group_id == "b"]
    _, grads = gradient(updater_of(decoder(), settings, decoder(seed=1)), rows_of(group, settings))
    assert size(grads) > 0.01
    _, grads = gradient(updater_of(decoder(), config()), rows_of(group, config()))
    assert size(grads) == 0


def test_beta_and_reference_go_together(decoder, config):
    with pytest.raises(ConfigError, match=r"beta 0.1 looks at the model unused, and the reference is NoneType"):
        updater_of(decoder(), config(beta=0.1))
    with pytest.raises(ConfigError, match=r"beta 0.0 looks at the model None, and the reference is Decoder"):
        updater_of(decoder(), config(), decoder())


# --- what is measured -----------------------------------------------------------------------------------------------


def test_measures_by_hand(decoder, config, episode):
    """Old log-probs are the current ones moved by ln 2 or 0: ratios 1/2 and 1, a gap of ln 2 on one token in two."""
    model = decoder()
    one = episode((0, [3, 4]), (1, [5, 0]), name="a", reward=0.0)
    exact = [float(x.detach()) for x in slow_logprobs(model, one, 1.0)]
    one.logprobs[2:] = [exact[0] + math.log(2), exact[1]]
    stats = UpdateStats()
    rows = make_rows(experiences_of([one], [-1.0], need_logprobs=True))
    updater_of(model, config(learning_rate=1e-9)).update([rows, rows], 0, stats)
    metrics = stats.metrics()
    assert metrics["clip_ratio/low_mean"] == 0.5  # ratio 1/2, advantage below 0
    assert metrics["clip_ratio/high_mean"] == 0.0
    assert metrics["clip_ratio/region_mean"] == 0.5
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(math.log(2) / 2, abs=STORED)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(2), abs=STORED)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5, abs=STORED)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=STORED)
    assert metrics["loss"] == pytest.approx((0.8 + 1.0) / 2, abs=STORED)  # clipped at 0.8, mean over two tokens
    assert stats.gap_tokens == 2  # of the first optimizer step alone
    assert stats.tokens == 4
