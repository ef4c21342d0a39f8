"""The plan against the real thing: routes against preflight, commands against the command line, real run folders."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer.main

from gymtune import cli
from gymtune.agents import Sampling, ScriptedAgent, TrajectoryWriter, read_trajectories, rollout
from gymtune.envs.files import KINDS, example_path
from gymtune.trainers import TrainConfig, resolve
from gymtune.trainers.plan import Plan, make_plan, shell
from gymtune.trainers.plan_files import FileFacts, is_sampled, look_at_file
from gymtune.trainers.plan_models import FoundModel, look_at_model
from gymtune.trainers.plan_routes import by_reason, routes
from gymtune.trainers.plan_stages import Seen, Stage, stages
from gymtune.trainers.preflight import preflight
from gymtune.trainers.presets import PRESETS, looks_for

ARITHMETIC, CALCULATOR = "gymtune/Arithmetic-v0", "gymtune/Calculator-v0"
RECORDED = [kind for kind in KINDS if kind != "trajectories"]


@pytest.fixture(scope="session")
def plan_files(sums_file: Path, sampled_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A file of each kind, and trajectories of four sorts."""
    folder = tmp_path_factory.mktemp("kinds")
    found = {kind: str(example_path(kind)) for kind in RECORDED}
    few = [trajectory for trajectory, _ in zip(read_trajectories(sums_file), range(40), strict=False)]
    sampled = list(read_trajectories(sampled_file))
    sorts = {
        "expert": few,
        "sampled": sampled,
        "alone": [each for each in sampled if each.sample == 0],
        "mixed": [*sampled, *(each.model_copy(update={"trajectory_id": f"x{n}"}) for n, each in enumerate(few))],
    }
    for name, trajectories in sorts.items():
        found[name] = str(folder / f"{name}.jsonl")
        with TrajectoryWriter(found[name]) as writer:
            for trajectory in trajectories:
                writer.append(trajectory)
    return found


