"""Layers, their precedence, and every way to be told that an option is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from gymtune.tools.errors import ConfigError
from gymtune.trainers.config import Resolved, TrainConfig, resolve
from gymtune.trainers.presets import DISTILL, FILE, PRESETS, SAMPLED, SERVERS

NEEDED = {
    algo: {"model": "m", "output_dir": "o"}
    | ({"env": "E-v0"} if "env" in preset.reads else {"data": "d.jsonl"})
    | ({"teacher_model": "t"} if "teacher_model" in preset.reads else {})
    for algo, preset in PRESETS.items()
}
ONLINE = [algo for algo, preset in PRESETS.items() if "env" in preset.reads]
EITHER = [algo for algo in ONLINE if "data" in PRESETS[algo].reads]
GROUPED = [algo for algo in ONLINE if {"min_group_size", "pairs"} & PRESETS[algo].reads and algo != "opd"]


def made(algo, *sets, **layers):
    options = {**NEEDED[algo], **layers.pop("options", {})}
    return resolve(algo, sets=sets, options=options, **layers)


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


# --- precedence -------------------------------------------------------------------------------------------------------


def test_each_layer_covers_the_one_below(toml):
    file = toml("learning_rate = 0.5\nseed = 5\n")
    layers = [
        (made("grpo"), 3e-4, "default"),
        (made("sft"), 1e-3, "preset sft"),
        (made("sft", file=file), 0.5, f"file {file}"),
        (made("sft", "learning_rate=0.25", file=file), 0.25, "command line"),
        (made("sft", options={"learning_rate": 0.25}, file=file), 0.25, "command line"),
    ]
    for resolved, value, origin in layers:
        assert resolved.config.learning_rate == value
        assert resolved.origin["learning_rate"] == origin
    assert layers[-1][0].origin["seed"] == f"file {file}"


def test_presets():
    assert made("grpo").config.averaging == "sequence_mean"
    assert made("grpo").config.epsilon_high is None
    assert made("cispo").config.averaging == "token_mean"
    assert made("cispo").config.epsilon_high == 5.0
    assert made("dr_grpo").config.scale_rewards == "none"
    assert made("gspo").config.importance_sampling_level == "sequence"
    assert made("rloo").config.kl_in == made("reinforce++").config.kl_in == "reward"


def test_python_users_get_the_preset_too():
    assert TrainConfig(algo="cispo", **NEEDED["cispo"]) == made("cispo").config
    assert TrainConfig(algo="sft", learning_rate=0.1, **NEEDED["sft"]).learning_rate == 0.1


def test_what_a_preset_brings_may_be_idle(tmp_path):
    """Only what somebody chose is refused where nothing reads it."""
    resolved = made("rloo", "beta=0.0")
    assert "kl_in" not in resolved.config.effective()
    resolved.dump(tmp_path / "config.json")
    assert Resolved.load(tmp_path / "config.json") == resolved
    with pytest.raises(ConfigError, match=r"kl_in \(from command line\): beta is 0"):
        made("rloo", "beta=0.0", "kl_in=reward")


def test_dicts_are_merged_by_key(toml):
    file = toml("[env_args]\nlevels = [1]\nsize = 3\ndeep = {a = 1, b = 2}\n")
    resolved = made("grpo", "env_args.levels=[1, 2]", "env_args.deep.b=5", "reward_weights.gt=2", file=file)
    assert resolved.config.env_args == {"levels": [1, 2], "size": 3, "deep": {"a": 1, "b": 5}}
    assert resolved.config.reward_weights == {"gt": 2.0}
    assert resolved.origin["env_args.levels"] == resolved.origin["env_args.deep.b"] == "command line"
    assert resolved.origin["env_args.size"] == f"file {file}"


def test_a_plain_value_in_a_dict_gives_way_to_a_deeper_one(toml):
    resolved = made("grpo", "env_args.a.b=1", file=toml("[env_args]\na = 3\n"))
    assert resolved.config.env_args == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("item", "key", "value"),
    [
        ("output_dir=2024", "output_dir", "2024"),
        ('output_dir="a b"', "output_dir", "a b"),
        ("output_dir=a=b", "output_dir", "a=b"),
        ("output_dir=true", "output_dir", "true"),
        ("output_dir=1\nseed=3", "output_dir", "1\nseed=3"),
        ("env_args.a=1\nb = 2", "env_args", {"a": "1\nb = 2"}),
        ("learning_rate=1e-5", "learning_rate", 1e-5),
        ("temperature=2", "temperature", 2.0),
        ("averaging = constant", "averaging", "constant"),
        ("save_total_limit=none", "save_total_limit", None),
        ("control=none", "control", "none"),
        ("mask_truncated_completions=true", "mask_truncated_completions", True),
    ],
)
def test_values_of_set(item, key, value):
    needed = {name: text for name, text in NEEDED["grpo"].items() if name != key}
    assert getattr(resolve("grpo", sets=[item], options=needed).config, key) == value


def test_paths_are_text():
    assert made("sft", options={"data": Path("x/y.jsonl")}).config.data == str(Path("x/y.jsonl"))


def test_same_value_twice_is_fine():
    assert made("grpo", "seed=3", "seed=3", options={"seed": 3}).config.seed == 3


def test_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        made("sft").config.seed = 3


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "sets", "message"),
    [
        ("grpo", ["learning_rat=1"], r"'learning_rat' \(from command line\)\. Did you mean 'learning_rate'"),
        ("grpo", ["learning_rate=fast"], r"learning_rate \(from command line\): wanted a valid number, came 'fast'"),
        ("grpo", ["seed=1.5"], r"seed \(from command line\): wanted a valid integer, came 1.5"),
        ("grpo", ["seed=true"], "seed .*wanted a valid integer, came True"),
        ("grpo", ["learning_rate=0"], "learning_rate .*wanted greater than 0, came 0"),
        ("grpo", ["learning_rate=inf"], "learning_rate .*wanted a finite number, came inf"),
        ("grpo", ["averaging=mean"], "averaging .*wanted 'token_mean', 'sequence_mean' or 'constant', came 'mean'"),
        ("grpo", ["device=gpu"], "device .*wanted cpu, cuda or cuda:N, came 'gpu'"),
        ("grpo", ["reward_weights.gt=much"], r"reward_weights.gt \(from command line\): wanted a valid number"),
        ("grpo", ["env_args=3"], "env_args .*wanted a valid dictionary, came 3"),
        ("grpo", ["env_args.day=1979-05-27"], "env_args.day .*a value that JSON can hold"),
        ("grpo", ["seed.x=3"], "seed .*wanted a valid integer"),
        ("grpo", ["num_generations=0"], "num_generations .*wanted greater than or equal to 1, came 0"),
        ("grpo", ["min_group_size=1"], "min_group_size .*wanted greater than or equal to 2, came 1"),
        ("grpo", ["min_group_size=9"], "num_generations must be at least min_group_size 9, came 8"),
        ("grpo", ["credit=turn", "control=shuffle_rewards"], "'shuffle_rewards' deals out rewards of episodes"),
        ("rloo", ["credit=turn"], "takes it for one action: use token or sequence"),
        ("dapo", ["overlong_buffer=257"], "overlong_buffer 257 is more than the max_completion_length 256"),
        ("grpo", ["kl_in=reward"], "kl_in .*beta is 0, so no KL counts"),
        ("rloo", ["beta=0.0", "kl_estimator=k3"], "kl_estimator .*beta is 0, so no KL counts"),
        ("grpo", ["importance_sampling_cap=2.0"], "importance_sampling_correction is none, so nothing is capped"),
        ("reinforce++", ["min_group_size=3"], r"does not read it; grpo, dr_grpo, dapo, \.\.\. would"),
        ("gspo", ["importance_sampling_level=token"], r"pins it to 'sequence' .*grpo, dr_grpo, dapo, \.\.\. leave it"),
        ("grpo", ["max_resampling=2"], "max_resampling .*dynamic_sampling is false, so no group is sampled anew"),
        ("grpo", ["normalize_scores=true"], "normalize_scores .*no reward model or function scores"),
        ("grpo", ["score_clip=1.0", "reward_weights.gt=2.0"], "score_clip .*no reward model or function scores"),
        ("ppo", ["dynamic_sampling=true"], "--algo ppo does not read it"),
        ("grpo", ["thinking_ratio=1.5"], "thinking_ratio .*wanted less than or equal to 1, came 1.5"),
        (
            "grpo",
            ["thinking_ratio=0.5", "chat_template_kwargs.enable_thinking=true"],
            "thinking_ratio draws by episode what chat_template_kwargs fixes by enable_thinking: keep one of them",
        ),
        ("dr_grpo", ["scale_rewards=group"], "pins it to 'none' .*favours easy and hard tasks"),
        ("dapo", ["dynamic_sampling=false"], "pins it to True .*groups of equal rewards are sampled anew"),
        ("reinforce++", ["scale_rewards=none"], "pins it to 'batch' .*the whole batch is the baseline"),
        (
            "ppo",
            ["scale_rewards=none"],
            r"scale_rewards .*--algo ppo does not read it; grpo, dr_grpo, dapo, \.\.\. would",
        ),
        ("grpo", ["mini_batches=7"], r"mini_batches must divide the 256 episodes .*32 x num_generations 8\), came 7"),
        ("dpo", ["num_generations=1"], "--algo dpo compares the episodes of a group: num_generations must be at least"),
        ("dpo", ["data=d"], "env .*data is given, so nothing is sampled"),
        ("dpo", ["batch_size=8"], "batch_size .*no data is given, episodes are sampled"),
        ("dpo", ["env=none"], "env is not set.*Or it learns from data, a file"),
        ("dpo", ["beta=0.0"], "--algo dpo scales what a reply earns by beta, which is 0"),
        ("ipo", ["label_smoothing=0.1"], "label_smoothing .*--algo ipo does not read it; dpo and simpo would"),
        ("orpo", ["reference_free=true"], "reference_free .*--algo orpo does not read it; dpo and ipo and kto would"),
        ("simpo", ["averaging=token_mean"], "pins it to 'sequence_mean' .a pair counts once., came 'token_mean'"),
        ("kto", ["pairs=all"], r"pairs .*--algo kto does not read it; reward, dpo, ipo, \.\.\. would"),
        ("grpo", ["env=none"], "env is not set"),
        ("sft", ["data=none"], "data is not set"),
        ("sft", ["averaging=constant"], "averaging 'constant' divides by"),
        ("cispo", ["epsilon_high=none"], "caps the ratio at epsilon_high, which is none"),
        ("sft", ["warmup_steps=101"], "warmup_steps 101 is more than max_steps 100"),
        (
            "cispo",
            ["averaging=constant"],
            r"--algo cispo pins it to 'token_mean' .*came 'constant'\. sft, distill, grpo, \.\.\. leave it open",
        ),
        ("sft", ["epsilon=0.3"], r"epsilon .*--algo sft does not read it; grpo, dr_grpo, dapo, \.\.\. would"),
        ("sft", ["beta=0.0"], r"beta .*--algo sft does not read it; dpo, ipo, orpo, \.\.\. would"),
        ("cispo", ["epsilon=0.2"], r"epsilon .*--algo cispo does not read it; grpo, dr_grpo, dapo, \.\.\. would"),
        ("grpo", ["min_reward=1.0"], "min_reward .*--algo grpo does not read it; sft and distill would"),
        ("grpo", ["lr_scheduler_type=constant", "min_lr_ratio=0.1"], "min_lr_ratio .*a constant learning rate"),
        ("grpo", ["lora_alpha=16"], "lora_alpha .*lora_r is none, so there is no adapter"),
        (
            "grpo",
            ["lora_r=8", "lora_dropout=0.1"],
            "lora_dropout .*--algo grpo does not read it; sft, reward, dpo, ... would",
        ),
        ("grpo", ["lora_r=0"], "lora_r .*wanted .*1, came 0"),
        ("grpo", ["seed=1", "seed=2"], "seed is given twice on the command line: seed = 1 and seed = 2"),
        ("grpo", ["env_args.a=1", "env_args.a.b=1"], "env_args.a.b is given twice"),
        ("grpo", ["seed"], "--set wants key=value, came 'seed'"),
        ("grpo", ["env_args.=1"], "--set wants key=value"),
        ("grpo", ["algo=sft"], "algo is 'sft' in the command line but 'grpo' was asked for"),
    ],
)
def test_refusals_on_the_command_line(algo, sets, message):
    keys = {item.partition("=")[0] for item in sets}
    needed = {key: value for key, value in NEEDED[algo].items() if key not in keys}
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(algo, sets=sets, options=needed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = 1\nlearning_rat = 2\n", r"unknown key 'learning_rat' \(from file .*run.toml\)\. Did you mean"),
        ('seed = "one"\n', r"seed \(from file .*run.toml\): wanted a valid integer, came 'one'"),
        ("min_reward = 1.0\n", r"min_reward \(from file .*run.toml\): --algo grpo does not read it"),
        ("seed = 1\nepsilon 3\n", r"run.toml is not TOML: .*line 2"),
        ('algo = "sft"\n', r"algo is 'sft' in the file .*run.toml but 'grpo'"),
    ],
)
def test_refusals_in_the_file(toml, text, message):
    with pytest.raises(ConfigError, match=message):
        made("grpo", file=toml(text))


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the config file .*no.toml: No such file"):
        made("grpo", file=tmp_path / "no.toml")


def test_option_and_set_must_agree():
    with pytest.raises(ConfigError, match="seed is given twice"):
        made("grpo", "seed=1", options={"seed": 2})


def test_unknown_algo():
    with pytest.raises(ConfigError, match=r"unknown algo 'grp'\. Did you mean 'grpo'"):
        resolve("grp")
    with pytest.raises(ConfigError, match=r"unknown algo 'grp'\. Did you mean 'grpo'"):
        TrainConfig(algo="grp", model="m", output_dir="o")


@pytest.mark.parametrize("algo", ONLINE)
def test_a_group_of_one_is_refused_where_the_group_is_the_baseline(algo):
    if algo in GROUPED:
        with pytest.raises(ConfigError, match=f"--algo {algo} compares the episodes of a group: num_generations"):
            made(algo, "num_generations=1")
    else:
        assert algo in {"ppo", "reinforce++", "kto", "opd"}
        assert made(algo, "num_generations=1").config.num_generations == 1


def test_required_keys_are_named():
    with pytest.raises(ConfigError, match="model is required and not set; output_dir is required and not set"):
        resolve("grpo")


def test_python_users_get_the_same_errors():
    with pytest.raises(ConfigError, match=r"^unknown key 'learning_rat'\. Did you mean"):
        TrainConfig(algo="sft", learning_rat=1, **NEEDED["sft"])
    with pytest.raises(ConfigError, match=r"^epsilon: --algo sft does not read it"):
        TrainConfig(algo="sft", epsilon=0.2, **NEEDED["sft"])


# --- the presets themselves -------------------------------------------------------------------------------------------


def test_every_key_is_read_by_an_algorithm_and_every_read_key_exists():
    assert set().union(*(preset.reads for preset in PRESETS.values())) == TrainConfig.model_fields.keys()


@pytest.mark.parametrize("algo", PRESETS)
def test_presets_set_and_pin_only_what_is_read(algo):
    preset = PRESETS[algo]
    assert preset.values.keys() <= preset.reads
    assert preset.pinned.keys() <= preset.values.keys()


def test_every_field_is_described():
    assert all(field.description for field in TrainConfig.model_fields.values())


# --- table, dump, load ------------------------------------------------------------------------------------------------


#: Keys of the table's test that an algorithm reads, but not under these values.
IDLE = {
    "min_lr_ratio": lambda config: config.lr_scheduler_type == "constant",
    "kl_estimator": lambda config: config.beta == 0,
    "kl_in": lambda config: config.beta == 0,
    "importance_sampling_cap": lambda config: config.importance_sampling_correction == "none",
    "max_resampling": lambda config: not config.dynamic_sampling,
    "normalize_scores": lambda config: config.reward_model is None,
    "score_clip": lambda config: config.reward_model is None,
    "sync_ref_model": lambda config: config.beta == 0,
    "ref_model_sync_steps": lambda config: not config.sync_ref_model,
    "ref_model_mixup_alpha": lambda config: not config.sync_ref_model,
    "debug_interval": lambda config: not config.debug_mode,
    "jsd_beta": lambda config: config.divergence != "jsd",
    "eval_data": lambda config: config.eval_steps == 0,
    "eval_tasks": lambda config: config.eval_steps == 0,
    "eval_env_args": lambda config: config.eval_steps == 0,
}


#: Each algorithm, and those that learn from a file or an env with the file too.
SOURCES = [*((algo, {}) for algo in PRESETS), *((algo, {"env": None, "data": "d.jsonl"}) for algo in EITHER)]


@pytest.mark.parametrize(("algo", "source"), SOURCES)
def test_table_shows_what_is_read_and_is_toml(algo, source, toml):
    options = {key: value for key, value in (NEEDED[algo] | source).items() if value is not None}
    changes = ["seed=4", "lora_r=8", "lr_scheduler_type=constant", "save_total_limit=none"]
    resolved = resolve(algo, sets=changes, options=options)
    rows = resolved.table()
    idle = {key for key, is_idle in IDLE.items() if is_idle(resolved.config)}
    if algo == "opd":  # the teacher judges sampled tokens, and rewards teach nothing
        idle |= DISTILL - {"teacher_model"} | {"scale_rewards", "min_group_size", "overlong_buffer"}
    idle |= SERVERS  # backend is torch
    if algo in EITHER:
        idle |= SAMPLED - {"eval_steps"} if source else FILE | {"eval_data"}
    assert {key for key, _, _ in rows} == PRESETS[algo].reads - idle
    assert ("seed", "4", "command line") in rows
    assert ("max_steps", "100", "default") in rows
    assert ("save_total_limit", '"none"', "command line") in rows
    file = toml("".join(f"{key} = {value}\n" for key, value, _ in rows))
    assert resolve(algo, file=file).config == resolved.config


@pytest.mark.parametrize("algo", PRESETS)
def test_dump_and_load(algo, tmp_path):
    resolved = made(algo, "lr_scheduler_type=constant", options={"output_dir": "结果"})
    resolved.dump(tmp_path / "config.json")
    assert Resolved.load(tmp_path / "config.json") == resolved
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": [1], "origin": {}}', '{"config": {}, "origin": 3}'])
def test_load_names_a_broken_file(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json is not the config.json of a run"):
        Resolved.load(tmp_path / "config.json")


def test_load_checks_values(tmp_path):
    path = tmp_path / "config.json"
    made("sft").dump(path)
    record = json.loads(path.read_text())
    record["config"]["seed"] = "one"
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"seed \(from file .*config.json\): wanted a valid integer"):
        Resolved.load(path)


def test_config_needs_no_torch():
    code = "import sys, gymtune.trainers.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
