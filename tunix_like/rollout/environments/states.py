"""Defines the state of a trajectory during sampling."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix_like.rewards.calls import Failure
from tunix_like.rollout.environments.conversations import Conversation
from tunix_like.rollout.environments.episodes import Episode

MOST_SHOWN = 10_000
"""Maximum number of characters of an observation in rollout files."""


@dataclasses.dataclass
class State:
    """A trajectory that is being sampled. `Episode` describes the attributes that are not listed here.

    Attributes:
      last: id of the last token of the current turn.
      over: whether the environment has failed, or the end of the trajectory has been requested.
      conversation: the conversation that is rendered at each turn; None with `environment.history=sampled`.
    """

    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    turns: int = 0
    limited: bool = False
    cut: int = 0
    reward: float = 0.0
    info: dict[str, float] = dataclasses.field(default_factory=dict)
    failure: Failure | None = None
    last: int = -1
    over: bool = False
    conversation: Conversation | None = None

    def episode(self) -> Episode:
        reward = float("nan") if self.failure is not None else self.reward
        failure = None if self.failure is None else [*self.failure]
        rewritten = None if self.conversation is None else self.conversation.rewritten
        return Episode(self.messages, self.turns, self.limited, self.cut, reward, self.info, failure, rewritten)

    def note(self, observation: Any) -> None:
        """Adds an observation to the messages of the trajectory. The role "assistant" in the observation is replaced by
        "environment", so only turns of the policy have the role "assistant"."""
        if isinstance(observation, str) and observation:
            self.messages.append({"role": "user", "content": _shown(observation)})
        elif observation:
            for message in observation:
                text = {name: _shown(str(value)) for name, value in message.items()}
                self.messages.append(text | ({"role": "environment"} if text["role"] == "assistant" else {}))


def _shown(text: str) -> str:
    """Shortens a text of an environment to `MOST_SHOWN` characters, for `Episode.messages`."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ... ({len(text) - MOST_SHOWN} characters omitted)"
