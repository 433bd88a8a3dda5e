"""Defines the interface that the user's environments implement, and checks what they return.

This module does not import jax, because the processes of environments import it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from tunix_like.errors import UserError
from tunix_like.tasks.results import LARGEST_REWARD

if TYPE_CHECKING:
    from tunix_like.types import Message

MOST_CHARACTERS = 500_000
"""Observations are cut to this number of characters, which is more than 100,000 tokens of usual text. The training
process applies the limit `environment.max_observation_tokens` later."""

MOST_MESSAGES = 1_000
"""Maximum number of messages of one observation."""

MOST_INFO = 100
"""Maximum number of entries of `info` that are kept, and maximum number of characters of the name of an entry."""


STATE = "state"
"""Entry of `info` with the key of the state after a step, for `algorithm.turn_baseline=state`; the only text kept. A
long text is replaced by its hash, because each turn keeps it."""

POTENTIAL = "potential"
"""Entry of `info` with the potential of the state after a step, for `algorithm.credit=turn`."""


class EnvStepResult(NamedTuple):
    """The result of one step of an environment.

    Attributes:
      observation: text or chat messages for the next turn; None or an empty text adds only the start of the next turn.
      reward: added to the reward of the trajectory.
      done: whether the trajectory is over.
      info: values by name. A number becomes a metric: the mean over trajectories of the last value in each trajectory.
        Other values are ignored, except a text as `state`.
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
        """Starts an episode. The columns of a data row, except its prompt, are the arguments. Parameters `step` and
        `progress` that are no columns get these numbers of the run.

        Returns:
          the first observation, which is added to the row's prompt. Text is appended to the last message (or to the
          text prompt). Messages are appended as messages. None adds nothing. The first observation must be the same for
          all trajectories of a row, because these trajectories share the prompt.
        """

    def step(self, completion: str) -> EnvStepResult:
        """Answers one turn of the policy. `completion` is the text of the turn without special tokens."""


def checked_step(value: Any, where: str) -> EnvStepResult:
    """Checks and converts the value that a user's method returned for a step. Of `info`, only numbers and a text as
    `state` are kept.

    Args:
      value: an `EnvStepResult`, a tuple `(observation, reward, done)` or `(observation, reward, done, info)`, or an
        object with attributes of these names.
      where: class and method, for error messages, e.g. `MyEnv.step`.

    Raises:
      UserError: the result has another form, or an entry has a wrong type or value.
    """
    if all(hasattr(value, name) for name in ("observation", "reward", "done")):
        fields = (value.observation, value.reward, value.done, getattr(value, "info", None))
    elif isinstance(value, tuple) and len(value) in (3, 4):
        fields = (*value, None)[:4]
    else:
        what = f"a tuple of {len(value)}" if isinstance(value, tuple) else show(value)
        raise UserError(
            f"{where} returned {what}; return EnvStepResult(observation, reward, done) or the tuple (observation, "
            "reward, done[, info])."
        )
    observation, reward, done, info = fields
    return EnvStepResult(
        checked_observation(observation, where),
        checked_number(reward, f"{where}: reward"),
        _checked_flag(done, where),
        _checked_info(info, where),
    )


def checked_observation(value: Any, where: str) -> str | Sequence[Message] | None:
    """Checks an observation: a text, a list of messages or None. The texts are cut to `MOST_CHARACTERS` characters in
    total.

    In a message, only entries whose key and value are strings are kept. Characters that UTF-8 cannot represent become
    "?".

    Raises:
      UserError: the value is not a text, a list of messages or None, or has more than `MOST_MESSAGES` messages.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _text(value, MOST_CHARACTERS)
    if not isinstance(value, list | tuple):
        cure = "; decode it" if isinstance(value, bytes | bytearray) else ""
        raise UserError(
            f"{where}: the observation is {show(value)}, of type {type(value).__name__}{cure}; it must be a str, a "
            "list of messages or None."
        )
    if len(value) > MOST_MESSAGES:
        raise UserError(f"{where}: the observation has {len(value)} messages; at most {MOST_MESSAGES} are possible.")
    messages = []
    room = MOST_CHARACTERS
    for message in value:
        valid = isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not valid:
            raise UserError(
                f"{where}: the observation contains {show(message)}, which is not a message; write "
                '{"role": "user", "content": "..."} with both values as strings.'
            )
        part = {_text(k, 100): _text(v, room) for k, v in message.items() if isinstance(k, str) and isinstance(v, str)}
        room -= len(part["content"])
        messages.append(part)
    return messages


def checked_number(value: Any, where: str) -> float:
    """Converts a value to a float. Raises UserError if it is not a finite number of at most `LARGEST_REWARD`."""
    number = _number(value)
    if number is None:
        raise UserError(f"{where} {show(value)} is not a number; return a float (0.0 means no reward).")
    if not abs(number) <= LARGEST_REWARD:  # also true for NaN
        raise UserError(f"{where} {show(value)} is not a finite number within +-{LARGEST_REWARD:.0e}.")
    return number


def _number(value: Any) -> float | None:
    if getattr(value, "ndim", None) == 0:  # scalars of numpy, jax and torch
        value = value.item()
    if value is None or isinstance(value, str | bytes | bytearray | complex):  # float() would parse a text
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def _checked_flag(value: Any, where: str) -> bool:
    flag = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(flag, bool):
        raise UserError(f"{where}: done is {show(value)}, of type {type(value).__name__}; it must be True or False.")
    return flag


def _checked_info(value: Any, where: str) -> dict[str, float | str]:
    """Returns the first `MOST_INFO` finite numbers of `info`, by name, and a text as `state`. Other values are left
    out."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: info is {show(value)}, of type {type(value).__name__}; it must be a dict.")
    kept: dict[str, float | str] = {}
    if POTENTIAL in value:
        checked_number(value[POTENTIAL], f"{where}: info['{POTENTIAL}']")
    if isinstance(state := value.get(STATE), str):
        text = state.encode("utf-8", "replace")
        kept[STATE] = text.decode("utf-8") if len(text) <= MOST_INFO else hashlib.sha256(text).hexdigest()
    for name, entry in value.items():
        if len(kept) == MOST_INFO:
            break
        number = _number(entry)
        if isinstance(name, str) and number is not None and math.isfinite(number):
            kept[_text(name, MOST_INFO)] = number
    return kept


def _text(value: str, most: int) -> str:
    return value[:most].encode("utf-8", "replace").decode("utf-8")


def show(value: Any) -> str:
    """Formats a value for an error message, in about 200 characters."""
    try:
        text = repr(value[:200] if isinstance(value, str | bytes) else value)
    except Exception:  # raised by the user's __repr__
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
