"""Environments: tasks, `ChatEnv`, and what registers them with gymnasium.

`import gymtune.envs` registers every id below `gymtune/`; so does the prefix form
`gymnasium.make("gymtune.envs:gymtune/Calculator-v0")`, in worker processes too. Nothing here imports torch.
"""

from .action import Action
from .chat_env import ChatEnv
from .contract import Finding, check_contract
from .registration import env_ids, make_env, register_all
from .spaces import MessagesSpace, TextSpace
from .tasks import GeneratedTasks, Split, Task, TaskSet

register_all()

__all__ = [
    "Action",
    "ChatEnv",
    "Finding",
    "GeneratedTasks",
    "MessagesSpace",
    "Split",
    "Task",
    "TaskSet",
    "TextSpace",
    "check_contract",
    "env_ids",
    "make_env",
    "register_all",
]
