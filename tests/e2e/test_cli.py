"""The command line as people type it: the whole path, and one line for everything a user can mend."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import pytest

from gymtune import __version__, cli
from gymtune.agents import read_trajectories

GYMTUNE = str(Path(sys.executable).with_name("gymtune"))
ROOT = Path(cli.__file__).parent
CALCULATOR, ARITHMETIC = "gymtune/Calculator-v0", "gymtune/Arithmetic-v0"
HELP_MODULES = 300  # half are of the interpreter and of typer; with gymtune.tools alone it would be 359
SLOW_ENV = '''
import time
import gymnasium
from gymtune.envs.arithmetic import ArithmeticEnv

class SlowEnv(ArithmeticEnv):
    """Sleeps in each step."""
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)

gymnasium.register("Slow-v0", entry_point="slow_env:SlowEnv")
'''


@dataclass(frozen=True)
class Said:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of an error that the user can mend."""
        assert self.code == 2, self
        assert self.err.startswith("gymtune: error: "), self
        assert self.err.count("\n") == 1, self
        return self.err.removeprefix("gymtune: error: ").rstrip("\n")


Run = Callable[..., Said]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process, through the console script's own function."""

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["gymtune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture(scope="session")
def gold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripted episodes without tokens."""
    from gymtune.agents import ScriptedAgent
    from gymtune.agents.collect import CollectConfig, collect

    path = tmp_path_factory.mktemp("gold") / "gold.jsonl"
    collect(path, ScriptedAgent(), CollectConfig(env=CALCULATOR, agent="scripted", n=24))
    return path


TRAIN = f"train --algo grpo --env {CALCULATOR}"
GRPO = tuple(TRAIN.split())
SCRIPTED = "rollout --out x --agent scripted"
SMALL = ("--max-steps", 2, "--prompts-per-step", 2, "--num-generations", 2, "--max-completion-length", 6)


# -- the whole path ----------------------------------------------------------------------------------------------------


def test_from_nothing_to_an_evaluated_model(run: Run, tmp_path: Path) -> None:
    model, file, sft, grpo = tmp_path / "m", tmp_path / "gold.jsonl", tmp_path / "sft", tmp_path / "grpo"
    size = ("--hidden-size", 16, "--layers", 1, "--heads", 2, "--kv-heads", 1, "--intermediate-size", 32)
    said = run("models", "init", "--out", model, "--env", CALCULATOR, *size, "--vocab-size", 400)
    assert (said.code, said.out) == (0, f"model {model}\n")
    said = run("rollout", "--env", CALCULATOR, "--agent", "scripted", "--model", model, "-n", 12, "--out", file)
    assert said.code == 0
    assert said.out.startswith("12 episodes, success 12/12, mean reward 1.000, ")
    assert said.err.startswith("rollout 12/12  reward 1.000  ")
    said = run("train", "--algo", "sft", "--model", model, "--data", file, "--output", sft, "--max-steps", 3)
    assert said.code == 0
    assert said.out == f"model {sft}/full_sft\ncurve {sft}/curve.png\n"
    assert [line.split()[1] for line in said.err.splitlines()] == ["1/3", "2/3", "3/3"]
    said = run(*GRPO, "--model", sft / "full_sft", "--output", grpo, *SMALL, "--env-arg", "levels=[1]")
    assert said.code == 0
    assert (grpo / "curve.png").is_file()
    sampled = [json.loads(line) for line in (grpo / "trajectories" / "step_000001.jsonl").read_text().splitlines()]
    assert {line["metadata"]["level"] for line in sampled} == {1}
    table = tmp_path / "e.json"
    few = ("-n", 4, "--max-completion-length", 4, "--greedy", "--json", table)
    said = run("eval", "--env", CALCULATOR, "--model", grpo / "agent", "--model", model, *few)
    assert said.code == 0
    assert "sampled success % [95 %]" in said.out
    assert "greedy success % [95 %]" in said.out
    written = json.loads(table.read_text())
    assert written["env_args"] == {"split": "test"}
    assert set(written["models"]) == {str(grpo / "agent"), str(model)}
    assert written["sampling"]["greedy"]["temperature"] == 0
    assert written["models"][str(model)]["greedy"]["episodes"] == 4


def test_a_sampled_rollout_holds_groups_with_their_log_probs(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    sampling = ("--temperature", 0.7, "--top-k", 50, "--max-completion-length", 5)
    out = tmp_path / "r.jsonl"
    said = run(
        "rollout", "--env", ARITHMETIC, "--model", tiny_model, "-n", 3, "--num-generations", 2, "--out", out, *sampling
    )
    assert said.code == 0
    episodes = list(read_trajectories(out))
    assert len(episodes) == 6
    assert len({t.group_id for t in episodes}) == 3
    for t in episodes:
        assert all((p is not None) == (m == 1) for p, m in zip(t.logprobs, t.response_mask, strict=True))
        drawn = {name: value for name, value in t.sampling.model_dump().items() if name not in ("min_p", "stop")}
        assert drawn == {"temperature": 0.7, "top_p": 1.0, "top_k": 50, "max_new_tokens": 5}
    same = ("--temperature", 0.7, "--top-k", 49, "--max-completion-length", 5)
    again = run(
        "rollout",
        "--env",
        ARITHMETIC,
        "--model",
        tiny_model,
        "-n",
        3,
        "--num-generations",
        2,
        "--out",
        out,
        *same,
        "--resume",
    )
    assert "has sampling = " in again.line


def test_a_scripted_rollout_without_a_model_holds_messages_only(gold: Path) -> None:
    assert all(not t.tokens and t.messages for t in read_trajectories(gold))


def test_print_config_shows_values_with_their_origin_and_runs_nothing(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'model = "m"\noutput_dir = "{tmp_path}/run"\nbeta = 0.25\n[env_args]\nsplit = "train"\n')
    said = run(
        *GRPO, "--config", file, "--epsilon", 0.1, "--env-arg", "size=7", "--set", "mini_batches=2", "--print-config"
    )
    assert said.code == 0
    rows = {cells[0]: cells[1:] for line in said.out.splitlines() if len(cells := line.split()) > 2}
    assert rows["beta"] == ["0.25", "file", str(file)]
    assert rows["epsilon"] == ["0.1", "command", "line"]
    assert rows["env_args.size"] == ["7", "command", "line"]
    assert rows["env_args.split"] == ['"train"', "file", str(file)]
    assert rows["mini_batches"] == ["2", "command", "line"]
    assert rows["averaging"] == ['"sequence_mean"', "preset", "grpo"]
    assert rows["temperature"] == ["1.0", "default"]
    assert not (tmp_path / "run").exists()


NAMED = [
    ("max-steps", 7), ("learning-rate", 0.5), ("num-generations", 6), ("prompts-per-step", 9), ("temperature", 0.5),
    ("max-completion-length", 11), ("beta", 0.5), ("epsilon", 0.5), ("epsilon-high", 0.5), ("seed", 5),
    ("save-steps", 3), ("control", "shuffle_rewards"), ("device", "cuda:1"), ("dtype", "bfloat16"),
    ("torch-threads", 2), ("eval-steps", 5), ("entropy-coef", 0.5), ("kl-estimator", "k2"),
]  # fmt: skip


def test_every_named_option_reaches_its_key(run: Run) -> None:
    options = [part for name, value in NAMED for part in (f"--{name}", value)]
    said = run(*GRPO, "--model", "m", "--output", "o", *options, "--print-config")
    rows = {cells[0]: cells[1:] for line in said.out.splitlines() if len(cells := line.split()) > 2}
    for name, value in NAMED:
        wanted = json.dumps(value)
        assert rows[name.replace("-", "_")] == [wanted, "command", "line"], name
    said = run("train", "--algo", "sft", "--model", "m", "--output", "o", "--data", "d", "--batch-size", 3,
               "--min-reward", 0.5, "--print-config")  # fmt: skip
    rows = {cells[0]: cells[1:] for line in said.out.splitlines() if len(cells := line.split()) > 2}
    assert (rows["batch_size"][0], rows["min_reward"][0], rows["data"][0]) == ("3", "0.5", '"d"')
    said = run("train", "--algo", "ppo", "--model", "m", "--output", "o", "--trajectories", "t", "--lam", 0.5,
               "--gamma", 0.75, "--critic-model", "c", "--debug-mode", "--log", "wandb", "--log", "trackio",
               "--print-config")  # fmt: skip
    rows = {cells[0]: cells[1:] for line in said.out.splitlines() if len(cells := line.split()) > 2}
    assert [rows[key][0] for key in ("lam", "gamma", "critic_model", "trajectories", "debug_mode")] == [
        "0.5", "0.75", '"c"', '"t"', "true",
    ]  # fmt: skip
    assert rows["report_to"] == ['["wandb",', '"trackio"]', "command", "line"]


def test_preflight_prints_a_table_and_runs_nothing(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    given = (*GRPO, "--model", tiny_model, "--output", tmp_path / "run", "--preflight")
    said = run(*given)
    assert said.code == 0
    seen = dict(line.split()[:2] for line in said.out.splitlines()[3:] if line)
    assert (seen["model"], seen["tokenizer"], seen["disk"]) == ("fits", "fits", "fits")
    assert "WRONG" not in said.out
    said = run(*given, "--env-arg", "splt=x", "--device", "cuda:99", "--reward-model", tmp_path / "none")
    assert said.code == 1
    wrong = [line.split()[0] for line in said.out.splitlines() if " WRONG " in line]
    assert wrong == ["device", "rewards", "env"]
    assert not said.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_refuses_all_that_is_wrong_in_one_line(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    line = run(
        *GRPO, "--model", tiny_model, "--output", tmp_path / "run", "--env-arg", "x=1", "--device", "cuda:9"
    ).line
    assert line.startswith("2 things are wrong; --preflight shows them as a table. (1) device: ")


def test_a_dry_run_prints_metrics_and_writes_nothing(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    said = run(*GRPO, "--model", tiny_model, "--output", tmp_path / "run", *SMALL, "--dry-run")
    assert said.code == 0
    rows = {cells[0]: cells[1] for line in said.out.splitlines() if len(cells := line.split()) == 2}
    assert {"loss", "grad_norm", "reward", "completions/mean_length"} <= rows.keys()
    assert list(tmp_path.iterdir()) == []


def test_learning_from_a_stored_rollout(run: Run, taught_model: Path, sampled_file: Path, tmp_path: Path) -> None:
    given = ("train", "--algo", "grpo", "--model", taught_model, "--trajectories", sampled_file)
    said = run(*given, "--output", tmp_path / "run", "--max-steps", 2, "--prompts-per-step", 4)
    assert said.code == 0
    assert said.out.startswith(f"model {tmp_path}/run/grpo\n")
    assert said.err.startswith("note: trajectories: ")
    assert "equal rewards: they teach nothing" in said.err


def test_arguments_of_the_chat_template(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    rollout = ("rollout", "--env", ARITHMETIC, "-n", 1, "--out", tmp_path / "x.jsonl", "--max-completion-length", 2)
    argument = ("--chat-template-arg", "enable_thinking=false")
    model = shutil.copytree(tiny_model, tmp_path / "thinker")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{%- if enable_thinking -%}<think>{%- endif -%}")
    assert run(*rollout, "--model", model, *argument).code == 0
    (episode,) = read_trajectories(tmp_path / "x.jsonl")
    assert episode.metadata["chat_template_kwargs"] == {"enable_thinking": False}
    unread = ("--chat-template-arg", "thinkin=false")
    assert "'thinkin': the template of" in run("eval", "--env", ARITHMETIC, "--model", tiny_model, *unread).line
    assert "'thinkin': the template of" in run(*GRPO, "--model", tiny_model, "--output", "o", *unread).line
    (tmp_path / "x.jsonl").unlink()
    assert "has none: give --model DIR" in run(*rollout, "--agent", "scripted", *argument).line
    assert "--chat-template-arg wants key=value, came 'x'" in run(*rollout, "--chat-template-arg", "x").line


def test_envs_list_show_and_check(run: Run) -> None:
    listed = run("envs", "list")
    assert listed.code == 0
    assert all(env_id in listed.out for env_id in (CALCULATOR, ARITHMETIC))
    shown = run("envs", "show", CALCULATOR, "--env-arg", "levels=[1]")
    assert shown.code == 0
    for part in ("split", '"additionalProperties": false', "[user] What is", "[gold] <tool_call>", "[gt] "):
        assert part in shown.out
    checked = run("envs", "check", "--all")
    assert checked.code == 0
    assert checked.out.count("holds") >= 12


def test_envs_check_of_a_broken_env_ends_in_1(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_env.py").write_text(
        "import gymnasium\n"
        "from gymtune.envs.arithmetic import ArithmeticEnv\n"
        "class Broken(ArithmeticEnv):\n"
        "    def step(self, action):\n"
        "        return super().step('-1')\n"
        "gymnasium.register('Broken-v0', entry_point='broken_env:Broken')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    said = run("envs", "check", "broken_env:Broken-v0")
    assert said.code == 1
    assert "BROKEN" in said.out


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("rolout", "No such command 'rolout'. Did you mean 'rollout'?"),
        ("rollout --evn x", "no such option --evn. Did you mean '--env'?"),
        (f"rollout --env {ARITHMETIC}", "Missing option '--out'."),
        (f"rollout --env {ARITHMETIC} --out x -n many", "Invalid value for '-n'"),
        (f"rollout --env {ARITHMETIC} --out x", "--agent model needs --model DIR"),
        (f"rollout --env {ARITHMETIC} --out x --agent script", "'script' is not one of 'model', 'scripted'"),
        (f"rollout --env {ARITHMETIC} --out x --model none", "none: no such model folder"),
        (f"{SCRIPTED} --env gymtune/Calculater-v0", f"Did you mean '{CALCULATOR}'?"),
        (f"{SCRIPTED} --env {ARITHMETIC} --top-k 3", "does not read top_k"),
        (f"{SCRIPTED} --env {ARITHMETIC} --env-arg splt=test", "Did you mean 'split'?"),
        (f"{SCRIPTED} --env {ARITHMETIC} --env-arg split", "wants key=value, came 'split'"),
        ("train --algo grop --model m --output o", "unknown algo 'grop'. Did you mean 'grpo'?"),
        (
            f"{TRAIN} --model m --output o --set max_step=3",
            "unknown key 'max_step' (from command line). Did you mean 'max_s",
        ),
        (f"{TRAIN} --model m --output o --epsilon 2", "epsilon (from command line): wanted"),
        (f"{TRAIN} --output o", "model is required and not set"),
        (f"{TRAIN} --model none --output o", "none: no such model folder"),
        ("train --algo sft --model m --output o --data d --beta 1", "--algo sft does not read it"),
        ("eval --env gymtune/Calculater-v0 --model m", f"Did you mean '{CALCULATOR}'?"),
        (f"eval --env {CALCULATOR} --model none", "none: no such model folder"),
        (f"{TRAIN} --model m --output o --dry-run --preflight", "--dry-run and --resume: give one of them"),
        ("train --algo grpo --model m --output o", "Or it learns from trajectories, a file of stored episodes"),
        ("envs show gymtune/Calc-v0", "unknown env 'gymtune/Calc-v0'."),
        ("envs check", "name one environment, or give --all"),
        ("models init --out m --env gymtune/Arithmetik-v0", f"Did you mean '{ARITHMETIC}'?"),
        (f"models init --out m --env {ARITHMETIC} --vocab-size 9", "vocab_size=9, wanted at least 265"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, tmp_path, monkeypatch, command, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run(*command.split()).line
    assert not list(tmp_path.iterdir())


def test_an_unknown_key_in_a_file_names_the_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("learning_rat = 1\n")
    line = run(*GRPO, "--config", file).line
    assert line == f"unknown key 'learning_rat' (from file {file}). Did you mean 'learning_rate'?"


def test_a_model_folder_without_weights(run: Run, tiny_model: Path, gold: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    shutil.copytree(tiny_model, model)
    (model / "model.safetensors").unlink()
    for command in (
        ("rollout", "--env", ARITHMETIC, "--out", tmp_path / "x.jsonl"),
        ("train", "--algo", "sft", "--data", gold, "--output", tmp_path / "run"),
        ("eval", "--env", ARITHMETIC),
    ):
        assert f"{model}: no weights" in run(*command, "--model", model).line
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m"]


def test_data_that_is_cut_in_the_middle(run: Run, tiny_model: Path, gold: Path, tmp_path: Path) -> None:
    cut, train = tmp_path / "cut.jsonl", ("train", "--algo", "sft", "--model", tiny_model, "--output", tmp_path / "run")
    whole = gold.read_bytes()
    cut.write_bytes(whole[:-100])
    assert f"{cut}: line 24: the line is cut in the middle" in run(*train, "--data", cut).line
    lines = whole.splitlines(keepends=True)
    cut.write_bytes(b"".join([*lines[:4], lines[4][:50], b"\n", *lines[5:]]))
    assert f"{cut}: line 5: " in run(*train, "--data", cut).line
    assert "cannot read: No such file" in run(*train, "--data", tmp_path / "none.jsonl").line
    assert not (tmp_path / "run").exists()


def test_an_output_folder_that_holds_another_run(run: Run, tiny_model: Path, gold: Path, tmp_path: Path) -> None:
    train = (
        "train",
        "--algo",
        "sft",
        "--model",
        tiny_model,
        "--data",
        gold,
        "--output",
        tmp_path / "run",
        "--batch-size",
        2,
    )
    assert run(*train, "--max-steps", 1).code == 0
    assert f"output folder {tmp_path}/run already holds another run" in run(*train, "--max-steps", 1).line
    assert "has max_steps = 1, now 2 was asked for" in run(*train, "--max-steps", 2, "--resume").line
    assert run(*train, "--max-steps", 1, "--resume").code == 0


def test_nowhere_to_write(run: Run, tiny_model: Path, gold: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    assert "cannot write" in run("rollout", "--env", ARITHMETIC, "--agent", "scripted", "--out", below).line
    sft = ("train", "--algo", "sft", "--model", tiny_model, "--data", gold, "--max-steps", 1)
    assert "cannot write" in run(*sft, "--output", below).line
    few = ("--model", tiny_model, "-n", 1, "--max-completion-length", 2)
    assert "cannot write" in run("eval", "--env", ARITHMETIC, *few, "--json", below).err
    assert "cannot write" in run("models", "init", "--env", ARITHMETIC, "--out", below).line


def test_an_existing_file_and_a_differing_resume(run: Run, tmp_path: Path) -> None:
    rollout = ("rollout", "--env", ARITHMETIC, "--agent", "scripted", "--out", tmp_path / "x.jsonl")
    assert run(*rollout, "-n", 2).code == 0
    assert "is there already: go on with --resume" in run(*rollout, "-n", 2).line
    assert "has n = 2, now 3 was asked for" in run(*rollout, "-n", 3, "--resume").line
    assert run(*rollout, "-n", 2, "--resume").code == 0


def test_an_env_that_cannot_go_on_is_one_line_and_exit_code_1(run: Run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "no_gold.py").write_text(
        "import gymnasium\n"
        "from gymtune.envs import ChatEnv, Task\n"
        "from gymtune.rewards import gt_component\n"
        "from gymtune.rewards.numeric import NumericChecker\n"
        "class NoGold(ChatEnv):\n"
        "    def __init__(self, **options):\n"
        "        task = Task('t', ({'role': 'user', 'content': '1 + 1?'},), '2')\n"
        "        super().__init__([task], [gt_component(NumericChecker())], **options)\n"
        "gymnasium.register('NoGold-v0', entry_point='no_gold:NoGold')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "x.jsonl"
    said = run("rollout", "--env", "no_gold:NoGold-v0", "--agent", "scripted", "-n", 1, "--out", out)
    assert said.code == 1
    last = said.err.splitlines()[-1]
    assert last.startswith(f"gymtune: error: {out}: all 1 episodes failed, the first one with: ")
    assert last.endswith("task t has no gold episode; the scripted agent has nothing to play")


def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from gymtune.tools.errors import ConfigError

    monkeypatch.setenv("GYMTUNE_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["gymtune", "envs", "show", "none"])
    with pytest.raises(ConfigError):
        cli.main()


# -- the program itself ------------------------------------------------------------------------------------------------


def test_version_and_help(run: Run) -> None:
    assert run("--version").out == f"gymtune {__version__}\n"
    said = run()
    assert said.code == 2
    assert not said.err
    for command in ("rollout", "train", "eval", "envs", "models"):
        assert command in said.out
        assert run(command, "--help").code == 0
    assert run("envs").out.count("\n") > 5


def test_help_loads_little_and_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['gymtune', '--help']; from gymtune.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'gymnasium', 'numpy', 'matplotlib', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        f"assert len(sys.modules) < {HELP_MODULES}, sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, stdout=subprocess.PIPE)
    done = subprocess.run([GYMTUNE, "--help"], check=True, cwd=tmp_path, capture_output=True, text=True)
    assert "rollout" in done.stdout


def test_the_file_itself_is_the_same_program(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "cli.py"), "envs", "list"]
    by_file = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    by_name = subprocess.run([GYMTUNE, "envs", "list"], check=True, cwd=tmp_path, capture_output=True, text=True)
    assert by_file.stdout == by_name.stdout
    assert CALCULATOR in by_file.stdout


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    shell = f"{GYMTUNE} envs show {CALCULATOR} | true"
    done = subprocess.run(shell, check=True, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert not done.stderr


def test_on_a_terminal_a_bar_is_drawn(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [GYMTUNE, "rollout", "--env", ARITHMETIC, "--agent", "scripted", "-n", "3", "--out", "x.jsonl"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"}
    subprocess.run(command, check=True, cwd=tmp_path, stderr=theirs, stdout=subprocess.PIPE, env=environment)
    os.close(theirs)
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert "3/3" in drawn
    assert "\x1b[" in drawn


def test_ctrl_c_keeps_what_is_finished_and_resume_goes_on(tmp_path: Path) -> None:
    (tmp_path / "slow_env.py").write_text(SLOW_ENV)
    command = [
        GYMTUNE,
        "rollout",
        "--env",
        "slow_env:Slow-v0",
        "--agent",
        "scripted",
        "-n",
        "60",
        "--out",
        "x.jsonl",
        "--concurrency",
        "4",
    ]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path)}, "text": True}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    path, deadline = tmp_path / "x.jsonl", monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 5:
        assert monotonic() < deadline
        sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted; finished trajectories are kept, --resume goes on"
    assert "Traceback" not in err
    kept = path.read_bytes()
    assert 5 <= kept.count(b"\n") < 60
    done = subprocess.run([*command, "--resume"], check=True, capture_output=True, **options)
    assert done.stdout.startswith("60 episodes, success 60/60, mean reward 1.000 -> x.jsonl")
    assert path.read_bytes().startswith(kept)
    assert len({t.trajectory_id for t in read_trajectories(path)}) == 60
    assert len(list(read_trajectories(path))) == 60
