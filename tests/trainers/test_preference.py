"""DPO and its kin in whole steps: against slow ones, what changes nothing, the reference, pairs, labels, KTO's KL."""

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch

from gymtune.agents.models import CausalAttend, apply_lora, trainable_parameters
from gymtune.envs import make_env
from gymtune.tools.errors import ConfigError
from gymtune.trainers import TrainConfig
from gymtune.trainers import update as update_module
from gymtune.trainers.algorithm import Lookups
from gymtune.trainers.batch import make_rows
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.kto import mismatched
from gymtune.trainers.registry import ALGORITHMS
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

FP64 = 1e-10  # two float64 ways to the same number
FP32 = 1e-6  # metrics of float32 numbers
STILL = 1e-5  # float32 log-probs of two forward passes, summed over a reply
PAIRED = ["dpo", "ipo", "orpo", "simpo"]
ALL = [*PAIRED, "kto"]
VARIANTS = [
    ("dpo", {"beta": 0.5}),
    ("dpo", {"beta": 0.5, "length_normalized": True}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.1}),
    ("dpo", {"beta": 0.5, "reference_free": True}),
    ("ipo", {"beta": 0.5}),
    ("ipo", {"beta": 0.5, "reference_free": True}),
    ("orpo", {"beta": 0.5}),
    ("simpo", {"beta": 2.0, "simpo_gamma": 0.5}),
    ("simpo", {"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.1}),
    ("kto", {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5}),
    ("kto", {"beta": 0.5, "reference_free": True}),
]


def named_by(values):
    return [f"{algo} {' '.join(f'{k}={v}' for k, v in changes.items())}" for algo, changes in values]


variants = pytest.mark.parametrize(("algo", "changes"), VARIANTS, ids=named_by(VARIANTS))


# --- a whole step against a slow one ----------------------------------------------------------------------------------


@pytest.fixture
def trajectories(episode):
    """Four pairs: two turns with a tool between, a prompt that two share, one-token replies, two segments."""
    made = [
        episode((0, [3, 4, 5]), (1, [7, 8, 0]), (0, [9]), (1, [1, 0]), name="a0"),
        episode((0, [3, 4, 5]), (1, [7, 0]), name="a1"),
        episode((0, [3, 4, 5]), (1, [0]), name="b0"),
        episode((0, [3, 4, 5]), (1, [11, 12, 13, 0]), name="b1"),
        episode((0, [2, 6, 6]), (1, [14]), "segment", (0, [2, 9]), (1, [15, 0]), name="c0"),
        episode((0, [2, 6, 6]), (1, [16]), name="c1"),
        episode((0, [2]), (1, [16, 17, 18]), name="d0"),
        episode((0, [2]), (1, [19, 0]), name="d1"),
    ]
    for index, trajectory in enumerate(made):
        trajectory.success = index % 2 == 0
    return made


def slow_logprobs(model, tokens, mask):
    """Return the log-prob of every token of mask 1 of one segment: one forward a token, all logits."""
    found = []
    for place in range(len(tokens)):
        if mask[place]:
            ids = torch.tensor([tokens[:place]])
            logits = model.logits(model(ids, torch.arange(place)[None], CausalAttend())[0, -1])
            found.append(logits[tokens[place]] - logits.exp().sum().log())
    return found


def slow_reply(model, trajectory):
    return [
        x
        for start, end in trajectory.segments
        for x in slow_logprobs(model, trajectory.tokens[start:end], trajectory.response_mask[start:end])
    ]


def rounded(values):
    return [x.detach().float().double() for x in values]


def slow_ratio(algo, config, said, reference):
    free = algo in ("orpo", "simpo") or config.reference_free
    return sum(said) - (0.0 if free else sum(reference))


def slow_pair(algo, config, chosen, rejected):
    (c, c_ref), (r, r_ref) = chosen, rejected
    c_ratio, r_ratio = slow_ratio(algo, config, c, c_ref), slow_ratio(algo, config, r, r_ref)
    e = config.label_smoothing
    if algo == "ipo":
        return (c_ratio / len(c) - r_ratio / len(r) - 1 / (2 * config.beta)) ** 2
    if algo == "orpo":
        p, q = (c_ratio / len(c)).exp(), (r_ratio / len(r)).exp()
        odds = (p / (1 - p)) / (q / (1 - q))
        return -p.log() - config.beta * (odds / (1 + odds)).log()
    if algo == "simpo":
        x = config.beta * (c_ratio / len(c) - r_ratio / len(r)) - config.simpo_gamma
    elif config.length_normalized:
        x = config.beta * (c_ratio / len(c) - r_ratio / len(r))
    else:
        x = config.beta * (c_ratio - r_ratio)
    return -(1 - e) * (1 / (1 + (-x).exp())).log() - e * (1 / (1 + x.exp())).log()


@torch.no_grad()
def slow_kl(model, reference, trajectories):
    """Return the mean log-ratio of the prompts, each with the reply before it; only first segments have a prompt."""
    total = 0.0
    for trajectory, other in zip(trajectories, trajectories[-1:] + trajectories[:-1], strict=True):
        end, first = other.segments[0][1], other.response_mask.index(1)
        prompt = trajectory.tokens[: trajectory.response_mask.index(1)]
        tokens, mask = prompt + other.tokens[first:end], [0] * len(prompt) + other.response_mask[first:end]
        total += float(sum(slow_logprobs(model, tokens, mask)) - sum(slow_logprobs(reference, tokens, mask)))
    return max(0.0, total / len(trajectories))


def slow_loss(algo, config, model, reference, trajectories):
    replies = [(slow_reply(model, t), rounded(slow_reply(reference, t))) for t in trajectories]
    if algo != "kto":
        pairs = list(zip(replies[::2], replies[1::2], strict=True))
        return sum(slow_pair(algo, config, *pair) for pair in pairs) / len(pairs)
    kl = 0.0 if config.reference_free else slow_kl(model, reference, trajectories)
    total = 0.0
    for (said, ref), trajectory in zip(replies, trajectories, strict=True):
        away = slow_ratio(algo, config, said, ref) - kl
        good = trajectory.success
        weight = config.desirable_weight if good else config.undesirable_weight
        total = total + weight * (1 - 1 / (1 + (-config.beta * (away if good else -away)).exp()))
    return total / len(trajectories)


def updater_of(model, settings, reference=None):
    made = ALGORITHMS[settings.algo](settings)
    return Updater(model, made, settings, reference if made.reference_model(settings) else None)


def experiences_for(updater, trajectories):
    experiences = experiences_of(trajectories, need_logprobs=False)
    updater.annotate(experiences)
    updater.algorithm.credit(experiences)
    return experiences


def gradient(updater, trajectories):
    """Return loss, metrics and gradients of one optimizer batch, and leave the weights as they are."""
    updater.optimizer.step = lambda: None
    stats = UpdateStats()
    updater.update([make_rows(experiences_for(updater, trajectories))], 0, stats)
    return stats.loss, stats.metrics(), [p.grad.clone() for p in updater.model.parameters()]


def close(left, right, tolerance=FP64):
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(left, right, strict=True))


