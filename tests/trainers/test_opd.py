"""On-policy distillation: credit by hand, the gradient against exact divergences, and who is in the loss."""

from random import Random

import gymnasium
import pytest
import torch

from gymtune.agents import Sampling
from gymtune.agents.models import CausalAttend, ModelConfig, apply_lora, load_model, save_model
from gymtune.agents.models.folder import copy_tokenizer
from gymtune.agents.models.init import random_decoder
from gymtune.envs import ChatEnv, Task
from gymtune.tools.errors import ConfigError
from gymtune.tools.messages import user
from gymtune.trainers import Listeners, TrainConfig, train
from gymtune.trainers.algorithm import TokenBatch
from gymtune.trainers.batch import make_rows
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.fused_divergence import Measure, WholeTeacher, token_divergence
from gymtune.trainers.fused_logprob import token_logprobs
from gymtune.trainers.opd import OPD
from gymtune.trainers.preflight import preflight
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

FP64 = 1e-10  # two float64 ways to the same number
STORED = 1e-6  # advantages and log-probs of experiences are kept in float32
SAMPLED = 1e-3  # sampler and trainer on one model: log-probs of the same tokens
SHARED_IDS = 31


@pytest.fixture
def config():
    """Make a config whose paths nobody opens."""

    def make(**changes):
        where = {"model": "unused", "output_dir": "unused", "env": "E-v0", "teacher_model": "teacher"}
        return TrainConfig(algo="opd", **(where | {"max_grad_norm": 1e9} | changes))

    return make


@pytest.fixture
def teacher(decoder):
    """A float64 teacher of other weights, with three ids more than the student."""
    shape = decoder(seed=1).config.to_dict() | {"vocab_size": SHARED_IDS + 3}
    model = random_decoder(ModelConfig.from_dict(shape)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model.requires_grad_(False)


@pytest.fixture
def trajectories(episode):
    """Two groups: of three rewards, one at another temperature; and of a failed, a broken and a cut-off episode."""
    warm = Sampling(temperature=1.25)
    return [
        episode((0, [3, 4, 5]), (1, [7, 8, 0]), (0, [9]), (1, [1, 0]), name="a0", group="a", reward=1.0),
        episode((0, [3, 4, 5]), (1, [7, 0]), name="a1", group="a", reward=0.0),
        episode((0, [3, 4, 5]), (1, [0]), name="a2", group="a", reward=0.5, sampling=warm),
        episode((0, [2, 6]), (1, [11, 12]), name="failed", group="b", reward=1.0, error="it broke"),
        episode((0, [2, 6]), (1, [13, 0]), name="broken", group="b", reward=1.0, rewards={"gt": None}),
        episode((0, [2, 6]), (1, [14]), name="cut", group="b", reward=1.0, terminated=False, truncated=True),
    ]


def said_by(student, trajectories, noise=0.0):
    """Make the stored log-probs those of a student, or near them: some ratios within the bounds, some outside."""
    rng = Random(0)
    for trajectory in trajectories:
        for place, mask in enumerate(trajectory.response_mask):
            if mask:
                told = next_logprobs(student, trajectory.tokens[:place], trajectory.sampling.temperature)
                trajectory.logprobs[place] = float(told[trajectory.tokens[place]].detach()) + rng.choice(
                    [-noise, noise]
                )


def next_logprobs(model, ids, temperature):
    """Return the log-softmax over the ids that both know, after `ids`."""
    hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], CausalAttend())
    return (model.logits(hidden[0, -1])[:SHARED_IDS] / temperature).log_softmax(0)


def credited(student, teacher, settings, trajectories):
    algorithm = OPD(settings)
    updater = Updater(student, algorithm, settings, teacher, 8)
    experiences = experiences_of(trajectories, need_logprobs=True)
    updater.annotate(experiences)
    algorithm.credit(experiences)
    return updater, experiences


# -- credit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficient", [0.0, 2.0])
def test_a_token_is_worth_what_the_teacher_thinks_of_it_and_what_the_episode_earned(
    decoder, teacher, config, trajectories, coefficient
):
    """The larger teacher's log-probs are normalised over the ids that the student knows, at the sampler's heat."""
    changes = {"reward_coef": coefficient} if coefficient else {}
    _, experiences = credited(decoder(), teacher, config(**changes), trajectories)
    earned = {"a0": 0.5, "a1": -0.5, "a2": 0.0}  # the reward less the group's mean, undivided by default
    for experience in experiences:
        trajectory = experience.trajectory
        if trajectory.trajectory_id == "failed":
            assert experience.advantages == [0.0, 0.0]
            continue
        temperature = trajectory.sampling.temperature
        wanted = [
            float(next_logprobs(teacher, trajectory.tokens[:place], temperature)[trajectory.tokens[place]])
            - trajectory.logprobs[place]
            + coefficient * earned.get(trajectory.trajectory_id, 0.0)
            for place in experience.places
        ]
        assert experience.advantages == pytest.approx(wanted, abs=STORED)


