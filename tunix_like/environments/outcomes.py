"""Defines the interface of objects that run many environments, and the outcomes of calls to these environments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from tunix_like.errors import EnvironmentMisconfigured, EnvironmentUnavailable, UserError
from tunix_like.runtime.moment import START
from tunix_like.workers.failures import Failure, FailureKind, explain

if TYPE_CHECKING:  # worker processes import this module, and `types` imports jax
    from tunix_like.types import Message, Problem


class TimeLimitExceeded(UserError):
    """An environment of this library has found that it took longer than `environment.timeout_seconds`."""


_KINDS: dict[type[UserError], FailureKind] = {
    EnvironmentUnavailable: "unavailable",
    EnvironmentMisconfigured: "misconfigured",
    TimeLimitExceeded: "timeout",
}


class Outcome(NamedTuple):
    """What an environment answered to `reset`, `step` or `finish`, or why the environment did not answer.

    Attributes:
      number: the number of the trajectory.
      observation, reward, done, info: as in `EnvStepResult`. The outcome of `reset` has only an observation, and the
        outcome of `finish` has only a reward.
      failure: why there is no answer; None if there is an answer. After a failure the environment is stopped, and the
        trajectory is unscored.
      environment: in the outcome of `finish`, the environment itself, or its `EnvironmentState` if it is in another
        process; None if the environment is not an object (plain functions as tools).
      called: start and end of the call, values of `time.perf_counter`; None if they are not known.
    """

    number: int
    observation: str | Sequence[Message] | None = None
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float | str] = {}
    failure: Failure | None = None
    environment: Any = None
    called: tuple[float, float] | None = None


@runtime_checkable
class Environments(Protocol):
    """Runs one environment per trajectory. The methods `reset`, `step` and `finish` return no result. `outcomes` later
    returns the outcomes of these calls.

    The caller identifies each trajectory by a number that the caller chooses. A trajectory has at most one unanswered
    call.
    """

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools of the environments, in the form that chat templates take; empty if there are no
        tools."""

    def reset(self, number: int, columns: Mapping[str, Any]) -> None:
        """Makes the environment of a trajectory, and starts the environment's `reset` with the columns of the
        trajectory's data row. If `reset` has a third parameter `moment`, it gets step and progress of the run (see
        `runtime.moment`)."""

    def step(self, number: int, completion: str) -> None:
        """Starts one step of a trajectory's environment. `completion` is the text of the turn."""

    def outcomes(self, wait: bool) -> list[Outcome]:
        """Returns the outcomes of `reset`, `step` and `finish` that are ready and were not returned before. If `wait`
        is True and a call is unanswered, waits for at least one outcome."""

    def finish(self, number: int) -> None:
        """Requests the end of a trajectory. Afterwards the trajectory has no environment.

        The outcome of this call has the reward that the environment gives at the end (`get_reward` of TRL), or 0. The
        caller adds this reward to the rewards of the steps.
        """

    def close(self) -> None:
        """Stops all environments. Unanswered calls get no outcome. Environments start again at the next `reset`."""


def are_agents(environments: Any) -> bool:
    """Whether the model sees the requests of agents (`AgentEnvironments`), and not the prompts of the rows."""
    return hasattr(environments, "one_conversation")


def failure_of(name: str, error: BaseException) -> Failure:
    """Converts an exception that the environment `name` raised to a `Failure`."""
    kinds = (kind for each, kind in _KINDS.items() if isinstance(error, each))
    return Failure(next(kinds, "error"), explain(name, error, "Environment"))


def reset_arguments(environments: Environments, problem: Problem) -> tuple[Mapping[str, Any], ...]:
    """Returns the arguments of `reset` that follow the number of the trajectory.

    The columns are all but the prompt, which the policy sees. Programs get the prompt too, because they write the
    conversation (`reads_prompt`)."""
    prompt = {"prompt": problem.source} if getattr(environments, "reads_prompt", False) else {}
    columns = {**problem.columns, **prompt}
    takes_moment = "moment" in inspect.signature(environments.reset).parameters
    return (columns, problem.moment or START) if takes_moment else (columns,)


def check_configured(failure: Failure | None) -> None:
    """Raises EnvironmentMisconfigured if the failure of an environment has the kind `misconfigured`."""
    if failure is not None and failure.kind == "misconfigured":
        raise EnvironmentMisconfigured(failure.reason)
