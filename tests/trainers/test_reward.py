"""Reward models: the loss by hand and by finite differences, what changes nothing, what was trained being served."""

import json
import math
from pathlib import Path
from random import Random

import pytest
import torch

from gymtune.agents import Renderer
from gymtune.agents.models import CausalAttend, load_classifier, load_model
from gymtune.agents.models import foreign as foreign_module
from gymtune.agents.replay import whole_conversation
from gymtune.agents.reward_model import load_reward_model
from gymtune.agents.scorer import split_rewards
from gymtune.tools.errors import ConfigError, DataError
from gymtune.tools.messages import assistant, user
from gymtune.trainers import Listeners, TrainConfig, train
from gymtune.trainers.batch import make_rows
from gymtune.trainers.critic import Critic, make_critic
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.preflight import preflight
from gymtune.trainers.reward import ConversationPairs, Reward, pair_loss
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

FP64 = 1e-10  # two float64 ways to the same number
FP32 = 1e-6  # trained and served scores of size 1, in float32
STEP, NUMERIC = 1e-6, 1e-7  # of finite differences in float64, and what they are off by
LN2 = math.log(2)


@pytest.fixture
def config():
    return lambda **changes: TrainConfig(algo="reward", model="unused", output_dir="unused", data="unused", **changes)


@pytest.fixture
def pair(episode):
    """Make a pair of conversations as `whole_conversation` leaves them: ids, and one place behind them."""

    def make(chosen, rejected, rewards=(1.0, 0.0), **fields):
        return [
            episode((0, ids), (1, [0]), name=side, reward=reward, **fields)
            for side, ids, reward in zip(("chosen", "rejected"), (chosen, rejected), rewards, strict=True)
        ]

    return make


@pytest.fixture
def updater(decoder, config):
    """Make an updater with a head that points somewhere."""

    def make(weights=None, **changes):
        settings = config(**changes)
        policy = decoder()
        critic = Critic(policy)
        with torch.no_grad():
            critic.head.weight.copy_(torch.linspace(-0.5, 0.7, 16) if weights is None else weights)
        return Updater(policy, Reward(settings), settings, critic=critic)

    return make


def learn(updater, trajectories):
    """Return loss, gradients by name and metrics of one optimizer batch."""
    experiences = experiences_of(trajectories, need_logprobs=False)
    updater.annotate(experiences)
    updater.algorithm.credit(experiences)
    stats = UpdateStats()
    stats.note_credit(experiences, "none")
    loss = updater._gradient(make_rows(experiences), stats, warming=False)
    return loss, {name: p.grad.clone() for name, p in updater.named.items()}, stats.metrics()


@torch.no_grad()
def score(updater, ids):
    """Return the score of a conversation: one forward pass over it and nothing else."""
    hidden = updater.model(torch.tensor([ids]), torch.arange(len(ids))[None], CausalAttend())[0, -1]
    return float(hidden @ updater.critic.head.weight[0])


IDS = [[3, 4, 5, 6], [3, 4, 7], [9, 8], [9, 8, 12, 13, 14], [21], [20]]


@pytest.fixture
def batch(pair):
    return [side for i in range(0, 6, 2) for side in pair(IDS[i], IDS[i + 1])]


# --- the loss by hand -----------------------------------------------------------------------------------------------


def test_the_score_is_read_at_the_last_token(updater, batch):
    made = updater()
    loss, _, metrics = learn(made, batch)
    scores = [score(made, ids) for ids in IDS]
    gaps = [scores[i] - scores[i + 1] for i in (0, 2, 4)]
    assert loss == pytest.approx(sum(math.log1p(math.exp(-gap)) for gap in gaps) / 3, abs=FP64)
    assert metrics["accuracy"] == sum(gap > 0 for gap in gaps) / 3
    assert 0 < metrics["accuracy"] < 1
    assert metrics["margin"] == pytest.approx(sum(gaps) / 3, abs=FP64)
    assert metrics["mean_reward"] == pytest.approx(sum(scores) / 6, abs=FP64)
    assert (metrics["min_reward"], metrics["max_reward"]) == pytest.approx((min(scores), max(scores)), abs=FP64)
    assert set(metrics) == {
        "loss", "grad_norm", "accuracy", "margin", "mean_reward", "min_reward", "max_reward",
    }  # fmt: skip


