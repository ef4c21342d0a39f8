"""MiniMind's agentic task with its reward: a tiny model learns to use five tools, several of them at once.

    python benchmarks/tool_use.py               about twelve minutes of one core
    python benchmarks/tool_use.py --seed 1 --out runs/tools

Writes two agentic files of its own (train and held out), teaches a model from scratch by a short imitation of the
expert, and goes on with GRPO under `--reward minimind_agent`. Printed are success and every component of the reward
before and after, on held-out tasks; OUT/rewards.png has the components over the steps, OUT/results.json all numbers.
The results are in docs/results/tool_use.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from demo import evaluation, free_folder, gymtune, table

from gymtune.rewards.presets import PRESETS
from gymtune.tools import everyday_tools
from gymtune.tools.library import everyday
from gymtune.tools.messages import Message, assistant, call, user
from gymtune.trainers.report import trailing_mean

ENV, PRESET = "gymtune/ToolUse-v0", "minimind_agent"
TRAIN_TASKS, TEST_TASKS = 3000, 300
TOOLS = ("calculate_math", "unit_converter", "get_current_weather", "get_current_time", "get_exchange_rate")
CITIES = ("Beijing", "Shanghai", "Guangzhou", "Chengdu", "Wuhan", "Tokyo", "New York", "London", "Paris", "Sydney")
ZONES = ("Asia/Shanghai", "Asia/Tokyo", "Europe/London", "Europe/Paris", "America/New_York", "Australia/Sydney")
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "AUD")
UNITS = (("km", "miles"), ("miles", "km"), ("kg", "pounds"), ("meters", "feet"), ("celsius", "fahrenheit"))
SHOWN = ("reward", "success", "gt", "call_count", "unfinished", "length", "call_tags", "repetition")
"""Panels of the picture; the preset's other components stay at 0 in a model that does not think."""


# -- the data ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """One thing to find out: how it is asked for, the call that tells it, what to say then, and what must be said."""

    question: str
    tool: str
    arguments: dict[str, Any]
    statement: str
    gt: str


def sum_fact(rng: Random) -> Fact:
    """Ask for a sum, difference or product of two numbers of up to two digits."""
    expression = f"{rng.randint(2, 99)} {rng.choice('+-*')} {rng.randint(2, 99)}"
    result = everyday.calculate_math(expression)["result"]
    question = f"{rng.choice(('what is', 'how much is'))} {expression}"
    return Fact(question, "calculate_math", {"expression": expression}, f"the result is {result}", result)


def unit_fact(rng: Random) -> Fact:
    """Ask for a length, mass or temperature in another unit."""
    value, (source, target) = rng.randint(2, 999), rng.choice(UNITS)
    result = str(everyday.unit_converter(value, source, target)["result"])
    question = rng.choice((f"how many {target} are {value} {source}", f"what are {value} {source} in {target}"))
    arguments = {"value": value, "from_unit": source, "to_unit": target}
    return Fact(question, "unit_converter", arguments, f"it is {result} {target}", result)


def weather_fact(rng: Random) -> Fact:
    """Ask for the temperature in a city."""
    city = rng.choice(CITIES)
    degrees = everyday.get_current_weather(city)["temperature"]
    question = f"{rng.choice(('how warm is it in', 'what is the temperature in'))} {city}"
    return Fact(question, "get_current_weather", {"location": city}, f"{city} has {degrees}", degrees)


def time_fact(rng: Random) -> Fact:
    """Ask for the time of day in a zone."""
    zone = rng.choice(ZONES)
    clock = everyday.get_current_time(zone)["datetime"][11:16]
    question = f"{rng.choice(('what time is it in', 'what is the time in'))} {zone}"
    return Fact(question, "get_current_time", {"timezone": zone}, f"it is {clock}", clock)


def rate_fact(rng: Random) -> Fact:
    """Ask what a currency costs in yuan."""
    source, target = rng.choice(CURRENCIES), "CNY"
    rate = str(everyday.get_exchange_rate(source, target)["rate"])
    question = f"{rng.choice(('what is the rate from', 'how much is the rate from'))} {source} to {target}"
    arguments = {"from_currency": source, "to_currency": target}
    return Fact(question, "get_exchange_rate", arguments, f"the rate is {rate}", rate)


OPEN: Sequence[Callable[[Random], Fact]] = (sum_fact, unit_fact)
"""Facts of many numbers: each task has one that no other task has, in either file."""
TABLED: Sequence[Callable[[Random], Fact]] = (weather_fact, time_fact, rate_fact)
"""Facts from small tables, which stand in both files, always beside one of the others."""


