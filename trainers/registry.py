"""Which class credits and loses for each name of `--algo`; what a name means besides is in `presets`."""

from __future__ import annotations

from .algorithm import Algorithm
from .cispo import CISPO
from .grpo import GRPO
from .ppo import PPO
from .reinforce import ReinforcePlusPlus
from .rloo import RLOO
from .sft import SFT

ALGORITHMS: dict[str, type[Algorithm]] = {
    "sft": SFT,
    "grpo": GRPO,
    "dr_grpo": GRPO,
    "dapo": GRPO,
    "gspo": GRPO,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce++": ReinforcePlusPlus,
    "ppo": PPO,
}
"""Dr. GRPO, DAPO and GSPO are GRPO with other values of its keys."""