def test_by_hand():
    """d = ln 3: sigmoid(d) is 3/4. A margin of ln 3 leaves sigmoid(0), a tie costs the mean of both directions."""
    ln3 = math.log(3)
    one, half, none = torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([0.0])
    chosen = torch.tensor([ln3 + 5])
    assert float(pair_loss(chosen, none + 5, none, one)) == pytest.approx(-math.log(3 / 4), abs=FP32)
    assert float(pair_loss(none + 5, chosen, none, one)) == pytest.approx(-math.log(1 / 4), abs=FP32)
    assert float(pair_loss(chosen, none + 5, none + ln3, one)) == pytest.approx(LN2, abs=FP32)
    assert float(pair_loss(chosen, none + 5, none, half)) == pytest.approx(-math.log(3 / 16) / 2, abs=FP32)


def test_scores_far_apart_overflow_nothing():
    for gap in (1e4, -1e4):
        chosen = torch.tensor([gap], requires_grad=True)
        loss = pair_loss(chosen, torch.zeros(1), torch.zeros(1), torch.ones(1))
        loss.sum().backward()
        assert loss.item() == max(0.0, -gap)
        assert float(chosen.grad) == (0.0 if gap > 0 else -1.0)


def test_a_tie_is_won_half_the_time_by_either_side(updater, pair):
    made = updater(ties="half")
    sides = [*pair(IDS[0], IDS[1], rewards=(0.5, 0.5)), *pair(IDS[2], IDS[3])]
    gaps = [score(made, IDS[i]) - score(made, IDS[i + 1]) for i in (0, 2)]
    loss, gradient, metrics = learn(made, sides)
    tie = (math.log1p(math.exp(-gaps[0])) + math.log1p(math.exp(gaps[0]))) / 2
    assert loss == pytest.approx((tie + math.log1p(math.exp(-gaps[1]))) / 2, abs=FP64)
    assert metrics["margin"] == pytest.approx(gaps[1], abs=FP64)  # of what is told apart
    swapped = [sides[1], sides[0], *sides[2:]]
    other, reverse, _ = learn(updater(ties="half"), swapped)
    assert other == pytest.approx(loss, abs=FP64)
    assert all(torch.allclose(gradient[name], reverse[name], rtol=0, atol=FP64) for name in gradient)
    assert learn(updater(), sides)[0] != pytest.approx(loss, abs=1e-3)  # as with ties that are dropped before


def test_equal_conversations_cost_ln_2_and_teach_nothing(updater, pair):
    for ids in ([3, 4, 5], [7]):
        loss, gradient, metrics = learn(updater(), pair(ids, ids))
        assert loss == pytest.approx(LN2, abs=FP64)
        assert all(float(g.abs().max()) < FP64 for g in gradient.values())
        assert metrics["margin"] == pytest.approx(0, abs=FP64)


@pytest.mark.parametrize(("how", "wanted"), [("none", [0.0, 0.0]), ("column", [0.75, -1.5]), ("reward", [2.0, 0.25])])
def test_margins(updater, pair, how, wanted):
    made = updater(margin=how)
    sides = [
        *pair(IDS[0], IDS[1], rewards=(3.0, 1.0), metadata={"margin": 0.75}),
        *pair(IDS[2], IDS[3], rewards=(0.5, 0.25), metadata={"margin": -1.5}),
    ]
    gaps = [score(made, IDS[i]) - score(made, IDS[i + 1]) for i in (0, 2)]
    costs = [math.log1p(math.exp(margin - gap)) for gap, margin in zip(gaps, wanted, strict=True)]
    assert learn(made, sides)[0] == pytest.approx(sum(costs) / 2, abs=FP64)


@pytest.mark.parametrize("margin", [None, True, "0.5", math.nan])
def test_a_margin_that_is_no_number_is_refused(updater, pair, margin):
    with pytest.raises(DataError, match=r"trajectory chosen: margin='column' wants a number .* came"):
        learn(updater(margin="column"), pair([3, 4], [5], metadata={"margin": margin}))


def test_centring_costs_the_squared_sum_of_a_pair(updater, batch):
    sums = [score(updater(), IDS[i]) + score(updater(), IDS[i + 1]) for i in (0, 2, 4)]
    plain, centred = (learn(updater(center_rewards_coefficient=c), batch)[0] for c in (None, 0.3))
    assert centred - plain == pytest.approx(0.3 * sum(s * s for s in sums) / 3, abs=FP64)


# --- gradients ------------------------------------------------------------------------------------------------------


