"""The `gymtune` command. It reads options, draws progress and prints; the work is done in the folders below.

Heavy libraries are imported inside the commands, so that `gymtune --help` answers at once.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

import typer

if TYPE_CHECKING:
    from .agents.agent import Agent, ModelAgent
    from .agents.evaluate import Evaluation
    from .agents.trajectory import Sampling, Trajectory
    from .trainers.config import TrainConfig

_UsageError = cast(
    "type[Exception]", typer.BadParameter.__bases__[0]
)  # click's, wherever this version of typer keeps it
_ALGOS = (
    "sft, reward, dpo, ipo, orpo, kto, simpo, distill; ppo, grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce++, opd"
)
_PLAIN_SECONDS = 2.0  # between progress lines where there is no terminal
_WIDE = 10_000  # columns where there is no terminal: a table for grep and less is not wrapped

app = typer.Typer(name="gymtune", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
envs_app = typer.Typer(no_args_is_help=True, help="Environments: what there is, and does it keep the contract.")
models_app = typer.Typer(no_args_is_help=True, help="Models: a tiny one from scratch; other forms in and out.")
app.add_typer(envs_app, name="envs")
app.add_typer(models_app, name="models")


def _again(*names: str, metavar: str | None = None, help: str) -> Any:
    """Return an option that may be given more than once."""
    return typer.Option(*names, metavar=metavar, help=help, default_factory=list, show_default=False)


Rewards = Annotated[
    list[str],
    _again("--reward", metavar="NAME[=WEIGHT]", help="A component, a preset, or module:function of yours."),
]
RewardModel = Annotated[str | None, typer.Option("--reward-model", help="Folder of a reward model, or stub.")]
EnvData = Annotated[str | None, typer.Option("--data", help="File that the environment reads.")]
EnvOption = Annotated[str, typer.Option("--env", help="Environment, as `gymtune envs list` names it.")]
EnvArgs = Annotated[list[str], _again("--env-arg", metavar="KEY=VALUE", help="Argument of the environment.")]
TemplateArgs = Annotated[
    list[str],
    _again("--chat-template-arg", metavar="KEY=VALUE", help="Argument of its template: enable_thinking=false."),
]
Temperature = Annotated[float | None, typer.Option(min=0, show_default="1.0", help="Of sampling; 0 is greedy.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-completion-length", min=1, show_default="256", help="Most tokens of a turn.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the sampled tokens.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Episodes at once.")]
Device = Annotated[str | None, typer.Option(show_default="cpu", help="cpu, cuda or cuda:N.")]
Dtype = Annotated[str | None, typer.Option(show_default="float32", help="float32, bfloat16 or float16.")]
MaxCache = Annotated[int | None, typer.Option("--max-cache-tokens", min=2, help="Bound of the sampler's cache.")]
Servers = Annotated[list[str], _again("--sglang-url", help="SGLang server that samples; again for more.")]
Launch = Annotated[Literal["launch"] | None, typer.Option("--sglang", help="launch: a server of the command's own.")]
ServerPython = Annotated[str | None, typer.Option("--sglang-python", help="Python that has sglang, for that server.")]
LayersOption = Annotated[
    str | None,
    typer.Option("--layers", show_default="packed", help="packed (fast on a CPU), plain, compiled or deterministic."),
]
Threads = Annotated[int | None, typer.Option("--torch-threads", min=1, help="CPU threads of torch.")]


# -- rollout, train, eval ----------------------------------------------------------------------------------------------


@app.command()
def rollout(
    context: typer.Context,
    *,
    env: EnvOption,
    env_arg: EnvArgs,
    chat_template_arg: TemplateArgs,
    reward: Rewards,
    sglang_url: Servers,
    out: Annotated[Path, typer.Option(help="Trajectory file (JSONL); its config is written beside it.")],
    data: EnvData = None,
    reward_model: RewardModel = None,
    agent: Annotated[
        Literal["model", "scripted"], typer.Option(help="Who acts: a model, or the script that knows the gold.")
    ] = "model",
    sglang: Launch = None,
    sglang_python: ServerPython = None,
    model: Annotated[str | None, typer.Option(help="Model folder; its tokenizer renders a scripted agent.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Tasks, from the first on.")] = 64,
    num_generations: Annotated[int, typer.Option(min=1, help="Episodes of each task (a group).")] = 1,
    temperature: Temperature = None,
    top_p: Annotated[float | None, typer.Option(max=1, show_default="1.0", help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, show_default="0", help="0 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(max=1, show_default="0", help="Least share of the top token.")] = None,
    stop: Annotated[list[str], _again(help="Text that ends a turn; again for more.")],
    max_completion_length: MaxTokens = None,
    seed: Seed = 0,
    concurrency: Concurrency = 64,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the file; what is finished stays.")] = False,
    turn_seconds: Annotated[float, typer.Option(min=0, help="Deadline of a turn.")] = 600,
    episode_seconds: Annotated[float, typer.Option(min=0, help="Deadline of an episode.")] = 1800,
    device: Device = None,
    dtype: Dtype = None,
    max_cache_tokens: MaxCache = None,
    layers: LayersOption = None,
    torch_threads: Threads = None,
) -> None:
    """Collect trajectories into a file.

    Killed at any moment, it goes on with --resume.
    """
    from .agents.collect import CollectConfig, Collection
    from .agents.rollout import Limits
    from .envs.arguments import parse_rewards

    env_args, template = _env_args(env_arg, data, reward), _template_args(chat_template_arg)
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling |= {"max_new_tokens": max_completion_length, "min_p": min_p, "stop": tuple(stop) or None}
    placing: dict[str, Any] = {"device": device, "dtype": dtype, "torch_threads": torch_threads}
    placing |= {"max_cache_tokens": max_cache_tokens, "layers": layers, "sglang_url": sglang_url or None}
    placing |= {"sglang": sglang, "sglang_python": sglang_python}
    drawn = _sampling(sampling) if agent == "model" else None
    wanted: dict[str, Any] = {"env": env, "env_args": env_args, "agent": agent, "model": model, "n": n}
    wanted |= {"num_generations": num_generations, "seed": seed, "sampling": drawn, "chat_template_kwargs": template}
    wanted |= {"reward_weights": parse_rewards(reward)[1], "reward_model": reward_model}
    collection = Collection.open(out, CollectConfig.model_validate(wanted), resume=resume)
    acting: Agent
    if drawn is None:
        acting = _scripted(model, template, sampling | placing)
    else:
        acting = _policy(context, model, drawn, placing | {"chat_template_kwargs": template}, concurrency)
    limits = Limits(turn_seconds=turn_seconds, episode_seconds=episode_seconds)
    with _Progress("rollout", n * num_generations, done=collection.result.episodes) as progress:
        result = collection.run(
            acting, limits=limits, concurrency=concurrency, on_finish=progress.episode, on_stall=progress.stalled
        )
    if result.fault is not None:
        print(f"rollout: a reward could not be told: {result.fault}", file=sys.stderr)
    failed = f" ({result.failed} failed: {result.cause})" if result.failed else ""
    speed = f", {result.tokens_per_second:.0f} tokens/s" if result.sampled_tokens else ""
    print(
        f"{result.episodes} episodes{failed}, success {result.successes}/{result.episodes - result.failed}, "
        f"mean reward {_number(result.mean_reward)}{speed} -> {out}"
    )


class _Sections(typer.core.TyperCommand):
    """A command whose `--help` has its options in sections, each under the title that stands at its first option."""

    titles: Mapping[str, str] = {
        "algo": "What",
        "data": "From files",
        "env": "From what it samples",
        "max_steps": "How much",
        "beta": "Loss and credit",
        "save_steps": "Written and measured on the way",
        "device": "Where",
        "print_config": "In place of a run, or to go on with one",
    }

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        title = "Options"
        for parameter in self.get_params(ctx):
            title = "Options" if parameter.name == "help" else self.titles.get(parameter.name or "", title)
            sections.setdefault(title, []).append(cast(Any, parameter).get_help_record(ctx))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


@app.command(cls=_Sections)
def train(
    context: typer.Context,
    *,
    algo: Annotated[str, typer.Option(help=f"{_ALGOS}. Brings a preset.")],
    sglang_url: Servers,
    sglang: Launch = None,
    sglang_python: ServerPython = None,
    backend: Annotated[str | None, typer.Option(help="torch or sglang: what samples.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder to start from.")] = None,
    output_dir: Annotated[str | None, typer.Option("--output", help="Folder of the run.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of the keys.")] = None,
    set_: Annotated[list[str], _again("--set", metavar="KEY=VALUE", help="Any key.")],
    seed: Annotated[int | None, typer.Option(help="Of sampling, tasks and data order.")] = None,
    data: Annotated[str | None, typer.Option(help="File to learn from; with --env, that the env reads.")] = None,
    eval_data: Annotated[str | None, typer.Option(help="File of held-out records; goes with --eval-steps.")] = None,
    trajectories: Annotated[str | None, typer.Option(help="File of sampled episodes, in place of sampling.")] = None,
    pairs: Annotated[str | None, typer.Option(help="best_worst or all, of a group (dpo and its kin, reward).")] = None,
    best_of: Annotated[int | None, typer.Option("--best", help="Best episodes of a group kept (sft, distill).")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Leave out what earned less (sft, distill).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Trajectories, or pairs of them, of a step.")] = None,
    teacher_model: Annotated[str | None, typer.Option(help="Folder of the teacher (distill, opd).")] = None,
    env: Annotated[str | None, typer.Option(help="Environment to sample in.")] = None,
    env_arg: EnvArgs,
    chat_template_arg: TemplateArgs,
    reward: Rewards,
    reward_model: RewardModel = None,
    prompts_per_step: Annotated[int | None, typer.Option(help="Groups of a step.")] = None,
    num_generations: Annotated[int | None, typer.Option(help="Episodes of a group.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling and loss.")] = None,
    max_completion_length: Annotated[int | None, typer.Option(help="Most tokens of a turn.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    beta: Annotated[float | None, typer.Option(help="Weight of the KL to the starting model; scale of dpo.")] = None,
    kl_estimator: Annotated[str | None, typer.Option(help="k1, k2 or k3.")] = None,
    entropy_coef: Annotated[float | None, typer.Option(help="Weight of the entropy bonus.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Lower clip of the ratio.")] = None,
    epsilon_high: Annotated[float | None, typer.Option(help="Upper clip of the ratio.")] = None,
    critic_model: Annotated[str | None, typer.Option(help="Folder of the critic's backbone (ppo).")] = None,
    gamma: Annotated[float | None, typer.Option(help="Discount of a token (ppo).")] = None,
    lam: Annotated[float | None, typer.Option(help="Lambda of GAE (ppo).")] = None,
    control: Annotated[str | None, typer.Option(help="shuffle_rewards: a run that must learn nothing.")] = None,
    save_steps: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = None,
    eval_steps: Annotated[int | None, typer.Option(help="Steps between evaluations on held-out tasks or data.")] = None,
    debug_mode: Annotated[bool | None, typer.Option("--debug-mode", help="Decoded samples in debug.jsonl.")] = None,
    report_to: Annotated[list[str], _again("--log", help="tensorboard, wandb or trackio; again for more.")],
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    torch_threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Each value, and where it came from.")] = False,
    look: Annotated[bool, typer.Option("--preflight", help="All that is wrong with what is given.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Loss and metrics of one batch; nothing changes.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint.")] = False,
) -> None:
    """Train a model with an algorithm.

    Values: defaults < preset of --algo < --config FILE < command line.
    """
    from .trainers.config import TrainConfig, resolve

    if sum((print_config, look, dry, resume)) > 1:
        raise typer.BadParameter("--print-config, --preflight, --dry-run and --resume: give one of them")
    given = {key: value for key, value in context.params.items() if value is not None and value != []}
    options = {key: value for key, value in given.items() if key in TrainConfig.model_fields and key != "algo"}
    from .envs.arguments import parse_rewards

    if sglang is not None:
        options["sglang_launch"] = True
    if sglang is not None or sglang_url:
        options.setdefault("backend", "sglang")
    preset, weights = parse_rewards(reward)
    options |= {"reward_weights": weights} if weights else {}
    sets = [*set_, *(f"env_args.{item}" for item in env_arg)]
    sets += [f"chat_template_kwargs.{item}" for item in chat_template_arg]
    sets += [f"env_args.rewards={json.dumps(preset)}"] if preset else []
    if env is not None and data is not None:
        sets.append(f"env_args.data={json.dumps(options.pop('data'))}")
    resolved = resolve(algo, file=config, sets=sets, options=options)
    if print_config:
        _table(("key", "value", "from"), resolved.table())
        return
    if look:
        _show_preflight(resolved.config)
        return
    if dry:
        _show_dry_run(resolved.config)
        return
    from .trainers import Listeners
    from .trainers import train as run_training

    if resolved.config.sglang_launch:
        _tell_leftovers()
    from .trainers.report import reward_curve

    with _Progress(algo, resolved.config.max_steps, every=0) as progress:
        listeners = Listeners(on_step=progress.step, on_stall=progress.stalled, on_note=_note)
        finished = run_training(resolved, resume=resume, listeners=listeners)
    run = Path(resolved.config.output_dir)
    reward_curve(run, run / "curve.png")
    print(f"model {finished}\ncurve {run / 'curve.png'}")


@app.command("eval")
def evaluate(
    context: typer.Context,
    *,
    env: EnvOption,
    env_arg: EnvArgs,
    chat_template_arg: TemplateArgs,
    reward: Rewards,
    sglang_url: Servers,
    sglang: Launch = None,
    sglang_python: ServerPython = None,
    model: Annotated[list[str], typer.Option(help="Model folder; give it again for a second one.")],
    data: EnvData = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Tasks, from the first on.")] = 200,
    split: Annotated[str | None, typer.Option(show_default="test, where the env has splits", help="Of tasks.")] = None,
    temperature: Temperature = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Evaluate greedily too.")] = False,
    max_completion_length: MaxTokens = None,
    seed: Seed = 0,
    concurrency: Concurrency = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers there too.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    max_cache_tokens: MaxCache = None,
    layers: LayersOption = None,
    torch_threads: Threads = None,
) -> None:
    """Success of models, side by side, with intervals.

    All see the same tasks; the interval is the Wilson 95 % one.
    """
    from .agents.evaluate import evaluate as run_evaluation
    from .agents.evaluate import write_evaluations
    from .agents.rollout import env_factory
    from .agents.scorer import split_rewards
    from .envs.arguments import parse_rewards, takes_argument

    env_args = _env_args(env_arg, data, reward)
    weights, scorer = split_rewards(parse_rewards(reward)[1])
    if scorer:
        raise typer.BadParameter(f"eval pays by the env alone: leave out --reward {scorer.parts[0].name}")
    if split is not None or ("split" not in env_args and takes_argument(env, "split")):
        env_args["split"] = split or "test"
    sampling = {"temperature": temperature, "max_new_tokens": max_completion_length}
    modes = {"sampled": _sampling(sampling)} | (
        {"greedy": _sampling(sampling | {"temperature": 0.0})} if greedy else {}
    )
    placing: dict[str, Any] = {"device": device, "dtype": dtype, "torch_threads": torch_threads}
    template = _template_args(chat_template_arg)
    placing |= {"max_cache_tokens": max_cache_tokens, "layers": layers, "chat_template_kwargs": template}
    placing |= {"sglang_url": sglang_url or None, "sglang": sglang, "sglang_python": sglang_python}
    if (sglang or sglang_url) and len(model) > 1:
        raise typer.BadParameter("servers hold one model: give one --model, and evaluate the others after it")
    found: dict[str, dict[str, Evaluation]] = {}
    asked: dict[str, Any] = {"env": env, "env_args": env_args, "n": n, "seed": seed, "chat_template_kwargs": template}
    asked["sampling"] = {mode: drawn.model_dump() for mode, drawn in modes.items()}

    def keep() -> None:  # before the first, so that a place where nothing can be written costs no minutes
        if json_file is not None:
            write_evaluations(json_file, asked, found)

    keep()
    for folder in dict.fromkeys(model):
        acting = _policy(context, folder, modes["sampled"], placing, concurrency)
        make = env_factory(env, acting, env_args, weights)
        for mode, drawn in modes.items():
            acting.sampling = drawn
            with _Progress(f"{folder} {mode}", n) as progress:
                done = run_evaluation(make, acting, n, seed=seed, concurrency=concurrency, on_finish=progress.episode)
            found.setdefault(folder, {})[mode] = done
            keep()
    _show_evaluations(found)


# -- envs, models ------------------------------------------------------------------------------------------------------


@envs_app.command("list")
def envs_list() -> None:
    """The environments there are."""
    from .envs import env_ids
    from .envs.describe import describe_env

    _table(("id", "what it is"), [(env_id, describe_env(env_id).summary) for env_id in env_ids()])


@envs_app.command("show")
def envs_show(env_id: Annotated[str, typer.Argument(metavar="ID")], env_arg: EnvArgs) -> None:
    """One environment: its arguments, tools, and a task with its gold episode."""
    from .envs.arguments import parse_env_args
    from .envs.describe import describe_env

    env = describe_env(env_id, **parse_env_args(env_arg))
    print(f"{env.env_id}\n\n{env.text}\n")
    _table(("argument", "default"), list(env.arguments.items()))
    _table(("reward component", "weight"), [(name, f"{weight:g}") for name, weight in env.components.items()])
    for tool in env.tools:
        print(f"tool {json.dumps(tool['function'], indent=2, ensure_ascii=False)}\n")
    for message in env.messages:
        print(f"[{message['role']}] {message['content']}")
    for text in env.gold:
        print(f"[gold] {text}")
    print(f"[gt] {env.gt}")


@envs_app.command("check")
def envs_check(
    env_arg: EnvArgs,
    env_id: Annotated[str | None, typer.Argument(metavar="[ID]", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="Check every environment.")] = False,
) -> None:
    """Try the contract on an environment; exit code 1 when a promise does not hold."""
    from .envs import check_contract, env_ids
    from .envs.arguments import parse_env_args

    if every == (env_id is not None):
        raise typer.BadParameter("name one environment, or give --all")
    names = env_ids() if env_id is None else [env_id]
    found = [(name, finding) for name in names for finding in check_contract(name, **parse_env_args(env_arg))]
    rows = [(name, "holds" if f.holds else "BROKEN", f.promise, f.detail) for name, f in found]
    _table(("env", "", "promise", "seen"), rows)
    attacks = [(name, kind, *map(str, seen)) for name, f in found for kind, seen in f.attacks.items()]
    _table(("env", "attack", "tried", "wrongly accepted"), attacks)
    if not all(finding.holds for _, finding in found):
        raise typer.Exit(1)


@envs_app.command("new")
def envs_new(name: Annotated[str, typer.Argument(help="Of the package, such as my_env.")]) -> None:
    """Write a small package with an environment, a tool, a checker, a test and a README, for you to change."""
    from .envs.scaffold import env_id, new_env

    for path in new_env(name):
        print(path)
    print(f"\ntry it:  pytest {name}\n         gymtune envs check {env_id(name)}")


# -- plan, files, smoke ------------------------------------------------------------------------------------------------


@app.command()
def plan(
    folder: Annotated[Path, typer.Argument(help="Where runs, models and data files are looked for.")] = Path("."),
    *,
    data: Annotated[list[str], _again("--data", help="Data file, in place of those in the folder; again for more.")],
    model: Annotated[str | None, typer.Option(help="Model folder to start from.")] = None,
    env: Annotated[str | None, typer.Option(help="Environment to act in.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Print the whole chain as a bash script.")] = False,
) -> None:
    """What is there, which algorithms it allows, the next command. Runs nothing, writes nothing.

    Exit code 1 where something is malformed or missing; it says what, and the mend.
    """
    from .trainers.plan import make_plan

    made = make_plan(folder, model=model, data=data, env=env)
    if pipeline or as_json:
        print(made.script() if pipeline else made.to_json())
        for what, came, mend in made.seen.faults:
            print(f"plan: {what}: {came}; {mend}", file=sys.stderr)
    else:
        for table in made.tables():
            print(table.title)
            _table(table.columns, table.rows)
        print(*made.lines(), sep="\n")
    if not made.ok:
        raise typer.Exit(1)


@app.command()
def validate(
    file: Annotated[str, typer.Argument(help="JSONL, JSON, .gz, .parquet, a datasets folder, or hf:NAME[:SPLIT].")],
    kind: Annotated[str, typer.Option(help="What it is; auto looks at the first records.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check a data file: every error with its line, counts and percentiles. Exit code 1 when something is wrong."""
    from .envs.files.validate import validate as run_validation

    report = run_validation(file, cast(Any, kind))
    if as_json:
        print(report.to_json())
    else:
        for table in report.tables():
            print(table.title)
            _table(table.columns, table.rows)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def smoke(
    *,
    text: Annotated[list[Path], _again(help="File with one turn of an agent; again for its next turn.")],
    gt: Annotated[list[str], _again(help="What the answer must hold; again for more.")],
    reward: Rewards,
    tools: Annotated[str | None, typer.Option(help="JSON file of schemas, or module:name of tools.")] = None,
    checker: Annotated[str | None, typer.Option(help="What compares with --gt, in place of the preset's.")] = None,
    chat_format: Annotated[str, typer.Option(help="How calls are written.")] = "hermes",
    reward_model: RewardModel = None,
    sglang_url: Annotated[str | None, typer.Option(help="Ask this server for its model too.")] = None,
) -> None:
    """Parse a text, run its calls, check the answer, show every reward; without --text, on built-in good and bad texts.

    Exit code 1 when a built-in case goes another way than it must; with --text, when a call failed or --gt is not met.
    """
    from .agents.smoke import run_smoke
    from .envs.arguments import parse_rewards

    if not text and (tools or gt):
        raise typer.BadParameter("--tools and --gt go with --text FILE")
    preset, weights = parse_rewards(reward)
    options: dict[str, Any] = {"checker": checker, "chat_format": chat_format, "reward_model": reward_model}
    results = run_smoke(text, tools=tools, gt=gt, rewards=preset, weights=weights, **options)
    names = list(dict.fromkeys(name for result in results for name in result.rewards))
    rows = []
    for r in results:
        told = (r.name, "as it must" if r.holds else "WRONG", ", ".join(r.outcomes) or "no call", str(r.success))
        values = (_number(r.rewards[name]) if name in r.rewards else "" for name in names)
        rows.append((*told, r.stop_reason or "-", *values, _number(r.reward)))
    if text:
        for line in results[0].results:
            print(line)
    _table(("case", "", "calls", "success", "ended by", *names, "reward"), rows)
    if sglang_url is not None:
        from .agents.sglang.trial import try_server

        trial = try_server(sglang_url)
        server = trial.facts
        weights_are = f"weights {server.weight_version or 'of no version'}, context {server.max_length or 'not told'}"
        print(f"server {server.url}: SGLang {server.version or '?'}, model {server.model_path}, {weights_are}")
        shown = ", ".join(f"{token} ({logprob:.3f})" for token, logprob in zip(trial.ids, trial.logprobs, strict=True))
        print(f"sampled {shown}; scored again {trial.gap:.1g} apart; nothing was changed on it")
    if not all(result.holds for result in results):
        raise typer.Exit(1)


