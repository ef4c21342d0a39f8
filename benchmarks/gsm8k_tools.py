"""GSM8K's calculator annotations as gold episodes of a tool env: how many score full, and why the others do not.

Usage: python benchmarks/gsm8k_tools.py .../gsm8k/train.jsonl
"""

import re
import sys
from collections import Counter
from time import perf_counter

from gymtune.envs import make_env
from gymtune.envs.tasks import gold_texts
from gymtune.rewards.numeric import parse_number

ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>]*)>>")


def main(path: str) -> None:
    """Replay every record; a calculator that says another number than the annotation is counted too."""
    env = make_env("gymtune/Math-v0", data=path, tools=["calculator"], rewards={"gt": 1.0, "failed_calls": 0.1})
    full, calls, reasons, other = 0, 0, Counter[str](), []
    began = perf_counter()
    for index in range(len(env.tasks)):
        env.reset(options={"task_index": index})
        total, terminated, info, episode = 0.0, False, {}, []
        for text in gold_texts(env.task.gold, env.chat_format):
            _, reward, terminated, truncated, info = env.step(text)
            total += reward
            episode += info["tool_results"]
            if terminated or truncated:
                break
        calls += len(episode)
        if terminated and info["success"] and total == 1.0:
            full += 1
        else:
            why = next((r.content for r in episode if r.failed), info["stop_reason"] if not terminated else "gt missed")
            reasons[why] += 1
            print(f"{env.task.task_id}: reward {total:g}: {why}")
        annotated = [parse_number(value) for _, value in ANNOTATION.findall(_solution(env, index))]
        for result, wanted in zip(episode, annotated, strict=False):
            got = parse_number(result.content)
            if not result.failed and wanted is not None and got is not None and abs(got - wanted) > abs(wanted) / 1000:
                other.append(f"{env.task.task_id}: the calculator says {result.content}, the file {wanted}")
    seconds = perf_counter() - began
    cost = f"{seconds:.1f} s ({1000 * seconds / calls:.2f} ms a call)"
    print(f"\n{full} of {len(env.tasks)} score full, {calls} calls, {cost}")
    for why, count in reasons.most_common():
        print(f"{count:4}  {why}")
    print(f"{len(other)} calls give another number than the file (by more than 0.1 %)")
    for line in other[:20]:
        print(f"      {line}")


def _solution(env, index: int) -> str:
    return env.tasks.source[index].replies[0].messages[-1]["content"]


if __name__ == "__main__":
    main(sys.argv[1])
