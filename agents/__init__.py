"""Agents: trajectory, renderer, backends and the rollout driver. Importing this package imports no torch.

The torch engine is in `gymtune.agents.torch_engine`, decoder and checkpoints in `gymtune.agents.models`.
"""

from .agent import Agent, FunctionAgent, ModelAgent, ScriptedAgent, TextAgent
from .backend import Backend, GenerateRequest, Generation, derive_seed
from .collect import CollectConfig, collect
from .evaluate import Evaluation, evaluate
from .renderer import Renderer
from .rollout import EpisodeSpec, Limits, env_factory, plan_episodes, rollout, run_episodes
from .store import TrajectoryWriter, read_trajectories
from .trajectory import Sampling, ToolUse, Trajectory, Turn

__all__ = [
    "Agent",
    "Backend",
    "CollectConfig",
    "EpisodeSpec",
    "Evaluation",
    "FunctionAgent",
    "GenerateRequest",
    "Generation",
    "Limits",
    "ModelAgent",
    "Renderer",
    "Sampling",
    "ScriptedAgent",
    "TextAgent",
    "ToolUse",
    "Trajectory",
    "TrajectoryWriter",
    "Turn",
    "collect",
    "derive_seed",
    "env_factory",
    "evaluate",
    "plan_episodes",
    "read_trajectories",
    "rollout",
    "run_episodes",
]
