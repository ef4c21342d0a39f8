"""gymtune: every LLM post-training task is a gymnasium.Env, every trainer reads the same trajectories.

The folders, bottom-up, each importing only those before it::

    tools     messages, JSON Schema, Tool, Toolbox, call formats
    rewards   checkers of `gt`, reward components
    envs      tasks, ChatEnv, the registered environments
    agents    trajectory, renderer, backends, rollout
    trainers  batch, advantages, losses, the loop

Importing this package imports none of them (and so no torch).
"""

__version__ = "0.1.0"