def facts_of_task(rng: Random, used: set[str]) -> list[Fact]:
    """Draw one or two facts of different tools; what was computed for another task is not taken again."""
    while True:
        fact = rng.choice(OPEN)(rng)
        key = " ".join(sorted(" ".join(map(str, fact.arguments.values())).split()))
        if key not in used:
            break
    used.add(key)
    if rng.random() < 0.5:
        return [fact]
    facts = [fact, rng.choice(TABLED)(rng)]
    rng.shuffle(facts)
    return facts


@cache
def schema(name: str) -> dict[str, Any]:
    """Return the schema of a tool without its descriptions: a prompt of a tiny model is best short."""
    parameters = next(tool.parameters for tool in everyday_tools() if tool.name == name)
    properties = {key: {"type": value["type"]} for key, value in parameters["properties"].items()}
    shown = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": shown}}


def record(rng: Random, facts: Sequence[Fact]) -> dict[str, Any]:
    """Return a record as MiniMind's `agent_rl.jsonl` has it, and the episode of an expert as `gold`.

    Beside the tools that the task wants there is another one, and their order is drawn.
    """
    names = [fact.tool for fact in facts]
    names.append(rng.choice([name for name in TOOLS if name not in names]))
    rng.shuffle(names)
    system = {"role": "system", "content": "Use the tools.", "tools": json.dumps([schema(name) for name in names])}
    question = ", and ".join(fact.question for fact in facts) + "?"
    calls = [call(fact.tool, **fact.arguments) for fact in facts]
    said = " and ".join(fact.statement for fact in facts) + "."
    gold: list[Message] = [assistant("", *calls), assistant(said[0].upper() + said[1:])]
    asked = [system, user(question[0].upper() + question[1:]), assistant("")]
    return {"conversations": asked, "gt": [fact.gt for fact in facts], "gold": gold}


def write_data(out: Path, seed: int) -> tuple[Path, Path]:
    """Write the training and the held-out file; no number question of one is in the other."""
    rng, used = Random(seed), set[str]()
    paths = out / "train.jsonl", out / "test.jsonl"
    for path, count in zip(paths, (TRAIN_TASKS, TEST_TASKS), strict=True):
        records = [record(rng, facts_of_task(rng, used)) for _ in range(count)]
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records), encoding="utf-8")
    return paths


# -- the run -----------------------------------------------------------------------------------------------------------


def evaluate(model: Path, test: Path, json_file: Path) -> None:
    """Evaluate a model on the held-out tasks, sampled and greedy."""
    gymtune(
        "eval", "--env", ENV, "--data", test, "--reward", PRESET, "-n", TEST_TASKS, "--greedy",
        "--max-completion-length", 80, "--concurrency", 150, "--model", model, "--json", json_file,
    )  # fmt: skip


def teach(out: Path, train: Path, seed: int, steps: int) -> Path:
    """Make a model from scratch and let it imitate the expert for a while, as the demo does; return its folder."""
    data = ("--env", ENV, "--env-arg", f"data={train}")
    gymtune("models", "init", "--out", out / "base", *data, "--seed", seed)
    gymtune(
        "rollout", *data, "--agent", "scripted", "--reward", PRESET, "-n", TRAIN_TASKS, "--out", out / "expert.jsonl"
    )
    gymtune(
        "train", "--algo", "sft", "--model", out / "base", "--data", out / "expert.jsonl", "--output", out / "sft",
        "--max-steps", steps, "--batch-size", 32, "--learning-rate", 2e-3, "--set", "warmup_steps=10",
        "--set", "lr_scheduler_type=constant", "--set", "save_steps=0", "--seed", seed,
    )  # fmt: skip
    return out / "sft/full_sft"


def reinforce(out: Path, start: Path, files: tuple[Path, Path], seed: int, steps: int) -> Path:
    """Go on by GRPO with MiniMind's reward; return the folder of the finished model."""
    train, test = files
    gymtune(
        "train", "--algo", "grpo", "--model", start, "--env", ENV, "--env-arg", f"data={train}", "--reward", PRESET,
        "--output", out / "grpo", "--max-steps", steps, "--prompts-per-step", 16, "--num-generations", 8,
        "--learning-rate", 3e-4, "--set", "warmup_steps=5", "--set", "mini_batches=2", "--epsilon-high", 0.28,
        "--set", "averaging=token_mean", "--max-completion-length", 80, "--eval-steps", 20, "--set", "eval_tasks=100",
        "--set", f"eval_env_args.data={test}", "--set", "save_trajectories=false", "--save-steps", 0, "--seed", seed,
    )  # fmt: skip
    return out / "grpo/agent"


