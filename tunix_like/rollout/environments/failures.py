"""Determines the kind of a failure of an environment, and raises errors for failures that stop the run.

The processes of environments import this module, so it does not import jax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunix_like.errors import EngineLost, EnvironmentMisconfigured, EnvironmentUnavailable, UserError
from tunix_like.rewards.calls import Failure, FailureKind, explain

if TYPE_CHECKING:
    from tunix_like.rollout.environments.outcomes import Environments
    from tunix_like.types import Message

_KINDS: dict[type[UserError], FailureKind] = {
    EnvironmentUnavailable: "unavailable",
    EnvironmentMisconfigured: "misconfigured",
}


def failure_of(name: str, error: BaseException) -> Failure:
    """Converts an exception that the environment `name` raised to a `Failure`."""
    kinds = (kind for each, kind in _KINDS.items() if isinstance(error, each))
    return Failure(next(kinds, "error"), explain(name, error, "Environment"))


def check_configured(failure: Failure | None) -> None:
    """Raises EnvironmentMisconfigured if the failure of an environment has the kind `misconfigured`."""
    if failure is not None and failure.kind == "misconfigured":
        raise EnvironmentMisconfigured(failure.reason)


def check_available(failures: Sequence[Sequence[str] | None]) -> None:
    """Raises EngineLost if every trajectory has a failure of the kind `unavailable`. `failures` has one entry per
    trajectory; an entry is None if the trajectory has no failure."""
    if not failures or any(failure is None or failure[0] != "unavailable" for failure in failures):
        return
    assert failures[0] is not None
    raise EngineLost(
        f"environment: its service is unavailable; all {len(failures)} trajectories failed. {failures[0][1]} Start the "
        "server, then start the run with the same command; it resumes."
    )


def first_observation(environments: Environments, row: Mapping[str, Any], where: str) -> str | Sequence[Message] | None:
    """Resets one environment with the columns of a data row, and returns the first observation of this environment.
    Ends the environment afterwards.

    Args:
      row: the columns of the data row. All columns except `prompt` are passed to the environment.
      where: text at the beginning of the error message.

    Raises:
      EnvironmentMisconfigured: the environment raised this error.
      UserError: the environment failed for another reason.
    """
    environments.reset(0, {name: value for name, value in row.items() if name != "prompt"})
    (outcome,) = environments.outcomes(wait=True)
    check_configured(outcome.failure)
    if outcome.failure is not None:
        raise UserError(f"{where}{outcome.failure.reason}")
    environments.finish(0)
    environments.outcomes(wait=True)
    return outcome.observation