@app.command()
def serve(
    *,
    arg: Annotated[
        list[str],
        typer.Option(help="One more flag of SGLang's; again for more.", default_factory=list, show_default=False),
    ],
    model: Annotated[Path | None, typer.Option(help="Model folder to serve.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 30000,
    host: Annotated[str, typer.Option(help="Address to listen at; others than loopback let others in.")] = "127.0.0.1",
    python: Annotated[str | None, typer.Option(help="Python that has sglang (default: this one).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    lora_rank: Annotated[int | None, typer.Option(min=1, help="Let it take adapters of up to this rank.")] = None,
    log: Annotated[Path, typer.Option(help="File that its output goes to.")] = Path("sglang.log"),
    print_: Annotated[bool, typer.Option("--print", help="Print the command; run nothing.")] = False,
    end_left: Annotated[bool, typer.Option("--end-leftovers", help="End servers whose owner is gone, first.")] = False,
) -> None:
    """Start an SGLang server, watch it and end it with this command.

    Ctrl-C ends it. One that dies is started again.
    """
    from .agents.sglang.launch import Server, check_python, lora_flags, server_command

    _tell_leftovers(end=end_left)
    if model is None:
        if end_left:
            return
        raise typer.BadParameter("--model is missing: a model folder")
    flags = [*(lora_flags(lora_rank, device=device) if lora_rank is not None else []), *arg]
    command = server_command(
        model, python=python or sys.executable, port=port, host=host, device=device, dtype=dtype, args=flags
    )
    if print_:
        print(shlex.join(command))
        return
    version = check_python(python or sys.executable)
    with Server(command, host=host, port=port, model=model, log=log) as server:
        server.on_restart = lambda url: print(f"died, and was started again: {url}", file=sys.stderr, flush=True)
        print(f"SGLang {version} serves {model} at {server.url}; its log is {log}; Ctrl-C ends it", flush=True)
        with suppress(KeyboardInterrupt):
            server.wait()
    if server.fault is not None:
        raise server.fault


@models_app.command("init")
def models_init(
    *,
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    env: EnvOption,
    env_arg: EnvArgs,
    hidden_size: Annotated[int, typer.Option(min=1)] = 128,
    layers: Annotated[int, typer.Option(min=1)] = 3,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    intermediate_size: Annotated[int, typer.Option(min=1)] = 384,
    vocab_size: Annotated[int, typer.Option(help="Most tokens; the texts may give fewer.")] = 512,
    max_position_embeddings: Annotated[int, typer.Option(min=2, help="Longest context.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights.")] = 0,
) -> None:
    """Make a tiny model with random weights and a tokenizer that knows the words of an environment."""
    from .agents.models import init_model
    from .agents.tokenizer_texts import tokenizer_texts
    from .envs.arguments import parse_env_args

    init_model(
        out,
        texts=tokenizer_texts(env, **parse_env_args(env_arg)),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        seed=seed,
    )
    print(f"model {out}")


@models_app.command("import")
def models_import(
    source: Annotated[Path, typer.Argument(help="A .gguf file, or MiniMind's .pth.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with the tokenizer that a .pth lacks.")] = None,
) -> None:
    """Make a Hugging Face folder of a model in another form."""
    from .agents.models.importing import import_model

    began = monotonic()
    folder = import_model(source, out, tokenizer)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    print(f"model {folder} ({size / 1e6:.0f} MB, {monotonic() - began:.1f} s)")


@models_app.command("export")
def models_export(
    folder: Annotated[Path, typer.Argument(help="Model folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the file.")],
    prefix: Annotated[str, typer.Option(help="First part of its name, as MiniMind's scripts want it.")] = "full_sft",
) -> None:
    """Write MiniMind's `.pth`, `PREFIX_WIDTH.pth` or `PREFIX_WIDTH_moe.pth`, for its own scripts to open."""
    from .agents.models.minimind import export_minimind

    print(f"weights {export_minimind(folder, out, prefix)}")


# -- options to objects ------------------------------------------------------------------------------------------------


def _env_args(items: Sequence[str], data: str | None, rewards: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of an env that --env-arg, --data and a preset of --reward name."""
    from .envs.arguments import parse_env_args, parse_rewards

    preset, _ = parse_rewards(rewards)
    given = _given({"data": data, "rewards": preset})
    return parse_env_args([*items, *(f"{key}={json.dumps(value)}" for key, value in given.items())])


def _template_args(items: Sequence[str]) -> dict[str, Any]:
    from .envs.arguments import parse_env_args

    return parse_env_args(items, "--chat-template-arg")


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {key: value for key, value in options.items() if value is not None}


def _sampling(given: Mapping[str, Any]) -> Sampling:
    from .agents.loading import make_sampling

    return make_sampling(**_given(given))


def _policy(
    context: typer.Context, model: str | None, sampling: Sampling, placing: Mapping[str, Any], concurrency: int
) -> ModelAgent:
    if model is None:
        raise typer.BadParameter("--agent model needs --model DIR; `gymtune models init` makes a tiny one")
    from .agents.loading import load_agent

    if placing["sglang"]:
        _tell_leftovers()
    agent = load_agent(model, sampling, concurrency=concurrency, **_given(placing))
    context.call_on_close(agent.backend.close)
    if placing["sglang_url"]:
        from .agents.sglang.facts import other_model

        for facts in cast(Any, agent.backend).facts:
            if doubt := other_model(facts, Path(model)):
                _note(doubt)
    return agent


def _tell_leftovers(*, end: bool = False) -> None:
    """Say which servers outlived their owner, and end them where asked to."""
    from .agents.sglang.leftovers import end_leftovers, leftovers

    for record in end_leftovers() if end else leftovers():
        what = "ended" if end else "left over, `gymtune serve --end-leftovers` ends it"
        print(f"{what}: {record}", file=sys.stderr)


def _scripted(model: str | None, template: Mapping[str, Any], idle: Mapping[str, Any]) -> Agent:
    if template and model is None:
        raise typer.BadParameter(
            "--chat-template-arg is for a template, and --agent scripted has none: give --model DIR"
        )
    for name in _given(idle):
        raise typer.BadParameter(f"--agent scripted samples nothing and does not read {name}: leave it out")
    from .agents import Renderer, ScriptedAgent

    return ScriptedAgent(Renderer.from_folder(model, template_options=template) if model is not None else None)


# -- what is shown -----------------------------------------------------------------------------------------------------


class _Progress:
    """How far a command is, on stderr: a bar on a terminal, else a line at most every `every` seconds."""

    def __init__(self, what: str, total: int, *, done: int = 0, every: float = _PLAIN_SECONDS) -> None:
        from .agents.meter import Meter

        self.what, self.every, self.told = what, every, monotonic()
        self.meter = Meter(total, done)
        self.bar: Any = None
        if sys.stderr.isatty():
            self._draw_bar()

    def _draw_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if "torch" in sys.modules:
            from .agents.threads import oversubscribed

            if warning := oversubscribed():
                print(f"{self.what}: {warning}", file=sys.stderr)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self.bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self.task = self.bar.add_task(self.what, total=self.meter.total, completed=self.meter.done, text="")

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def episode(self, trajectory: Trajectory) -> None:
        """Count a finished episode."""
        self._show(self.meter.episode(trajectory))

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show a step of training."""
        self._show(self.meter.step(metrics))

    def stalled(self, pending: Sequence[str]) -> None:
        """Say what is waited for."""
        print(f"{self.what}: nothing has finished for a while; pending: {', '.join(pending)}", file=sys.stderr)

    def _show(self, text: str) -> None:
        meter, now = self.meter, monotonic()
        if self.bar is not None:
            self.bar.update(self.task, completed=meter.done, text=text)
        elif now - self.told >= self.every or meter.done == meter.total:
            self.told = now
            line = f"{self.what} {meter.done}/{meter.total}  {text}  ETA {meter.seconds_left:.0f} s"
            print(line, file=sys.stderr, flush=True)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else _WIDE, markup=False, highlight=False)
    with console.capture() as drawn:
        console.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def _show_preflight(config: TrainConfig) -> None:
    """Print what was found, and end with exit code 1 when something is wrong."""
    from .trainers.preflight import preflight

    found = preflight(config)
    rows = [(f.what, "WRONG" if f.verdict == "wrong" else f.verdict, f.wanted, f.came, f.mend) for f in found.findings]
    _table(("what", "", "wanted", "came", "mend"), rows)
    if found.errors:
        raise typer.Exit(1)


def _show_dry_run(config: TrainConfig) -> None:
    from .trainers import Listeners, dry_run

    metrics = dry_run(config, listeners=Listeners(on_note=_note))
    _table(("metric", "value"), [(name, f"{value:.6g}") for name, value in metrics.items()])


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _show_evaluations(found: Mapping[str, Mapping[str, Evaluation]]) -> None:
    """Print one row a model: its success in each mode, and what its sampled episodes were like."""
    modes = list(next(iter(found.values())))
    rows = []
    for folder, evaluations in found.items():
        first = evaluations["sampled"]
        failures = ", ".join(f"{name} {count}" for name, count in first.tool_failures.items()) or "none"
        unscored = first.failed + first.broken
        numbers = (_number(first.reward), f"{first.tool_calls:.2f}", failures, f"{first.turns:.2f}", str(unscored))
        rows.append((folder, *(evaluations[mode].percent for mode in modes), *numbers))
    names = (f"{mode} success % [95 %]" for mode in modes)
    _table(("model", *names, "reward", "calls/episode", "failed calls", "turns", "unscored"), rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# -- the program -------------------------------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(f"gymtune {__version__}")
        raise typer.Exit


@app.callback()
def gymtune(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Every LLM post-training task is a gymnasium.Env; every trainer reads the same trajectories."""


def main() -> None:
    """Run the command line. What the user can mend is told in one line; GYMTUNE_DEBUG=1 shows the traceback too."""
    _let_threads_wait()
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # so that `module:name` finds what lies here, after all that is installed
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # whoever read has gone: nothing is left to say, not at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        if os.environ.get("GYMTUNE_DEBUG") == "1" or not _mendable(error):
            raise
        code = _complain(error)
    if code == 130:
        print("interrupted; finished trajectories are kept, --resume goes on", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _let_threads_wait() -> None:
    """Say how OpenMP threads wait, before torch reads it: `agents/threads.py` tells why. What is set already stays."""
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
    name, value = ("OMP_WAIT_POLICY", "PASSIVE") if busy else ("GOMP_SPINCOUNT", "10000")
    os.environ[name] = value


def _mendable(error: Exception) -> bool:
    """Tell whether the user can mend it; imported late, for `--help` needs none of it."""
    from .tools.errors import GymtuneError

    return isinstance(error, GymtuneError | _UsageError)


def _complain(error: Exception) -> int:
    """Print an error as one line and return its exit code; a bare command prints its help."""
    from .tools.errors import closest

    format_message: Callable[[], str] = getattr(error, "format_message", lambda: str(error))
    message = format_message()
    near: list[str] = getattr(error, "possibilities", None) or []
    if near and (option := getattr(error, "option_name", None)):
        message = f"no such option {option}.{closest(option, near)}"
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
    else:
        print(f"gymtune: error: {' '.join(message.split())}", file=sys.stderr)
    return int(getattr(error, "exit_code", 2))


if __name__ == "__main__":  # `python cli.py`: the checkout is the package `gymtune`, whose parent is .types
    sys.path[0] = str(Path(__file__).resolve().parent / ".types")
    importlib.import_module("gymtune.cli").main()