def test_whole_distributions_leave_rewards_alone_in_the_advantage(decoder, teacher, config, trajectories):
    _, experiences = credited(decoder(), teacher, config(opd_loss="full", reward_coef=2.0), trajectories)
    assert [set(e.advantages) for e in experiences] == [{1.0}, {-1.0}, {0.0}, {0.0}, {0.0}, {0.0}]
    assert not any(e.ref_logprobs for e in experiences)


def test_who_is_in_the_loss(config, trajectories):
    """An episode that broke its checker can be judged by the teacher, one that failed cannot."""
    experiences = experiences_of(trajectories, need_logprobs=True)
    for changes, wanted in (({}, [1, 1, 1, 0, 1, 1]), ({"mask_truncated_completions": True}, [1, 1, 1, 0, 1, 0])):
        assert [OPD(config(**changes)).trains(e) for e in experiences] == list(map(bool, wanted))


# -- the gradient ------------------------------------------------------------------------------------------------------


def test_the_sampled_gradient_is_that_of_the_reverse_kl_in_expectation(config):
    """All tokens that may be said after a prompt, each as often as the student says it, in place of samples."""
    generator = torch.Generator().manual_seed(0)
    hidden, head, theirs, their_head = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((1, 4), (7, 4), (1, 5), (7, 5))
    )
    hidden.requires_grad_()
    head.requires_grad_()
    every = torch.arange(7)
    logprobs, _ = token_logprobs(hidden.expand(7, 4), head, every, 1.0)
    judged = (theirs @ their_head.T).log_softmax(1)[0]
    old = logprobs.detach()
    one = torch.zeros(7, dtype=torch.long)
    tokens = TokenBatch(logprobs, old, judged - old, one, one, one, judged)
    found = OPD(config()).loss(tokens)
    ours = torch.autograd.grad((old.exp() * found.loss).sum(), (hidden, head), retain_graph=True)
    exact = token_divergence(hidden, head, WholeTeacher(theirs, their_head), Measure("reverse_kl"))
    torch.testing.assert_close(ours, torch.autograd.grad(exact.sum(), (hidden, head)), rtol=FP64, atol=FP64)
    told = found.measured["distill/divergence"]
    assert float((old.exp() * told).sum()) == pytest.approx(exact.item(), abs=FP64)


def slow_loss(student, teacher, experiences, settings):
    """Return the mean over tokens of T^2 D and the clipped surrogate, one forward pass a token."""
    losses, t = [], settings.distill_temperature
    for experience in experiences:
        trajectory = experience.trajectory
        for place, old, advantage in zip(
            experience.places, experience.old_logprobs, experience.advantages, strict=True
        ):
            ids = trajectory.tokens[:place]
            current = next_logprobs(student, ids, trajectory.sampling.temperature)[trajectory.tokens[place]]
            ratio = (current - old).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if settings.opd_loss == "full":
                q, p = (next_logprobs(model, ids, t) for model in (student, teacher))
                pair = (q, p) if settings.divergence == "reverse_kl" else (p, q)
                loss = loss + t**2 * (pair[0].exp() * (pair[0] - pair[1])).sum()
            losses.append(loss)
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward_coef": 1.5},
        {"opd_loss": "full"},
        {"opd_loss": "full", "divergence": "forward_kl", "distill_temperature": 2.0, "reward_coef": 1.5},
    ],
)
def test_a_whole_step_equals_the_formula(decoder, teacher, config, trajectories, changes):
    student, settings = decoder(), config(**changes)
    said_by(student, trajectories[:3], noise=0.1)
    said_by(student, trajectories[3:], noise=0.5)
    updater, experiences = credited(student, teacher, settings, trajectories)
    kept = [e for e in experiences if updater.algorithm.trains(e)]
    assert len(kept) == 5
    stats = UpdateStats()
    updater.update([make_rows(kept)], 0, stats, dry=True)
    wanted = slow_loss(student, teacher, kept, settings)
    assert stats.loss == pytest.approx(wanted.item(), abs=STORED)
    slow = torch.autograd.grad(wanted, list(student.parameters()))
    torch.testing.assert_close([p.grad for p in student.parameters()], list(slow), rtol=0, atol=STORED)
    assert max(g.abs().max() for g in slow) > 0.01


