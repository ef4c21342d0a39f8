"""The critic: values against a slow forward pass, where a cut-off episode goes on, what is saved, what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gymtune.agents.models import CausalAttend, load_foreign, load_model
from gymtune.tools.errors import ConfigError, ModelError, RunError
from gymtune.trainers.annotate import with_end
from gymtune.trainers.batch import make_rows, micro_batches
from gymtune.trainers.critic import HEAD, Critic, check_critic, make_critic
from gymtune.trainers.experience import Experience, experiences_of
from gymtune.trainers.ppo import PPO
from gymtune.trainers.update import Updater

FP64 = 1e-10  # two float64 ways to the same number
FP32 = 1e-5  # packed rows against whole ones, in float32
CPU = torch.device("cpu")


def slow_value(critic, policy, ids):
    """Return the value of a prefix: one forward pass over it and nothing else."""
    model = policy if critic.backbone is None else critic.backbone
    hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], CausalAttend())[0, -1]
    return float((hidden.to(critic.head.weight.dtype) @ critic.head.weight[0]).detach())


def awake(critic):
    """Give the head weights that are not 0."""
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.5, 0.7, critic.head.weight.shape[1]))
    return critic


@pytest.fixture
def made(decoder, config):
    """Make an updater with a separate or a shared critic."""

    def make(backbone="separate", **changes):
        settings = config("ppo", critic_backbone=backbone, **changes)
        policy = decoder()
        critic = awake(Critic(policy, decoder(seed=5) if backbone == "separate" else None))
        return Updater(policy, PPO(settings), settings, critic=critic)

    return make


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def experiences(episode):
    cut = {"truncated": True, "terminated": False}
    return experiences_of(
        [
            episode((0, [3, 4]), (1, [5, 6]), (0, [9]), (1, [7, 0])),
            episode((0, [3, 4]), (1, [5, 6]), (0, [9]), (1, [7, 0]), **cut),
            episode((0, [3, 4]), (1, [5]), "segment", (0, [2, 8]), (1, [6, 11]), **cut),
            episode((0, [3, 4]), (1, [5, 6]), (0, [9, 9]), **cut),  # the env's answer came, no turn after it
            episode((0, [3, 4]), (1, [5]), "segment", (0, [2, 8]), **cut),
            episode((0, [3, 4]), **cut),
        ],
        need_logprobs=True,
    )


@pytest.mark.parametrize("backbone", ["separate", "shared"])
@pytest.mark.parametrize("limit", [1, 1000])
def test_values_are_those_of_what_stands_before_each_token(made, experiences, backbone, limit):
    updater = made(backbone, micro_batch_tokens=limit)
    updater.annotate(experiences)
    for experience in experiences:
        trajectory, wanted = experience.trajectory, []
        for start, end in trajectory.segments:
            places = [place for place in experience.places if start <= place < end]
            wanted += [slow_value(updater.critic, updater.model, trajectory.tokens[start:place]) for place in places]
        assert experience.values == pytest.approx(wanted, abs=FP64)
    assert max(abs(value) for e in experiences for value in e.values) > 0.1


@pytest.mark.parametrize("backbone", ["separate", "shared"])
def test_only_a_cut_off_episode_goes_on_at_the_value_of_its_end(made, experiences, backbone):
    updater = made(backbone)
    updater.annotate(experiences)
    assert experiences[0].value_after == 0.0
    for experience in experiences[1:]:
        wanted = slow_value(updater.critic, updater.model, experience.trajectory.current_ids)
        assert experience.value_after == pytest.approx(wanted, abs=FP64)
        assert wanted != 0.0


def test_the_end_of_an_episode_is_read_behind_its_last_token(episode):
    one = Experience.of(episode((0, [3, 4]), (1, [5]), (0, [9, 8])), need_logprobs=True)
    (row,) = make_rows([with_end(one)])
    assert row.places == [2, 5]
    (batch,) = micro_batches([row], 100, CPU)
    assert batch.source.tolist() == [1, 4]
    assert one.trajectory.tokens == [3, 4, 5, 9, 8]  # the episode itself is as it was


def test_values_begin_at_zero(decoder, experiences):
    policy = decoder()
    for critic in (Critic(policy), Critic(policy, decoder(seed=5))):
        (batch,) = micro_batches(make_rows(experiences[:1]), 100, CPU)
        assert critic.values(batch, policy).tolist() == [0.0] * 4


def test_a_head_over_half_precision_is_float32(decoder, experiences):
    policy = decoder(dtype=torch.bfloat16)
    critic = Critic(policy)
    (batch,) = micro_batches(make_rows(experiences[:1]), 100, CPU)
    assert critic.values(batch, policy).dtype == critic.head.weight.dtype == torch.float32
    assert Critic(decoder()).head.weight.dtype == torch.float64


def test_a_head_for_logits_that_nothing_reads_is_not_trained(decoder, tmp_path):
    tied = Critic(decoder(), decoder(seed=5))
    assert all(parameter.requires_grad for parameter in tied.parameters())
    untied = decoder(seed=5)
    untied.lm_head = torch.nn.Linear(16, 31, bias=False, dtype=torch.float64)
    frozen = [name for name, p in Critic(decoder(), untied).named_parameters() if not p.requires_grad]
    assert frozen == ["backbone.lm_head.weight"]


def test_a_foreign_model_may_be_the_critic(tiny_model, tiny_renderer, episode):
    """The layers of transformers, on the same weights, say what ours say."""
    policy, foreign = load_model(tiny_model), load_foreign(tiny_model)
    batches = micro_batches(
        make_rows(experiences_of([episode((0, [3, 4, 9]), (1, [5, 6, 7, 0]))], need_logprobs=True)), 100, CPU
    )
    ours, theirs = (awake(Critic(policy, backbone)).values(batches[0], policy) for backbone in (None, foreign))
    assert torch.allclose(ours, theirs, rtol=0, atol=FP32)
    assert ours.abs().max() > 0.1


# --- from a config, to a folder and back ----------------------------------------------------------------------------


@pytest.fixture
def settings(tiny_model, config):
    return lambda **changes: config("ppo", model=str(tiny_model), **changes)


def test_the_backbone_is_a_copy_of_the_policys_or_another_model(settings, tiny_model, taught_model, tiny_renderer):
    policy = load_model(tiny_model)
    copy = make_critic(settings(), policy, tiny_renderer)
    other = make_critic(settings(critic_model=str(taught_model)), policy, tiny_renderer)
    shared = make_critic(settings(critic_backbone="shared"), policy, tiny_renderer)
    name = "model.layers.0.mlp.up_proj.weight"
    own = dict(policy.named_parameters())[name]
    assert torch.equal(dict(copy.backbone.named_parameters())[name], own)
    assert dict(copy.backbone.named_parameters())[name] is not own
    assert not torch.equal(dict(other.backbone.named_parameters())[name], own)
    assert [name for name, _ in shared.named_parameters()] == ["head.weight"]


@pytest.mark.parametrize("backbone", ["separate", "shared"])
def test_what_was_saved_comes_back_bit_for_bit(settings, tiny_model, taught_model, tiny_renderer, tmp_path, backbone):
    policy = load_model(tiny_model)
    other = {"critic_model": str(taught_model)} if backbone == "separate" else {}
    critic = awake(make_critic(settings(critic_backbone=backbone, **other), policy, tiny_renderer))
    critic.save(tmp_path / "critic", tiny_model)
    fresh = make_critic(settings(critic_backbone=backbone), policy, tiny_renderer)
    fresh.load(tmp_path / "critic")
    left, right = (dict(one.named_parameters()) for one in (critic, fresh))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    names = {path.name for path in (tmp_path / "critic").iterdir()}
    assert ({"config.json", "model.safetensors", "tokenizer.json", HEAD} <= names) == (backbone == "separate")
    assert (names == {HEAD}) == (backbone == "shared")


def test_a_saved_critic_opens_with_transformers_and_goes_on_as_critic_model(
    settings, tiny_model, taught_model, tiny_renderer, tmp_path
):
    from transformers import AutoModelForCausalLM

    policy = load_model(tiny_model)
    critic = awake(make_critic(settings(critic_model=str(taught_model)), policy, tiny_renderer))
    critic.save(tmp_path / "critic", tiny_model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    own = dict(critic.backbone.named_parameters())["model.norm.weight"]
    assert torch.equal(theirs.model.norm.weight, own)
    again = make_critic(settings(critic_model=str(tmp_path / "critic")), policy, tiny_renderer)
    assert torch.equal(again.head.weight, critic.head.weight)


def test_a_critic_of_another_model_is_refused(settings, tiny_model, tiny_renderer, tmp_path):
    policy = load_model(tiny_model)
    critic = make_critic(settings(), policy, tiny_renderer)
    awake(critic).save(tmp_path, tiny_model)
    save_file({"weight": torch.zeros(1, 7)}, tmp_path / HEAD)
    with pytest.raises(ModelError, match=r"another model: weight wanted \(1, 32\) found \(1, 7\) \(1 differ\)"):
        critic.load(tmp_path)
    for broken in (b"", None):
        if broken is None:
            (tmp_path / HEAD).unlink()
        else:
            (tmp_path / HEAD).write_bytes(broken)
        with pytest.raises(RunError, match=rf"{HEAD}: cannot read: .*the critic was not saved whole"):
            critic.load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "norm" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"wanted .* found nothing"):
        critic.load(tmp_path)


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_critic_of_another_vocabulary_is_refused(settings, tiny_model, tiny_renderer, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"critic_model .*other has another vocabulary than the policy .*model: \d+ tokens .* id \d+"
    ):
        make_critic(settings(critic_model=str(folder)), load_model(tiny_model), tiny_renderer)
    check_critic(tiny_model, tiny_renderer, "policy")  # its own is not


def test_a_critic_with_a_shorter_context_is_refused(settings, tiny_model, tiny_renderer, tmp_path):
    folder = tmp_path / "short"
    shutil.copytree(tiny_model, folder)
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(data | {"max_position_embeddings": 64}), encoding="utf-8")
    policy, wrong = load_model(tiny_model), settings(critic_model=str(folder))
    with pytest.raises(ConfigError, match=r"short was made for 64 tokens, episodes may have 512"):
        make_critic(wrong, policy, tiny_renderer)
    make_critic(settings(critic_model=str(folder), max_model_length=64), policy, tiny_renderer)


def test_a_critic_model_that_is_no_model_is_named(settings, tiny_model, tiny_renderer, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        make_critic(settings(critic_model=str(tmp_path / "nowhere")), load_model(tiny_model), tiny_renderer)


def test_keys_that_contradict_each_other_are_refused(config):
    with pytest.raises(ConfigError, match="critic_model: critic_backbone is shared"):
        config("ppo", critic_backbone="shared", critic_model="some")
    with pytest.raises(ConfigError, match="critic_warmup_steps 5 leave the policy none of the 5 steps"):
        config("ppo", critic_warmup_steps=5, max_steps=5)


def test_algorithm_and_critic_go_together(decoder, config):
    from gymtune.trainers.grpo import GRPO

    policy = decoder()
    with pytest.raises(ConfigError, match="algo 'ppo' and the critic NoneType do not go together"):
        Updater(policy, PPO(config("ppo")), config("ppo"))
    with pytest.raises(ConfigError, match="algo 'grpo' and the critic Critic do not go together"):
        Updater(policy, GRPO(config()), config(), critic=Critic(policy))


def test_with_an_adapter_the_critic_is_a_plain_copy(settings, tiny_model, tiny_renderer):
    from gymtune.agents.models import apply_lora, has_adapter

    policy = load_model(tiny_model)
    apply_lora(policy, r=2, alpha=4, seed=0)
    critic = make_critic(settings(), policy, tiny_renderer)
    assert critic.backbone is not None
    assert not has_adapter(critic.backbone)
    assert all(parameter.requires_grad for parameter in critic.parameters())