def test_finite_differences_of_the_loss():
    chosen, rejected, margin = (torch.randn(5, dtype=torch.float64) for _ in range(3))
    sure = torch.tensor([1.0, 1.0, 0.5, 0.5, 1.0], dtype=torch.float64)
    asked = (chosen.requires_grad_(), rejected.requires_grad_())
    assert torch.autograd.gradcheck(lambda c, r: pair_loss(c, r, margin, sure), asked)


OPTIONS = {"margin": "reward", "ties": "half", "center_rewards_coefficient": 0.1}


def test_finite_differences_of_the_whole_model(updater, batch, pair):
    """Of a number in every parameter, the head's too, through packed rows that share their beginnings."""
    sides = batch + pair([3, 4, 1], [3, 4, 2], rewards=(1.0, 1.0))
    made = updater(**OPTIONS)
    _, gradient, _ = learn(made, sides)
    rng = Random(0)
    for name, parameter in made.named.items():
        flat, place = parameter.data.view(-1), rng.randrange(parameter.numel())
        if name == "model.embed_tokens.weight":
            place = 4 * 16 + place % 16  # of a token that is there
        kept, losses = float(flat[place]), []
        for side in (kept + STEP, kept - STEP):
            flat[place] = side
            losses.append(learn(made, sides)[0])
        flat[place] = kept
        slope = (losses[0] - losses[1]) / (2 * STEP)
        assert float(gradient[name].view(-1)[place]) == pytest.approx(slope, abs=NUMERIC), name
    assert float(gradient["critic.head.weight"].abs().max()) > 1e-3


def test_the_head_begins_at_zero_and_then_learns_first(updater, batch):
    made = updater(torch.zeros(16), center_rewards_coefficient=0.5)
    loss, gradient, metrics = learn(made, batch)
    assert loss == pytest.approx(LN2, abs=FP64)
    assert metrics["mean_reward"] == 0
    assert all(float(g.abs().max()) == 0 for name, g in gradient.items() if name != "critic.head.weight")
    hidden = [made.model(torch.tensor([i]), torch.arange(len(i))[None], CausalAttend())[0, -1] for i in IDS]
    wanted = -sum(hidden[i] - hidden[i + 1] for i in (0, 2, 4)) / 6
    assert torch.allclose(gradient["critic.head.weight"][0], wanted, rtol=0, atol=FP64)


# --- what changes nothing -------------------------------------------------------------------------------------------


def same(first, second):
    (loss, gradient, metrics), (other, others, measured) = first, second
    return (
        other == pytest.approx(loss, abs=FP64)
        and all(torch.allclose(gradient[name], others[name], rtol=0, atol=FP64) for name in gradient)
        and measured == pytest.approx(metrics, abs=FP64)
    )


def test_nothing_hangs_on_order_or_micro_batches(updater, batch):
    whole = learn(updater(**OPTIONS), batch)
    assert same(whole, learn(updater(**OPTIONS), batch[4:] + batch[2:4] + batch[:2]))
    for limit in (1, 6, 9):
        assert same(whole, learn(updater(micro_batch_tokens=limit, **OPTIONS), batch))
    swapped = [side for i in range(0, 6, 2) for side in (batch[i + 1], batch[i])]
    assert not same(whole, learn(updater(**OPTIONS), swapped))


def test_nothing_hangs_on_log_probs_or_on_the_token_behind_the_end(updater, batch, pair):
    whole = learn(updater(), batch)
    for side in batch:
        side.logprobs = [None] * len(side.tokens)
        side.tokens = [*side.tokens[:-1], 17]
        side.success, side.gt = True, "noise"
    assert same(whole, learn(updater(), batch))


def test_what_says_where_scores_are_not_read_is_refused(updater, episode):
    sides = [episode((0, [3]), (1, [4, 5]), name=name) for name in ("one", "two")]
    with pytest.raises(DataError, match=r"trajectory one has 2 places .* wanted one: .*ConversationPairs"):
        learn(updater(), sides)


# --- from a file to a scorer ----------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
ASKED = [("What is 1 + 2?", "3", "4 is it"), ("What is 7 + 5?", "12", "7"), ("Add 2 and 2.", "4", "22")]


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {
            "chosen": [user(f"{question} {n}"), assistant(good)],
            "rejected": [user(f"{question} {n}"), assistant(bad)],
            "tools": TOOLS if n % 2 else [],
            "margin": 0.1 * n,
        }
        for n in range(8)
        for question, good, bad in ASKED
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def settings(taught_model, pairs_file, tmp_path):
    def make(name="run", **changes):
        where = {"model": str(taught_model), "output_dir": str(tmp_path / name), "data": str(pairs_file)}
        steps = {"max_steps": 6, "save_steps": 2, "batch_size": 8, "learning_rate": 3e-3}
        return TrainConfig(algo="reward", **(where | steps | changes))

    return make