def size(gradients):
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


@variants
def test_a_whole_step_equals_the_formulas(decoder, config, trajectories, algo, changes):
    model, reference = decoder(seed=1), decoder()
    settings = config(algo, max_grad_norm=1e9, micro_batch_tokens=12, **changes)
    loss, _, fast = gradient(updater_of(model, settings, reference), trajectories)
    wanted = slow_loss(algo, settings, model, reference, trajectories)
    slow = torch.autograd.grad(wanted, list(model.parameters()))
    assert loss == pytest.approx(wanted.item(), abs=FP64)
    assert close(fast, slow)
    assert size(slow) > 0.01


def test_the_kl_of_kto_is_above_zero_in_that_step(decoder, config, trajectories):
    """Otherwise the test above would not see it."""
    assert slow_kl(decoder(seed=1), decoder(), trajectories) > 1


# --- what changes nothing ---------------------------------------------------------------------------------------------


@variants
def test_every_split_into_micro_batches_gives_one_gradient(decoder, config, episode, monkeypatch, algo, changes):
    batch = [  # 16 rows of 5 tokens that predict, those of a unit in one micro-batch
        episode((0, [3] * (1 + i // 2 % 4)), (1, [i + 4, *range(20, 24 - i // 2 % 4)]), name=f"t{i}") for i in range(16)
    ]
    for index, trajectory in enumerate(batch):
        trajectory.success = index % 3 == 0
    sizes = []
    whole = update_module.micro_batches
    monkeypatch.setattr(update_module, "micro_batches", lambda *args: sizes.append(len(made := whole(*args))) or made)
    results = []
    for limit in (1000, 40, 20, 10):
        settings = config(algo, max_grad_norm=1e9, micro_batch_tokens=limit, **changes)
        results.append(gradient(updater_of(decoder(seed=1), settings, decoder()), batch))
    assert [a < b for a, b in pairwise(sizes)] == [True] * 3
    assert sizes[0] == 1
    assert sizes[-1] >= 8
    (loss, metrics, first), *others = results
    for other_loss, other_metrics, other in others:
        assert other_loss == pytest.approx(loss, abs=FP64)
        assert other_metrics == pytest.approx(metrics, abs=FP32)
        assert close(first, other)


@variants
def test_the_order_of_pairs_changes_nothing(decoder, config, trajectories, algo, changes):
    settings = config(algo, max_grad_norm=1e9, **changes)
    turned = trajectories[4:] + trajectories[:4]
    if algo != "kto":  # whose mismatched replies are others in another order, but not in a circle
        turned = [t for i in (2, 0, 3, 1) for t in trajectories[2 * i : 2 * i + 2]]
    plain, other = (
        gradient(updater_of(decoder(seed=1), settings, decoder()), batch) for batch in (trajectories, turned)
    )
    assert other[0] == pytest.approx(plain[0], abs=FP64)
    assert close(plain[2], other[2])


@pytest.mark.parametrize("algo", PAIRED)
def test_a_pair_the_other_way_round_is_another_loss(decoder, config, trajectories, algo):
    settings = config(algo, max_grad_norm=1e9)
    turned = [trajectories[i ^ 1] for i in range(len(trajectories))]
    plain, other = (
        gradient(updater_of(decoder(seed=1), settings, decoder()), batch) for batch in (trajectories, turned)
    )
    assert abs(other[0] - plain[0]) > 0.01
    assert plain[1]["rewards/margins"] == pytest.approx(-other[1]["rewards/margins"], abs=FP32)


@variants
def test_what_nobody_is_judged_by_changes_nothing(decoder, config, trajectories, algo, changes):
    """The sampler's log-probs, rewards and the temperature are noise; and so is the token behind the last one."""
    settings = config(algo, max_grad_norm=1e9, **changes)
    plain = gradient(updater_of(decoder(seed=1), settings, decoder()), trajectories)
    rng = Random(0)
    for trajectory in trajectories:
        trajectory.logprobs = [rng.choice([None, -rng.random()]) for _ in trajectory.logprobs]
        trajectory.turns[-1].reward = rng.random()
        trajectory.sampling = trajectory.sampling.model_copy(update={"temperature": 0.3})
        trajectory.append_context([rng.randrange(31), rng.randrange(31)])
    other = gradient(updater_of(decoder(seed=1), settings, decoder()), trajectories)
    if algo == "kto" and not settings.reference_free:  # the reply that goes with another's prompt is longer, unseen
        assert other[1]["kl"] == pytest.approx(plain[1]["kl"], abs=FP64)
    assert other[0] == pytest.approx(plain[0], abs=FP64)
    assert close(plain[2], other[2])


# --- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["of its own", "the adapter off"])
@pytest.mark.parametrize("algo", ["dpo", "ipo", "kto"])
def test_the_margin_is_zero_at_first_and_the_reference_stays(decoder, config, trajectories, algo, lora):
    settings = config(algo, learning_rate=0.03, max_steps=3, **({"lora_r": 2} if lora else {}))
    model = decoder(dtype=torch.float32)
    if lora:
        apply_lora(model, r=2, alpha=4, seed=0)
    updater = updater_of(model, settings, None if lora else decoder(dtype=torch.float32))
    margins, references = [], []
    for step in range(3):
        experiences = experiences_for(updater, trajectories)
        references.append([x for experience in experiences for x in experience.ref_logprobs])
        stats = UpdateStats()
        updater.update([make_rows(experiences)], step, stats)
        margins.append(stats.metrics()["rewards/margins"])
        if step == 0:
            assert stats.metrics()["rewards/chosen"] == pytest.approx(0, abs=STILL)
            assert stats.loss == pytest.approx({"dpo": math.log(2), "ipo": 25.0, "kto": 0.5}[algo], abs=STILL)
    assert margins[0] == pytest.approx(0, abs=STILL)
    assert margins[2] > margins[1] > 100 * STILL
    assert references[0] == references[1] == references[2]
    assert any(parameter.grad.abs().max() > 0 for parameter in trainable_parameters(model).values())


@pytest.mark.parametrize("algo", ALL)
def test_which_algorithm_looks_at_a_reference(config, algo):
    wanted = None if algo in ("orpo", "simpo") else "unused"
    assert ALGORITHMS[algo].reference_model(config(algo)) == wanted
    if wanted is not None:
        assert ALGORITHMS[algo].reference_model(config(algo, reference_free=True)) is None


# --- KTO: replies that belong to other prompts ------------------------------------------------------------------------


def test_mismatched_replies_by_hand(trajectories):
    said = experiences_of([trajectories[i] for i in (0, 4, 6)], need_logprobs=False)
    found = mismatched(said, longest=1000)
    assert [experience.trajectory.tokens for experience in found] == [
        [3, 4, 5, 16, 17, 18],
        [2, 6, 6, 7, 8, 0, 9, 1, 0],
        [2, 14],  # of the first segment alone: the second has a context of its own
    ]
    assert [experience.places for experience in found] == [[3, 4, 5], [3, 4, 5, 7, 8], [1]]
    assert [row.places for row in make_rows(found)] == [[3, 4, 5], [3, 4, 5, 7, 8], [1]]
    assert trajectories[0].tokens[3:] == [7, 8, 0, 9, 1, 0]  # the episodes are as they were


def test_mismatched_replies_are_cut_to_what_the_model_takes(trajectories):
    said = experiences_of([trajectories[i] for i in (0, 4, 6)], need_logprobs=False)
    found = mismatched(said, longest=6)
    assert [experience.trajectory.tokens for experience in found] == [
        [3, 4, 5, 16, 17, 18],
        [2, 6, 6, 7, 8, 0],
        [2, 14],
    ]
    assert [experience.places for experience in found] == [[3, 4, 5], [3, 4, 5], [1]]
    assert mismatched(said, longest=3)[0].places == []


def test_one_reply_has_no_other(trajectories, episode):
    silent = episode((0, [3, 4]), name="silent")
    assert mismatched(experiences_of([trajectories[0], silent], need_logprobs=False), longest=1000) == []


def test_the_reference_point_by_hand_and_never_below_zero(config, trajectories):
    """Mean over replies of the summed log-ratio; it is a number, so no gradient goes through it."""
    experiences = experiences_of([trajectories[0], trajectories[6]], need_logprobs=False)
    for sign, wanted in ((1, (3 * 0.5 + 5 * 0.5) / 2), (-1, 0.0)):
        made = ALGORITHMS["kto"](config("kto"))
        same = Lookups(
            lambda asked, sign=sign: [[sign * 0.5] * len(e.places) for e in asked],
            lambda asked: [[0.0] * len(e.places) for e in asked],
        )
        made.annotate(experiences, same)
        assert made.kl == pytest.approx(wanted)
        assert isinstance(made.kl, float)
    made.kl = 1.0
    made.annotate(experiences[:1], same)
    assert made.kl == 0.0  # of the batch before there is nothing left


# --- what a step of sampled episodes gives ----------------------------------------------------------------------------


@pytest.fixture
def group(episode):
    made = [episode((0, [3]), (1, [i]), name=f"t{i}", reward=reward) for i, reward in enumerate((0.5, 1.0, 0.0, 1.0))]
    silent = episode((0, [3]), name="silent", reward=2.0)
    failed = episode((0, [3]), (1, [9]), name="failed", reward=3.0)
    failed.error = "the server went away"
    return [*made, silent, failed]


@pytest.mark.parametrize("algo", PAIRED)
def test_pairs_are_chosen_from_the_groups_of_a_step(config, group, algo):
    def names(**changes):
        return [trajectory.trajectory_id for trajectory in ALGORITHMS[algo](config(algo, **changes)).choose(group)]

    assert names() == ["t1", "t2"]
    every = names(pairs="all")
    rewards = {trajectory.trajectory_id: trajectory.reward for trajectory in group}
    pairs = list(zip(every[::2], every[1::2], strict=True))
    assert len(set(pairs)) == len(pairs) == 5
    assert all(rewards[a] > rewards[b] for a, b in pairs)
    assert ALGORITHMS[algo](config(algo)).choose([group[1], group[3]]) == []


def test_labels_are_success_or_a_threshold(config, group):
    group[0].success, group[1].success, group[2].success = False, True, None

    def found(**changes):
        return [(t.trajectory_id, t.success) for t in ALGORITHMS["kto"](config("kto", **changes)).choose(group)]

    assert found() == [("t0", False), ("t1", True)]
    assert found(label_threshold=0.5) == [("t0", True), ("t1", True), ("t2", False), ("t3", True)]
    assert group[0].success is False  # the episodes are as they were


@pytest.mark.parametrize("algo", ALL)
def test_credit_says_which_are_a_unit_and_which_are_good(config, trajectories, algo):
    experiences = experiences_of(trajectories[:4], need_logprobs=False)
    ALGORITHMS[algo](config(algo)).credit(experiences)
    assert [e.unit for e in experiences] == ([0, 1, 2, 3] if algo == "kto" else [0, 0, 1, 1])
    assert [e.advantages[0] for e in experiences] == [1.0, -1.0, 1.0, -1.0]


@pytest.mark.parametrize("algo", ALL)
def test_a_run_samples_its_own_replies(trainer, algo):
    made = trainer(algo, max_steps=2, save_steps=0, **({"label_threshold": 0.5} if algo == "kto" else {}))
    before = {name: weight.detach().clone() for name, weight in made.model.named_parameters()}
    lines = []
    made.on_step = lines.append
    folder = made.train(Path(made.config.model))
    assert folder.name == algo
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert {"rewards/chosen", "rewards/margins", "reward", "frac_reward_zero_std"} <= lines[0].keys()
    assert "objective/kl" not in lines[0]  # which tells a KL of what was sampled, where a reward counts it
    assert any(not torch.equal(weight, before[name]) for name, weight in made.model.named_parameters())


@pytest.mark.parametrize("algo", PAIRED)
def test_a_step_without_a_pair_teaches_nothing_and_says_so(trainer, algo):
    made = trainer(algo, max_steps=1, save_steps=0, temperature=1e-3)  # the samples of a group are all alike
    before = {name: weight.detach().clone() for name, weight in made.model.named_parameters()}
    lines = []
    made.on_step = lines.append
    made.train(Path(made.config.model))
    assert (lines[0]["loss"], lines[0]["grad_norm"], lines[0]["frac_reward_zero_std"]) == (0.0, 0.0, 1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in made.model.named_parameters())


def test_the_finished_model_has_the_name_of_its_algorithm_where_there_are_tools(trainer):
    made = {algo: trainer(algo, env=partial(make_env, "gymtune/Calculator-v0")).prefix for algo in ("grpo", *ALL)}
    assert made == {"grpo": "agent"} | {algo: algo for algo in ALL}


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["dpo", "ipo", "simpo", "kto"])
def test_a_beta_of_zero_is_refused(config, algo):
    with pytest.raises(ConfigError, match=f"--algo {algo} scales what a reply earns by beta, which is 0"):
        config(algo, beta=0.0)


def test_kto_needs_two_replies_in_a_batch(config):
    with pytest.raises(ConfigError, match="batch_size must be at least 2, came 1"):
        TrainConfig(algo="kto", model="unused", output_dir="unused", data="unused", batch_size=1)