@pytest.fixture(scope="session")
def wide_model(taught_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """`taught_model`, with room for long conversations."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(taught_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    return str(folder)


# -- files and routes --------------------------------------------------------------------------------------------------


def test_what_files_have(plan_files: dict[str, str], sampled_file: Path):
    told = {name: look_at_file(path) for name, path in plan_files.items()}
    counts = {n: (f.records, f.replies, f.pairs, f.good, f.bad, f.sampled, f.groups) for n, f in told.items()}
    groups: dict[str, list[float | None]] = {}
    for trajectory in read_trajectories(sampled_file):
        groups.setdefault(trajectory.group_id, []).append(trajectory.reward)
    differing, right = sum(len(set(g)) > 1 for g in groups.values()), sum(g.count(1.0) for g in groups.values())
    assert 0 < differing < 24
    assert counts["preference"] == (10, 10, 10, 10, 10, 0, 0)
    assert counts["unpaired"] == (10, 6, 0, 6, 4, 0, 0)
    assert counts["sft"] == (10, 10, 0, 0, 0, 0, 0)
    assert counts["prompts"] == (10, 0, 0, 0, 0, 0, 0)
    assert counts["sampled"] == (96, 96, differing, right, 96 - right, 96, 24)
    assert counts["alone"][5:] == (24, 0)
    assert counts["expert"] == (40, 40, 0, 40, 0, 0, 0)
    homes = {name: file.home.env_id if file.home else None for name, file in told.items()}
    assert homes["preference"] == homes["unpaired"] == homes["prompts"] == "gymtune/Preference-v0"
    assert homes["agentic"] == homes["bfcl"] == "gymtune/ToolUse-v0"
    assert (homes["verifiable"], homes["sft"]) == ("gymtune/Math-v0", None)
    pays = {name: file.home.pays if file.home else None for name, file in told.items()}
    assert pays["preference"] == pays["prompts"] == ()  # what a policy says itself earns nothing there
    assert pays["verifiable"] == ("gt",)


def test_which_episodes_count(sampled_file: Path, tmp_path: Path):
    one, two, *_ = read_trajectories(sampled_file)
    assert is_sampled(one)
    assert not is_sampled(one.model_copy(update={"sampling": Sampling(temperature=0)}))
    assert not is_sampled(one.model_copy(update={"logprobs": [None] * len(one.logprobs)}))  # an expert's, with tokens
    file = tmp_path / "t.jsonl"
    with TrajectoryWriter(file) as writer:
        for trajectory in (one, two.model_copy(update={"error": "the env crashed"})):
            writer.append(trajectory)
    facts = look_at_file(str(file))
    assert (facts.records, facts.replies, facts.episodes, facts.sampled, facts.groups) == (2, 1, 1, 1, 0)
    file.write_text(file.read_text() * 2)
    (fault,) = look_at_file(str(file)).faults
    assert "stands there twice" in fault


@pytest.mark.parametrize("name", [*RECORDED, "expert", "sampled", "alone", "mixed"])
@pytest.mark.parametrize("algo", PRESETS)
def test_a_route_is_open_where_the_run_would_be_let_in(
    algo: str, name: str, plan_files: dict[str, str], wide_model: str, tmp_path: Path
):
    """What plan says of a file and an algorithm is what preflight says of the run: records, episodes, env."""
    file = look_at_file(plan_files[name])
    route = next(route for route in routes(file) if route.algo == algo)
    reads = PRESETS[algo].reads
    where = {"algo": algo, "model": wide_model, "output_dir": str(tmp_path / "run")}
    where |= {"teacher_model": wide_model} if "teacher_model" in reads else {}

    def wrong(**keys: object) -> list[str]:
        found = preflight(TrainConfig.model_validate(where | keys))
        return [f"{finding.what}: {finding.came}" for finding in found.findings if finding.verdict == "wrong"]

    if "data" in reads:
        assert (wrong(data=file.path) == []) == (route.way == "data"), (route, wrong(data=file.path))
    if "trajectories" in reads:
        found = wrong(trajectories=file.path) if file.kind == "trajectories" else ["no trajectories"]
        assert (found == []) == (route.way == "trajectories"), (route, found)
    if route.way == "env":
        assert file.home is not None
        scorer = {"reward_model": "stub"} if "--reward-model" in route.extra else {}
        data = {"env_args": {"data": file.home.data}} if file.home.data else {}
        assert wrong(env=file.home.env_id, **data, **scorer) == []


def test_what_is_wanted_is_read_off_the_presets():
    assert {algo: looks_for(algo) for algo in ("sft", "distill", "dpo", "reward", "kto", "grpo", "opd")} == {
        "sft": "replies", "distill": "replies", "dpo": "pairs", "reward": "pairs", "kto": "labels", "grpo": None,
        "opd": None,
    }  # fmt: skip


def test_reasons_are_said(plan_files: dict[str, str]):
    rows = by_reason(routes(look_at_file(plan_files["preference"])))
    assert rows[0] == ("learns from its records", ["sft", "reward", "dpo", "ipo", "orpo", "kto", "simpo"], "")
    how, _, why = next(row for row in rows if "grpo" in row[1])
    assert how == "samples its tasks, with --reward-model"
    assert why == "a recorded answer has no log-probs"
    rows = by_reason(routes(look_at_file(plan_files["mixed"])))
    assert any("40 of 136 scored episodes have no log-probs of a policy" in why for _, _, why in rows)
    rows = by_reason(routes(look_at_file(plan_files["alone"])))
    assert any("grpo" in algos and "no task was sampled twice" in why for _, algos, why in rows)
    assert any("ppo" in algos and how == "learns from its episodes" for how, algos, _ in rows)


def test_a_malformed_file_is_told_whole(tmp_path: Path):
    lines = example_path("preference").read_text().splitlines()
    lines[2], lines[5] = '{"chosen": "a"', '{"prompt": "q", "chosen": "", "rejected": "b"}'
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    plan = make_plan(tmp_path)
    assert not plan.ok
    assert [what for what, _, _ in plan.seen.faults] == [str(tmp_path / "pairs.jsonl")] * 2
    assert [came.split(":")[0].split(",")[0] for _, came, _ in plan.seen.faults] == ["line 3", "line 6"]
    assert "gymtune validate" in plan.seen.faults[0][2]
    assert plan.routes[str(tmp_path / "pairs.jsonl")] == []
    assert {stage.state for stage in plan.stages if stage.name in ("sft", "reward", "dpo")} == {"closed"}


def test_what_is_given_and_not_there_is_told_with_its_mend(tmp_path: Path, tiny_model: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert make_plan(tmp_path).ok  # what lies there and is no data is nobody's fault
    plan = make_plan(
        tmp_path / "none", model=str(tmp_path / "no"), data=[str(tmp_path / "metrics.jsonl")], env="gymtune/No-v0"
    )
    told = {what: (came, mend) for what, came, mend in plan.seen.faults}
    assert len(told) == 4
    assert "no such folder" in told[str(tmp_path / "none")][0]
    assert "gymtune models" in told[str(tmp_path / "no")][1]
    assert "cannot tell the kind" in told[str(tmp_path / "metrics.jsonl")][0]
    assert "gymtune envs list" in told["gymtune/No-v0"][1]
    torn = tmp_path / "torn"
    shutil.copytree(tiny_model, torn)
    (torn / "model.safetensors").write_bytes(b"x")
    assert "torn" in make_plan(tmp_path).seen.faults[0][0]


# -- stages ------------------------------------------------------------------------------------------------------------


def states(plan: Plan) -> dict[str, str]:
    return {stage.name: stage.state for stage in plan.stages}


def test_an_empty_folder_begins_with_an_example(tmp_path: Path):
    plan = make_plan(tmp_path)
    assert plan.ok
    assert plan.seen.example
    assert states(plan) == {
        "base": "open", "demonstrations": "open", "sft": "later", "groups": "later", "reward": "later", "dpo": "later",
        "ppo": "later", "agent": "later", "eval": "later",
    }  # fmt: skip
    assert plan.next is not None
    assert plan.next.command == ("gymtune", "models", "init", "--out", str(tmp_path / "base"), "--env", CALCULATOR)
    assert "Nothing is here yet" in "\n".join(plan.lines())
    assert list(tmp_path.iterdir()) == []


def test_after_sft_and_after_a_stop(tmp_path: Path, tiny_model: Path, sums_file: Path):
    from gymtune.trainers import train

    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copytree(tiny_model, folder / "base")
    with TrajectoryWriter(folder / "gold.jsonl") as writer:
        for trajectory in rollout(ARITHMETIC, ScriptedAgent(), 20):
            writer.append(trajectory)
    first = make_plan(folder)
    assert (first.seen.env is not None, first.seen.example) == (True, False)
    assert states(first)["base"] == "done"
    assert first.next is not None
    assert (first.next.name, first.next.writes) == ("sft", str(folder / "sft/full_sft"))
    where = {"model": str(folder / "base"), "data": str(folder / "gold.jsonl"), "max_steps": 1, "save_steps": 0}
    assert str(train(TrainConfig(algo="sft", **where, output_dir=str(folder / "sft")))) == first.next.writes
    before = sorted(folder.rglob("*"))
    plan = make_plan(folder)
    assert sorted(folder.rglob("*")) == before  # looking writes nothing
    assert states(plan) == {
        "base": "done", "sft": "done", "groups": "open", "reward": "later", "dpo": "later", "ppo": "later",
        "grpo": "open", "eval": "later",
    }  # fmt: skip
    assert [(m.role, m.path, m.start) for m in plan.seen.models] == [
        ("full_sft", str(folder / "sft/full_sft"), str(folder / "base")),
        ("base", str(folder / "base"), None),
    ]
    assert plan.seen.unfinished == ()
    other = make_plan(folder, model=str(tiny_model))  # another model: what runs made of the first is not its own
    assert states(other)["sft"] == "open"
    assert states(make_plan(folder, model=str(folder / "base")))["sft"] == "done"
    (folder / "sft/handoff.json").unlink()
    stopped = make_plan(folder)
    assert [(run.path, run.algo, run.steps, run.max_steps) for run in stopped.seen.unfinished] == [
        (str(folder / "sft"), "sft", 1, 1)
    ]
    assert stopped.next is not None
    assert stopped.next.command[-1] == str(folder / "sft-2")  # the folder of the stopped run is not taken


def test_a_reward_model_is_told_from_a_model_that_speaks(tmp_path: Path, tiny_model: Path):
    """By its weights, wherever it lies; a folder that says so and has none is torn."""
    from gymtune.agents.models import load_model
    from gymtune.agents.models.classifier import save_classifier

    scorer = tmp_path / "scorer"
    model = load_model(tiny_model)
    save_classifier(model, torch.zeros(1, 32), scorer, tiny_model, set())
    assert look_at_model(scorer).role == "reward"
    assert look_at_model(scorer).told.startswith("reward model, qwen3, width 32, 2 layers")
    plan = make_plan(tmp_path, model=str(scorer))
    assert [came for _, came, _ in plan.seen.faults] == ["a reward model, which says nothing by itself"]
    assert {stage.name: stage.writes for stage in make_plan(tmp_path).stages}["reward"] == str(scorer)
    run = tmp_path / "run"
    shutil.copytree(tiny_model, run / "reward")
    (run / "handoff.json").write_text(json.dumps({"prefix": "reward", "folder": "reward", "base_model": "m"}))
    torn = look_at_model(run / "reward")
    assert torn.fault
    assert "score.weight" in torn.told


def seen(*files: FileFacts, models: Sequence[FoundModel] = (), **changes: object) -> Seen:
    base = FoundModel("m", "base", "tiny", parameters=1000)
    return replace(Seen("no/such", (base, *models), (), files, None, False, ()), **changes)


def stage(found: list[Stage], name: str) -> Stage:
    return next(stage for stage in found if stage.name == name)


def test_each_file_goes_where_it_fits(plan_files: dict[str, str]):
    facts = {name: look_at_file(path) for name, path in plan_files.items()}
    found = stages(seen(facts["sampled"], facts["preference"], facts["sft"]))
    assert stage(found, "sft").needs == (("m", True), (facts["sft"].path, True))
    assert stage(found, "reward").needs[1][0] == stage(found, "dpo").needs[1][0] == facts["preference"].path
    assert stage(found, "grpo").state == "closed"
    found = stages(seen(facts["sampled"]))
    assert stage(found, "sft").command[-4:-2] == ("--best", "1")  # good and bad ones of each group
    found = stages(seen(facts["unpaired"]))
    assert stage(found, "kto").needs[1][0] == facts["unpaired"].path
    assert stage(found, "reward").why.startswith("no pairs")
    found = stages(seen(facts["prompts"], env=facts["prompts"].home))
    assert "needs a reward model" in stage(found, "ppo").why
    scorer = FoundModel("r", "reward", "a reward model")
    found = stages(seen(facts["prompts"], env=facts["prompts"].home, models=[scorer]))
    assert stage(found, "reward").state == "done"
    for name in ("ppo", "grpo"):
        assert "--reward-model r" in " ".join(stage(found, name).command)
    found = stages(seen(facts["verifiable"], env=facts["verifiable"].home, models=[scorer]))
    assert "--reward-model r --reward gt=0" in " ".join(stage(found, "ppo").command)  # the reward model alone pays
    assert "--reward" not in stage(found, "grpo").command


def test_what_a_stage_of_another_name_left_is_seen(plan_files: dict[str, str]):
    facts = look_at_file(plan_files["verifiable"])
    left = [FoundModel(path, role, "a model") for path, role in [("d", "full_dist"), ("i", "ipo"), ("c", "cispo")]]
    found = stages(seen(facts, env=facts.home, models=left))
    assert {s.name: s.writes for s in found if s.state == "done"} == {
        "base": "m", "sft": "d", "ipo": "i", "grpo": "c",
    }  # fmt: skip


def test_a_large_model_gets_small_steps(plan_files: dict[str, str]):
    facts = look_at_file(plan_files["verifiable"])
    small = stages(seen(facts, env=facts.home))
    assert not any("--learning-rate" in stage.command for stage in small)
    large = stages(seen(facts, env=facts.home, models=[FoundModel("b", "base", "big", parameters=135_000_000)]))
    assert stage(large, "sft").command[-2:] == ("--learning-rate", "1e-5")
    assert stage(large, "grpo").command[-2:] == ("--learning-rate", "1e-6")


# -- commands ----------------------------------------------------------------------------------------------------------


def check_command(words: Sequence[str]) -> None:
    """Parse a command by the real command line, and the keys of a run by its config."""
    assert words[0] == "gymtune"
    command = typer.main.get_command(cli.app)
    rest = list(words[1:])
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    parsed = command.make_context("gymtune", rest).params
    if command.name == "train":
        given = {key: value for key, value in parsed.items() if value not in (None, [], False)}
        options = {key: value for key, value in given.items() if key in TrainConfig.model_fields and key != "algo"}
        weights = {name: float(weight) for name, _, weight in (item.partition("=") for item in given.get("reward", ()))}
        options |= {"reward_weights": weights} if weights else {}
        if "env" in options and "data" in options:
            options["env_args"] = {"data": options.pop("data")}
        resolve(given["algo"], options=options)


@pytest.mark.parametrize("name", [*RECORDED, "expert", "sampled", "mixed"])
@pytest.mark.parametrize("env", [None, CALCULATOR, "gymtune/Math-v0"])
def test_every_command_is_one_that_can_be_typed(name: str, env: str | None, plan_files: dict[str, str], tmp_path: Path):
    plan = make_plan(tmp_path, data=[plan_files[name]], env=env)
    assert plan.ok, plan.seen.faults
    for words in plan.commands:
        check_command(words)
        typed = shell(words)
        assert shlex.split(typed.replace("\\\n", " ")) == list(words)
        assert max(map(len, typed.splitlines())) <= 100 or any(len(word) > 60 for word in words)
    assert subprocess.run(["bash", "-n"], input=plan.script(), text=True, check=False).returncode == 0
    assert json.loads(plan.to_json())["next"] == (plan.next.name if plan.next else None)


def test_odd_names_are_quoted(tmp_path: Path):
    folder = tmp_path / "my runs $HOME 'x'"
    folder.mkdir()
    plan = make_plan(folder)
    typed = shell(plan.commands[0]).replace("gymtune", "printf '%s|'", 1)
    said = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=True).stdout
    assert said.split("|")[:-1] == list(plan.commands[0][1:])
    assert subprocess.run(["bash", "-n"], input=plan.script(), text=True, check=False).returncode == 0