@pytest.mark.parametrize("how", ["sampled", "full"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(decoder, config, trajectories, how):
    student = decoder()
    said_by(student, trajectories)
    updater, experiences = credited(student, decoder(), config(opd_loss=how), trajectories)
    updater.update([make_rows(experiences)], 0, stats := UpdateStats(), dry=True)
    assert abs(stats.loss) < STORED
    assert max(p.grad.abs().max() for p in student.parameters()) < STORED


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(taught_model, tiny_model, tmp_path):
    """Run opd on one-digit sums; the teacher is the tiny model before it was taught."""

    def make(name="run", **changes):
        where = {"model": str(taught_model), "output_dir": str(tmp_path / name), "teacher_model": str(tiny_model)}
        base = {"env": "gymtune/Arithmetic-v0", "prompts_per_step": 4, "num_generations": 2, "max_steps": 4}
        base |= {"max_completion_length": 4, "learning_rate": 0.01, "save_steps": 0}
        lines = []
        folder = train(TrainConfig(algo="opd", **(where | base | changes)), listeners=Listeners(on_step=lines.append))
        return folder, lines

    return make


@pytest.mark.parametrize("how", ["sampled", "full"])
def test_the_student_comes_nearer_to_its_teacher(run, how):
    folder, lines = run(opd_loss=how)
    assert folder.name == "opd"
    assert lines[-1]["distill/divergence"] < 0.7 * lines[0]["distill/divergence"]
    assert ("distill/teacher_logprob" in lines[0]) == (how == "sampled")
    if how == "sampled":  # the same, summed over the tokens of an episode
        assert lines[0]["objective/kl"] > lines[0]["distill/divergence"] > 0


def test_groups_of_one_are_enough_for_a_teacher(run):
    _, lines = run(num_generations=1, max_steps=1)
    assert lines[0]["grad_norm"] > 0


def test_a_student_with_adapters(run, taught_model):
    """Beside another teacher; and beside itself as it began, from which nothing is to be learnt at first."""
    _, lines = run("other", lora_r=4)
    assert lines[-1]["distill/divergence"] < lines[0]["distill/divergence"]
    for how in ("sampled", "full"):
        _, lines = run(f"own-{how}", lora_r=4, teacher_model=str(taught_model), opd_loss=how, max_steps=1)
        assert abs(lines[0]["distill/divergence"]) < SAMPLED


def test_a_moved_adapter_is_pulled_back_to_where_it_began(decoder, config, trajectories):
    settings, student = config(model="same", teacher_model="same", opd_loss="full"), decoder()
    apply_lora(student, r=2, alpha=4.0, dropout=0.0, target_modules=["q_proj", "v_proj"], seed=0)
    with torch.no_grad():
        for name, weight in student.named_parameters():
            if weight.requires_grad and "lora_B" in name:
                weight.add_(0.3)
    updater, experiences = credited(student, None, settings, trajectories)
    updater.update([make_rows(experiences)], 0, stats := UpdateStats(), dry=True)
    assert stats.loss > 0.01
    assert stats.grad_norm > 0.01


class Silent(ChatEnv):
    """Pays for nothing."""

    def __init__(self, **options):
        super().__init__([Task("t", (user("Say yes."),), None)], [], **options)


if "gymtune-test/Silent-v0" not in gymnasium.registry:
    gymnasium.register("gymtune-test/Silent-v0", entry_point=Silent)


def test_without_rewards_the_teacher_is_enough(run):
    _, lines = run(env="gymtune-test/Silent-v0", max_steps=2)
    assert lines[0]["grad_norm"] > 0
    with pytest.raises(ConfigError, match="pays for nothing"):
        run("paid", env="gymtune-test/Silent-v0", reward_coef=1.0)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_keys_that_nothing_would_read(config):
    for changes, told in (
        ({"divergence": "forward_kl"}, "opd_loss is sampled"),
        ({"distill_temperature": 2.0}, "opd_loss is sampled"),
        ({"distill_top_k": 4}, "opd_loss is sampled"),
        ({"scale_rewards": "group"}, "reward_coef is 0"),
        ({"min_group_size": 3}, "reward_coef is 0"),
        ({"opd_loss": "full", "epsilon": 0.1}, "there is no ratio"),
        ({"opd_loss": "full", "jsd_beta": 0.3}, "divergence is not jsd"),
        ({"importance_sampling_level": "product"}, "use token or sequence"),
        ({"reward_coef": 1.0, "num_generations": 1}, "num_generations must be at least"),
        ({"teacher_cache": "folder"}, "does not read it"),
        ({"beta": 0.1}, "does not read it"),
    ):
        with pytest.raises(ConfigError, match=told):
            config(**changes)
    config(num_generations=1)
    config(reward_coef=1.0, scale_rewards="group", min_group_size=3)
    config(opd_loss="full", reward_coef=1.0, importance_sampling_level="product")


def test_a_teacher_must_take_what_the_student_may_see_and_say(tiny_model, tmp_path):
    facts = load_model(tiny_model).config
    for name, changes, told in (
        ("short", {"max_position_embeddings": 64}, r"made for 64 tokens, episodes may have 512: set max_model_length"),
        ("few", {}, r"has logits for \d+ ids, the policy may say"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        save_model(random_decoder(ModelConfig.from_dict(facts.to_dict() | changes)), folder)
        copy_tokenizer(tiny_model, folder)
        model = tiny_model
        if name == "few":
            model = tmp_path / "many"
            model.mkdir()
            save_model(random_decoder(ModelConfig.from_dict(facts.to_dict() | {"vocab_size": 999})), model)
            copy_tokenizer(tiny_model, model)
        where = {"model": str(model), "output_dir": str(tmp_path / "run"), "env": "gymtune/Arithmetic-v0"}
        settings = TrainConfig(algo="opd", **where, teacher_model=str(folder))
        with pytest.raises(ConfigError, match=told):
            preflight(settings).refuse()
        if name == "short":
            preflight(settings.model_copy(update={"max_model_length": 64})).refuse()
