"""Distillation: the whole step against its formula, teachers of every kind, those that are refused, and the cache."""

import json
import shutil
from dataclasses import replace
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gymtune.agents.models import CausalAttend, ModelConfig, apply_lora, init_model, load_any, load_model, save_model
from gymtune.agents.models.folder import copy_tokenizer
from gymtune.agents.models.init import random_decoder
from gymtune.tools.errors import ConfigError, DataError, RunError
from gymtune.trainers import Listeners, TrainConfig, dry_run, train
from gymtune.trainers import teacher as teacher_module
from gymtune.trainers.batch import make_rows, micro_batches
from gymtune.trainers.distill import Distill
from gymtune.trainers.experience import experiences_of
from gymtune.trainers.fused_divergence import TopTeacher
from gymtune.trainers.preflight import preflight
from gymtune.trainers.teacher_cache import About, TeacherCache
from gymtune.trainers.update import Updater
from gymtune.trainers.update_stats import UpdateStats

FP64 = 1e-10  # two float64 ways to the same number
KINDS = ["forward_kl", "reverse_kl", "jsd"]
WIDER = {"model_type": "qwen3", "hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}


@pytest.fixture
def config():
    """Make a config whose paths nobody opens."""

    def make(**changes):
        where = {"model": "unused", "output_dir": "unused", "data": "unused", "teacher_model": "teacher"}
        return TrainConfig(algo="distill", **(where | {"max_grad_norm": 1e9} | changes))

    return make


@pytest.fixture
def wider():
    """A float64 teacher of another width, with three ids more than the student's `decoder`."""
    shape = {"vocab_size": 34, "intermediate_size": 40, "num_hidden_layers": 3, "max_position_embeddings": 128}
    model = random_decoder(ModelConfig.from_dict(WIDER | shape | {"eos_token_id": 0, "tie_word_embeddings": True}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.double().parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model.requires_grad_(False)


@pytest.fixture
def rows(episode):
    """Make the rows of four episodes: two turns, one token, two segments, a beginning that another shares."""
    trajectories = [
        episode((0, [3, 4, 5]), (1, [7, 8, 0]), (0, [9]), (1, [1, 0]), name="a"),
        episode((0, [3, 4, 5]), (1, [0]), name="b"),
        episode((0, [2, 6, 6]), (1, [14]), "segment", (0, [2, 9]), (1, [15, 0]), name="c"),
        episode((0, [2, 6]), (1, [11, 12, 13, 0]), name="d"),
    ]
    experiences = experiences_of(trajectories, [1.0] * 4, need_logprobs=False)
    return make_rows(experiences)


def gradient(student, teacher, settings, rows):
    """Return loss, gradients and metrics of one optimizer batch; no weight is changed."""
    updater, stats = Updater(student, Distill(settings), settings, teacher), UpdateStats()
    updater.update([rows], 0, stats, dry=True)
    return stats.loss, [p.grad.clone() for p in student.parameters()], stats.metrics()


def slow_loss(student, teacher, rows, settings):
    """Return the mean over tokens of a CE + (1 - a) T^2 D, one forward pass and one softmax a token."""
    alpha, t, beta = settings.distill_alpha, settings.distill_temperature, settings.jsd_beta
    losses = []
    for row in rows:
        for place in row.places:
            ids, positions = torch.tensor([row.tokens[:place]]), torch.arange(place)[None]
            ours, theirs = (m.logits(m(ids, positions, CausalAttend())[0, -1]) for m in (student, teacher))
            theirs = theirs[: len(ours)]
            q, p = (ours / t).softmax(0), (theirs / t).softmax(0)
            if settings.distill_top_k is not None:
                order = p.argsort(descending=True)
                k = settings.distill_top_k
                q, p = (torch.cat((x[order[:k]], x[order[k:]].sum()[None])) for x in (q, p))
            mixed = beta * p + (1 - beta) * q
            divergence = {
                "forward_kl": (p * (p / q).log()).sum(),
                "reverse_kl": (q * (q / p).log()).sum(),
                "jsd": beta * (p * (p / mixed).log()).sum() + (1 - beta) * (q * (q / mixed).log()).sum(),
            }[settings.divergence]
            losses.append(alpha * -ours.log_softmax(0)[row.tokens[place]] + (1 - alpha) * t**2 * divergence)
    return sum(losses) / len(losses)


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"distill_temperature": 2.0, "distill_alpha": 0.2}, {"distill_top_k": 4}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_step_equals_the_formula(decoder, wider, config, rows, kind, changes):
    """The teacher has another width and depth and knows three ids more."""
    beta = {"jsd_beta": 0.3} if kind == "jsd" else {}
    student, settings = decoder(), config(divergence=kind, **(changes | beta))
    loss, found, _ = gradient(student, wider, settings, rows)
    wanted = slow_loss(student, wider, rows, settings)
    assert loss == pytest.approx(wanted.item(), abs=FP64)
    slow = torch.autograd.grad(wanted, list(student.parameters()))
    torch.testing.assert_close(found, list(slow), rtol=0, atol=FP64)
    assert max(g.abs().max() for g in slow) > 0.01


def test_micro_batches_change_nothing(decoder, wider, config, rows):
    outcomes = [gradient(decoder(), wider, config(micro_batch_tokens=size), rows) for size in (1, 8, 4096)]
    for loss, found, metrics in outcomes[1:]:
        assert loss == pytest.approx(outcomes[0][0], abs=FP64)
        assert metrics == pytest.approx(outcomes[0][2], abs=FP64)
        torch.testing.assert_close(found, outcomes[0][1], rtol=0, atol=FP64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it(decoder, config, rows, kind):
    loss, found, metrics = gradient(decoder(), decoder(), config(divergence=kind, distill_alpha=0.0), rows)
    assert abs(loss) < FP64
    assert max(g.abs().max() for g in found) < FP64
    assert abs(metrics["distill/divergence"]) < FP64
    assert metrics["distill/ce"] > 1


def test_alpha_one_is_sft(decoder, wider, config, rows):
    loss, found, metrics = gradient(decoder(), wider, config(distill_alpha=1.0), rows)
    plain = sum(-_logprob(decoder(), row, place) for row in rows for place in row.places) / metrics_tokens(rows)
    assert loss == pytest.approx(plain, abs=FP64)
    assert loss == pytest.approx(metrics["distill/ce"], abs=FP64)
    assert all(torch.isfinite(g).all() for g in found)


def metrics_tokens(rows):
    return sum(len(row.places) for row in rows)


def _logprob(model, row, place):
    hidden = model(torch.tensor([row.tokens[:place]]), torch.arange(place)[None], CausalAttend())
    return float(model.logits(hidden[0, -1]).log_softmax(0)[row.tokens[place]].detach())


def test_the_teacher_stays_what_it_is_and_the_student_comes_nearer(decoder, wider, config, rows):
    before = [weight.clone() for weight in wider.parameters()]
    settings, student = config(learning_rate=0.01, distill_alpha=0.0), decoder()
    updater, seen = Updater(student, Distill(settings), settings, wider), []
    for step in range(5):
        stats = UpdateStats()
        updater.update([rows], step, stats)
        seen.append(stats.metrics()["distill/divergence"])
    assert all(map(torch.equal, before, wider.parameters()))
    assert seen[-1] < seen[0]


# -- teachers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def teachers(tiny_model, tmp_path):
    """Make the folder of a teacher with the tiny model's tokenizer."""
    vocabulary = load_model(tiny_model).config.vocab_size

    def decoder(**changes):
        shape = {"vocab_size": vocabulary, "intermediate_size": 40, "num_hidden_layers": 3, "eos_token_id": 0}
        shape |= {"max_position_embeddings": 512, "tie_word_embeddings": True}
        return random_decoder(ModelConfig.from_dict(WIDER | shape | changes), seed=3)

    def make(name, **changes):
        folder = tmp_path / name
        folder.mkdir()
        if name == "foreign":
            sizes = {"vocab_size": vocabulary, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 512}
            GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
        elif name == "experts":
            experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
            save_model(decoder(**experts, moe_intermediate_size=16), folder)
        else:
            save_model(decoder(**changes), folder)
        copy_tokenizer(tiny_model, folder)
        return folder

    make.vocabulary = vocabulary
    return make


@pytest.fixture
def settings(taught_model, sums_file, tmp_path):
    """Make the config of a run of four steps, and its teacher's folder."""

    def make(teacher, name="run", **changes):
        where = {"model": str(taught_model), "output_dir": str(tmp_path / name), "data": str(sums_file)}
        base = where | {"teacher_model": str(teacher), "max_steps": 4, "batch_size": 8, "save_steps": 0}
        return TrainConfig(algo="distill", **(base | changes))

    return make


def run(settings):
    lines = []
    return train(settings, listeners=Listeners(on_step=lines.append)), lines


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["wider", "experts", "foreign"])
@pytest.mark.filterwarnings("ignore:.*loss_type.*")
def test_any_language_model_teaches(teachers, settings, name):
    folder, lines = run(settings(teachers(name), distill_alpha=0.0, learning_rate=0.01))
    assert folder.name == "full_dist"
    assert lines[-1]["distill/divergence"] < lines[0]["distill/divergence"]
    assert lines[0]["loss"] == pytest.approx(lines[0]["distill/divergence"], rel=1e-5)


def test_the_teacher_of_a_student_with_adapters_is_another_model(teachers, settings, taught_model):
    """And where it is the same folder, it is the student with its adapter off."""
    for teacher in (teachers("wider"), taught_model):
        _, lines = run(settings(teacher, f"run-{teacher.name}", lora_r=4, distill_alpha=0.0, learning_rate=0.01))
        if teacher == taught_model:
            assert abs(lines[0]["distill/divergence"]) < 1e-6
        else:
            assert 0.1 < lines[-1]["distill/divergence"] < lines[0]["distill/divergence"]


def test_an_adapter_learns_from_the_student_without_it(decoder, config, rows):
    """The gradient of a moved adapter is that of a student whose teacher is the base, a model of its own."""
    settings, found = config(model="same", teacher_model="same", distill_alpha=0.0), []
    other = config(model="same", teacher_model="other", distill_alpha=0.0)
    for each, teacher in ((settings, None), (other, decoder())):
        student = decoder()
        apply_lora(student, r=2, alpha=4.0, dropout=0.0, target_modules=["q_proj", "v_proj"], seed=0)
        generator = torch.Generator().manual_seed(0)
        trained = [p for p in student.parameters() if p.requires_grad]
        with torch.no_grad():
            for weight in trained:
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.3)
        updater, stats = Updater(student, Distill(each), each, teacher), UpdateStats()
        updater.update([rows], 0, stats, dry=True)
        found.append((stats.loss, [p.grad for p in trained]))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    assert found[0][0] > 0.01
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


def test_a_larger_vocabulary_is_cut_with_a_note(teachers, settings):
    teacher = teachers("larger", vocab_size=teachers.vocabulary + 7)
    found = preflight(settings(teacher))
    found.refuse()
    assert any("its logits are cut" in note and str(teachers.vocabulary + 7) in note for note in found.notes)
    notes = []
    train(settings(teacher), listeners=Listeners(on_note=notes.append))
    assert any("its logits are cut" in note for note in notes)
    assert not preflight(settings(teachers("equal"), "next")).notes


def test_rows_that_the_teacher_does_not_take_are_told_or_left_out(teachers, settings):
    teacher = teachers("short", max_position_embeddings=30)
    lengths = "more tokens than the 30 that the model takes"
    with pytest.raises(DataError, match=lengths):
        train(settings(teacher))
    assert run(settings(teacher, "less", drop_long=True, max_steps=1))[1]


def test_another_tokenizer_is_refused(teachers, settings, tmp_path):
    folder = tmp_path / "stranger"
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    init_model(folder, texts=["quite other words than those"] * 3, vocab_size=384, **shape)
    with pytest.raises(ConfigError, match=r"another tokenizer than the policy .*: id \d+ is '.*' to the policy"):
        train(settings(folder))
    swapped = teachers("swapped")
    file = swapped / "tokenizer.json"
    data = json.loads(file.read_text())
    first, second = list(data["model"]["vocab"])[-2:]
    vocab = data["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(data))
    assert len(AutoTokenizer.from_pretrained(swapped)) == teachers.vocabulary
    with pytest.raises(ConfigError, match=r"\(2 of \d+ ids differ\)"):
        train(settings(swapped))


def test_a_folder_that_is_no_model_is_told_with_the_rest(settings, tmp_path):
    findings = preflight(settings(tmp_path / "nothing")).findings
    assert [(f.what, f.mend) for f in findings if f.verdict == "wrong"] == [("teacher", "--teacher-model")]


def test_a_teacher_is_needed(config):
    with pytest.raises(ConfigError, match="teacher_model is not set"):
        config(teacher_model=None)
    with pytest.raises(ConfigError, match="distill_top_k is none: give a number"):
        config(teacher_cache="folder")
    with pytest.raises(ConfigError, match="jsd_beta: divergence is not jsd"):
        config(jsd_beta=0.5)


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch):
    """Count the teacher's forward passes."""
    made, plain = [], teacher_module.hidden_states
    monkeypatch.setattr(teacher_module, "hidden_states", lambda *args: made.append(args) or plain(*args))
    return made


@pytest.fixture
def cached(teachers, settings, tmp_path):
    """Make the config of a run that keeps what its teacher says."""
    teacher = teachers("wider")
    keys = {"distill_top_k": 5, "distill_temperature": 1.5, "teacher_cache": str(tmp_path / "cache")}
    return lambda name="run", **changes: settings(changes.pop("teacher", teacher), name, **(keys | changes))


def test_a_second_epoch_and_a_second_run_read_what_was_written(cached, passes, sums_file, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(sums_file.read_text().splitlines(keepends=True)[:8]))
    first, _ = run(cached(data=str(few)))
    assert len(passes) == 1  # four epochs of one batch
    second, _ = run(cached("second", data=str(few)))
    assert len(passes) == 1
    third, _ = run(cached("third", data=str(few), teacher_cache=None))
    assert len(passes) == 5
    assert (first.parent / "metrics.jsonl").exists()
    for other in (second, third):
        assert all(torch.equal(weight, weights(other)[name]) for name, weight in weights(first).items())


def test_what_is_read_is_what_is_computed_also_where_only_some_is_known(cached, passes, sums_file, tmp_path):
    """A cold cache, one that an evaluation's worth of rows is in already, and a warm one give equal runs."""
    lines = sums_file.read_text().splitlines(keepends=True)
    Random(0).shuffle(lines)
    data = tmp_path / "some.jsonl"
    data.write_text("".join(lines[:20]))  # epochs that end within a batch: known and unknown rows together
    cold, _ = run(cached("cold", data=str(data)))
    asked = len(passes)
    warm, _ = run(cached("warm", data=str(data)))
    assert len(passes) == asked < 4 + 1
    assert all(torch.equal(weight, weights(warm)[name]) for name, weight in weights(cold).items())


def test_what_is_stored_counts_also_beside_what_is_new(rows, tmp_path):
    """A teacher that says something else each time it is asked: each row keeps what was said of it first."""
    cache, asked = TeacherCache(tmp_path / "cache", About("mark", "float32", 1.0, 2, 31)), []

    def read(rows):
        (batch,) = micro_batches(rows, 4096, torch.device("cpu"))

        def ask():
            asked.append(len(batch.targets))
            return TopTeacher(batch.targets[:, None] + torch.arange(2), torch.rand(len(batch.targets), 3), 31)

        told = cache.read(batch, ask)
        assert torch.equal(told.ids[:, 0], batch.targets)  # each token has its own row's
        return {row.trajectory: part for row, part in zip(batch.rows, parts(told.logprobs, batch.rows), strict=True)}

    def parts(values, rows):
        return torch.split(values, [len(row.places) for row in rows])

    first = read(rows[:2])
    later = read(rows[1:])
    again = read([rows[0], *rows[1:]])
    assert len(asked) == 2
    assert torch.equal(first[1], later[1])
    assert torch.equal(first[0], again[0])
    assert torch.equal(later[3], again[3])
    twice = [rows[3], replace(rows[3], tokens=[9, *rows[3].tokens[1:]], trajectory=7)]
    twice.append(replace(twice[1], trajectory=8))
    equal = read(twice)
    assert torch.equal(equal[7], equal[8])
    assert rows[0].places == [3, 4, 5, 7, 8]
    read([replace(rows[0], places=[1, 4, 5, 7, 8])])  # the same tokens, others of them trained


def test_the_files_hold_what_the_teacher_says(cached, tmp_path):
    settings = cached()
    run(settings)
    files = sorted((tmp_path / "cache").glob("*/*.safetensors"))
    assert files
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.name.startswith(".")]
    for file in files:
        stored = load_file(file)
        assert stored["ids"].shape[1] == 5
        assert torch.allclose(stored["logprobs"].exp().sum(1), torch.ones(len(stored["ids"])), atol=1e-5)
    teacher = load_any(settings.teacher_model)
    assert int(max(load_file(file)["ids"].max() for file in files)) < teacher.config.vocab_size


