"""Provides environments for trajectories with several turns and with tools. The environments run in worker processes or
in this process."""

from __future__ import annotations

from tunix_like.environments.calculator import Calculator
from tunix_like.environments.guess import Guess
from tunix_like.environments.maze_steps import MazeSteps
from tunix_like.environments.openenv import OpenEnv
from tunix_like.environments.registry import register_environment

register_environment("calculator")(Calculator)
register_environment("guess")(Guess)
register_environment("maze_steps")(MazeSteps)
register_environment("openenv")(OpenEnv)
