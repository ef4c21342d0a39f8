"""TRL's GRPO steps, one at a time on demand. Runs under the peer's interpreter, which need not have gymtune.

    python -P trl_worker.py '{"model": FOLDER, ...}'

Every line on stdin asks for a step; every line on stdout tells of one, as JSON. All other output goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Pay by the letters of the text: different for every sample, so that every sample has an advantage."""
    return [float(sum(map(ord, completion[0]["content"])) % 97) for completion in completions]


class Clock(TrainerCallback):
    """Waits for an order before each step and reports the step after it."""

    def __init__(self, out: Any) -> None:
        self.out = out
        self.began = self.sampling = 0.0
        self.tokens: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait; the end of stdin is the end of the work."""
        if not sys.stdin.readline():
            sys.exit()
        self.sampling, self.began = 0.0, perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report seconds: the step, and of it sampling with scoring."""
        seconds = perf_counter() - self.began
        self.say({"seconds": seconds, "rollout": self.sampling, "tokens": self.tokens})

    def say(self, data: dict[str, Any]) -> None:
        """Write one line."""
        self.out.write(json.dumps(data) + "\n")
        self.out.flush()


def settings(job: dict[str, Any], vocabulary: int) -> trl.GRPOConfig:
    """Return TRL's defaults, in fp32 on the CPU. Nothing ends a completion early: its eos is an id no token has."""
    return trl.GRPOConfig(
        output_dir=job["scratch"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=job["checkpointing"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["prompts"] * job["generations"] // job["micro_batch"],
        num_generations=job["generations"],
        max_completion_length=job["new_tokens"],
        generation_kwargs={"eos_token_id": [vocabulary]},
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        max_steps=job["steps"],
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    """Serve steps until there is nobody who asks."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not end up between our lines
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    clock = Clock(out)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(job, model.config.vocab_size),
        train_dataset=Dataset.from_list([{"prompt": messages} for messages in job["questions"]]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[clock],
    )
    plain = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        began = perf_counter()
        found = plain(inputs)
        clock.sampling += perf_counter() - began
        clock.tokens = [int(found["prompt_mask"].sum()), int(found["completion_mask"].sum())]
        return found

    trainer._generate_and_score_completions = timed
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    clock.say({"versions": versions, "threads": torch.get_num_threads()})
    trainer.train()


if __name__ == "__main__":
    main()
