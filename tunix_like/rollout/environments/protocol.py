"""Defines the interface that the user's environments implement, and the result of a step.

This module does not import jax, because the processes of environments import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tunix_like.types import Message


class EnvStepResult(NamedTuple):
    """The result of one step of an environment.

    Attributes:
      observation: text or chat messages for the next turn; None or an empty text adds only the start of the next turn.
      reward: added to the reward of the trajectory.
      done: whether the trajectory is over.
      info: values by name. A number becomes a metric: the mean over trajectories of the last value in each trajectory.
        Other values are ignored.
    """

    observation: str | Sequence[Message] | None = None
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = {}


@runtime_checkable
class Environment(Protocol):
    """The environment of one trajectory, which answers the turns of the policy and gives rewards.

    A class or a function, called with `environment.arguments`, makes one object per trajectory. Environments of
    google-tunix (`BaseTaskEnv`) and of TRL (`environment_factory`) are accepted too (see `adapters.py`).
    """

    def reset(self, **columns: Any) -> str | Sequence[Message] | None:
        """Starts an episode. The columns of a data row, except its prompt, are the arguments.

        Returns:
          the first observation, which is added to the row's prompt. Text is appended to the last message (or to the
          text prompt). Messages are appended as messages. None adds nothing. The first observation must be the same for
          all trajectories of a row, because these trajectories share the prompt.
        """

    def step(self, completion: str) -> EnvStepResult:
        """Answers one turn of the policy. `completion` is the text of the turn without special tokens."""