def test_numbers_made_in_another_way_are_refused(cached, teachers, tmp_path):
    run(cached())
    other = teachers("other", num_hidden_layers=2)
    for changes, told in (
        ({"teacher": other}, "teacher [0-9a-f]+ there, [0-9a-f]+ here"),
        ({"distill_temperature": 1.0}, "temperature 1.5 there, 1.0 here"),
        ({"distill_top_k": 6}, "top_k 5 there, 6 here"),
        ({"dtype": "bfloat16"}, "dtype float32 there, bfloat16 here"),
    ):
        with pytest.raises(ConfigError, match=f"holds the numbers of another teacher: {told}. Name another folder"):
            train(cached("next", **changes))
    assert not (tmp_path / "next").exists()
    same = shutil.copytree(tmp_path / "wider", tmp_path / "copy")
    run(cached("next", teacher=same))  # another folder, the same teacher


def test_broken_files_are_named(cached, tmp_path):
    run(cached())
    file = next((tmp_path / "cache").glob("*/*.safetensors"))
    for path in (tmp_path / "cache").glob("*/*.safetensors"):
        path.write_bytes(file.read_bytes()[:40])
    with pytest.raises(RunError, match=r"safetensors: cannot read: .*; remove it"):
        train(cached("next"))
    (tmp_path / "cache" / "teacher.json").write_text("{")
    with pytest.raises(RunError, match=r"teacher.json: cannot read"):
        train(cached("again"))


def test_a_dry_run_writes_no_cache(cached, tmp_path):
    metrics = dry_run(cached())
    assert metrics["distill/divergence"] > 0
    assert not (tmp_path / "cache").exists()
