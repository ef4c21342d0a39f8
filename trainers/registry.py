"""Which class credits and loses for each name of `--algo`; what a name means besides is in `presets`."""

from __future__ import annotations

from .algorithm import Algorithm
from .cispo import CISPO
from .distill import Distill
from .dpo import DPO
from .grpo import GRPO
from .ipo import IPO
from .kto import KTO
from .opd import OPD
from .orpo import ORPO
from .ppo import PPO
from .reinforce import ReinforcePlusPlus
from .reward import Reward
from .rloo import RLOO
from .sft import SFT
from .simpo import SimPO

ALGORITHMS: dict[str, type[Algorithm]] = {
    "sft": SFT,
    "reward": Reward,
    "dpo": DPO,
    "ipo": IPO,
    "orpo": ORPO,
    "kto": KTO,
    "simpo": SimPO,
    "distill": Distill,
    "grpo": GRPO,
    "dr_grpo": GRPO,
    "dapo": GRPO,
    "gspo": GRPO,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce++": ReinforcePlusPlus,
    "ppo": PPO,
    "opd": OPD,
}
"""Dr. GRPO, DAPO and GSPO are GRPO with other values of its keys."""