def test_a_pair_is_two_whole_conversations(pairs_file, tiny_renderer):
    data = ConversationPairs(pairs_file, tiny_renderer, max_length=512, seed=0)
    assert len(data.examples) == 24
    chosen, rejected = data.examples[3]
    messages = [user("What is 1 + 2? 1"), assistant("3")]
    assert chosen.messages == messages
    assert chosen.tokens[:-1] == tiny_renderer.conversation(messages, TOOLS)
    assert chosen.response_mask == [0] * (len(chosen.tokens) - 1) + [1]
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert chosen.metadata["margin"] == rejected.metadata["margin"] == pytest.approx(0.1)
    assert chosen.tokens[:-1] != tiny_renderer.conversation(messages)  # it reads the tools


def test_pairs_that_are_too_long_are_named_or_dropped(pairs_file, tiny_renderer):
    lengths = [
        max(len(side.tokens) - 1 for side in pair)
        for pair in ConversationPairs(pairs_file, tiny_renderer, max_length=512, seed=0).examples
    ]
    most = sorted(lengths)[len(lengths) // 2]
    fits = sum(length <= most for length in lengths)
    with pytest.raises(DataError, match=rf"more tokens than the {most} that the model takes.*line \d+ has \d+"):
        ConversationPairs(pairs_file, tiny_renderer, max_length=most, seed=0)
    data = ConversationPairs(pairs_file, tiny_renderer, max_length=most, seed=0, drop_long=True)
    assert len(data.examples) == fits < len(lengths)
    assert str(fits) in data.summary
    with pytest.raises(DataError, match="no pair to learn from"):
        ConversationPairs(pairs_file, tiny_renderer, max_length=5, seed=0, drop_long=True)


@torch.no_grad()
def trained_scores(model, head, renderer, conversations):
    """Score as training does: in packed rows, by the critic of an updater."""
    policy = load_model(model)
    critic = Critic(policy)
    critic.head.weight.copy_(head)
    made = TrainConfig(algo="reward", model="unused", output_dir="unused", data="unused")
    updater = Updater(policy, Reward(made), made, critic=critic)
    experiences = experiences_of([whole_conversation(t, renderer) for t in conversations], need_logprobs=False)
    updater.algorithm.credit(experiences)
    found = []
    for sides in zip(experiences[::2], experiences[1::2], strict=True):
        metrics = updater.evaluate(sides)
        assert metrics["max_reward"] - metrics["min_reward"] == pytest.approx(abs(metrics["margin"]), abs=FP32)
        better, worse = sorted((metrics["max_reward"], metrics["min_reward"]), reverse=True)
        found += [better, worse] if metrics["margin"] > 0 else [worse, better]
    return found


def test_what_was_trained_is_served(settings, tiny_renderer, pairs_file):
    """The scores of the last weights in training's own pass, and those of the folder that the run left."""
    run = settings(save_steps=6)
    folder = train(run)
    assert folder == Path(run.output_dir) / "reward"
    assert not (folder.parent / "ppo_critic").exists()
    checkpoint = folder.parent / "checkpoints" / "step_000006"
    _, head = load_classifier(folder)
    pairs = ConversationPairs(pairs_file, tiny_renderer, max_length=512, seed=0).everything()
    wanted = trained_scores(checkpoint, head, tiny_renderer, pairs)
    model = load_reward_model(str(folder))
    served = model.score([t.messages for t in pairs], [t.tools for t in pairs])
    assert served == pytest.approx(wanted, abs=FP32)
    assert max(wanted) - min(wanted) > 0.05
    _, scorer = split_rewards({}, str(folder))
    episodes = [t.model_copy(deep=True) for t in pairs]
    scorer.score(episodes)
    assert [t.rewards["reward_model"] for t in episodes] == pytest.approx(wanted, abs=FP32)
    assert json.loads((folder.parent / "handoff.json").read_text())["architecture"]["class"] == (
        "Qwen3ForSequenceClassification"
    )


def test_held_out_pairs_are_told_right_ever_more_often(settings, pairs_file, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text(pairs_file.read_text(encoding="utf-8").replace("What is 1", "What is 2"), encoding="utf-8")
    lines = held.read_text(encoding="utf-8").splitlines()
    held.write_text("".join(f"{line}\n" for line in lines if "What is 2" in line), encoding="utf-8")
    run = settings(eval_data=str(held), eval_steps=10, max_steps=20, save_steps=0)
    folder = train(run)
    told = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in told if "eval/accuracy" in line]
    assert [line["step"] for line in evaluated] == [0, 10, 20]
    assert evaluated[0]["eval/loss"] == pytest.approx(LN2, abs=FP32)
    assert evaluated[-1]["eval/accuracy"] == 1.0
    assert evaluated[-1]["eval/min_reward"] < evaluated[-1]["eval/mean_reward"] < evaluated[-1]["eval/max_reward"]
    assert load_classifier(folder.parent / "best")[1].shape == (1, 32)


def test_resume_equals_the_uninterrupted_run_bit_for_bit(settings):
    class KilledError(Exception):
        pass

    def kill(line):
        if line["step"] == 3:
            raise KilledError

    whole, cut = settings("whole"), settings("cut")
    final = train(whole)
    with pytest.raises(KilledError):
        train(cut, listeners=Listeners(on_step=kill))
    steps = []
    again = train(cut, resume=True, listeners=Listeners(on_step=lambda line: steps.append(line["step"])))
    assert steps[0] == 3
    names = ("model.safetensors", "optimizer.safetensors", "critic/value_head.safetensors")
    for name in names:
        files = [Path(run.output_dir) / "checkpoints/step_000006" / name for run in (whole, cut)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert (final / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_adapters_are_merged_and_the_head_is_trained_with_them(settings, taught_model):
    run = settings(lora_r=2)
    folder = train(run)
    model, head = load_classifier(folder)
    start = dict(load_model(taught_model).named_parameters())
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, start[n])}
    assert moved
    assert all("proj" in name for name in moved)
    assert float(head.abs().max()) > 1e-3
    assert not (folder / "adapter").exists()
    assert json.loads((folder.parent / "handoff.json").read_text())["adapter"] is None


def test_it_pays_in_grpo_and_ppo_and_is_where_a_critic_begins(settings, taught_model, tiny_renderer, tmp_path):
    folder = train(settings(save_steps=0))
    acting = {"env": "gymtune/Arithmetic-v0", "prompts_per_step": 2, "max_completion_length": 3, "max_steps": 1}
    for algo, more in (("grpo", {"num_generations": 2}), ("ppo", {"critic_model": str(folder)})):
        lines = []
        where = {"model": str(taught_model), "output_dir": str(tmp_path / algo), "reward_model": str(folder)}
        run = TrainConfig(algo=algo, **(where | acting | more))
        train(run, listeners=Listeners(on_step=lines.append))
        assert "rewards/reward_model/mean" in lines[0]
    policy, head = load_model(taught_model), load_classifier(folder)[1]
    critic = make_critic(run, policy, tiny_renderer)
    assert torch.equal(critic.head.weight, head)
    stored = dict(load_classifier(folder)[0].named_parameters())
    assert all(torch.equal(p, stored[name]) for name, p in critic.backbone.named_parameters())


def test_a_model_of_layers_that_are_not_ours_is_refused_before_it_is_read(settings, monkeypatch, tmp_path):
    from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

    folder = tmp_path / "foreign"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=400, max_position_embeddings=128, **sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(settings().model).save_pretrained(folder)
    monkeypatch.setattr(foreign_module, "load_foreign", None)  # nothing is loaded
    found = preflight(settings(model=str(folder)))
    with pytest.raises(ConfigError, match=r"--algo reward .* as sequence classifiers, .* is a gpt_neox"):
        found.refuse()


def test_a_reward_model_is_no_policy(settings):
    folder = train(settings(save_steps=0, max_steps=1))
    found = preflight(settings("again", model=str(folder)))
    assert any("head scores and does not speak" in str(error) for _, error in found.errors)


def test_the_renderer_of_a_run_reads_as_the_scorer_does(settings, tiny_renderer):
    """Tokenizer and template are copied: the ids of training are those that are asked."""
    folder = train(settings(save_steps=0, max_steps=1))
    theirs = Renderer.from_folder(folder)
    talk = [user("What is 1 + 2?"), assistant("<|im_end|> 3 <tool_call>")]
    assert theirs.conversation(talk, TOOLS) == tiny_renderer.conversation(talk, TOOLS)
    assert theirs.fingerprint == tiny_renderer.fingerprint