# -- what is shown -----------------------------------------------------------------------------------------------------


def weights() -> dict[str, float]:
    """Return what a unit of each component of the preset is paid."""
    return PRESETS[PRESET](None).weights


def show(before: Path, after: Path) -> dict[str, Any]:
    """Print success and the reward by component, before and after; return all of it."""
    table({"after sft": before, "after grpo": after})
    found = {"before": evaluation(before), "after": evaluation(after)}
    paid = {
        name: {key: weight * found[key][0]["rewards"].get(name, 0.0) for key in found}
        for name, weight in weights().items()
    }
    paid["reward"] = {key: found[key][0]["reward"] for key in found}
    print(f"\n{'earned an episode, sampled':<28} {'weight':>7} {'before':>8} {'after':>8}")
    for name, values in paid.items():
        weight = f"{weights()[name]:g}" if name in weights() else ""
        print(f"{name:<28} {weight:>7} {values['before']:>8.3f} {values['after']:>8.3f}")
    evaluations = {key: dict(zip(("sampled", "greedy"), modes, strict=True)) for key, modes in found.items()}
    return {"paid": paid, "evaluations": evaluations}


def curves(run: Path, prefix: str = "") -> dict[str, list[tuple[int, float]]]:
    """Return what each component paid at each step (`prefix` eval/: on the held-out tasks), reward and success too."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {f"rewards/{name}/mean": (name, weight) for name, weight in weights().items()}
    names |= {"reward": ("reward", 1.0), "success": ("success", 1.0)}
    told = [line for line in lines if f"{prefix}reward" in line]
    return {  # a component that fired in no episode of a step is missing there
        name: [(line["step"], weight * line.get(prefix + key, 0.0)) for line in told]
        for key, (name, weight) in names.items()
    }


def draw(run: Path, path: Path) -> None:
    """Draw a panel a component: episodes of training as a line, held-out tasks as dots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, -(-len(SHOWN) // 2), sharex=True).flatten()
    trained, held = curves(run), curves(run, "eval/")
    for panel, name in zip(panels, SHOWN, strict=True):
        steps, values = zip(*trained[name], strict=True)
        panel.plot(steps, values, lw=0.8, color="#9db8d9", label="episodes of the step")
        panel.plot(steps, trailing_mean(values, 5), lw=1.8, color="#1f5fa8", label="mean of 5 steps")
        panel.plot(*zip(*held[name], strict=True), "o", ms=4, color="#d9822b", label="100 held-out tasks")
        weight = f" (weight {weights()[name]:g})" if name in weights() else ""
        panel.set_title(name + weight, loc="left", fontsize=10)
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(f"what each component of {PRESET} pays an episode, over the steps of GRPO ({ENV})", fontsize=11)
    figure.savefig(path)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="A tiny model learns five tools under MiniMind's agentic reward.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=240)
    parser.add_argument("--steps", type=int, default=100, help="of GRPO, 16 tasks x 8 samples each")
    parser.add_argument("--out", type=Path, help="folder (default: the first free runs/tools-N)")
    options = parser.parse_args()
    out = options.out or free_folder("tools")
    if out.exists():
        sys.exit(f"tool_use: {out} is there already; give another --out")
    out.mkdir(parents=True)
    began = perf_counter()
    files = write_data(out, options.seed)
    gymtune("validate", files[0])
    taught = teach(out, files[0], options.seed, options.sft_steps)
    evaluate(taught, files[1], out / "eval_sft.json")
    finished = reinforce(out, taught, files, options.seed, options.steps)
    evaluate(finished, files[1], out / "eval_grpo.json")

    print(f"\n{ENV}, {PRESET}, {TEST_TASKS} held-out tasks, 95 % intervals; seed {options.seed}")
    results = show(out / "eval_sft.json", out / "eval_grpo.json")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_minutes = sum(one.ru_utime + one.ru_stime for one in used) / 60
    minutes = (perf_counter() - began) / 60
    asked = {"seed": options.seed, "sft_steps": options.sft_steps, "steps": options.steps}
    results |= {"minutes": minutes, "cpu_minutes": cpu_minutes}
    results |= {"asked": asked, "trained": curves(out / "grpo"), "held_out": curves(out / "grpo", "eval/")}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(out / "grpo", out / "rewards.png")
    print(f"\npicture  {out / 'rewards.png'}\nnumbers  {out / 'results.json'}")
    print(f"took     {minutes:.1f} minutes, {cpu_minutes:.1f} of a core")


if __name__ == "__main__":
    main()
