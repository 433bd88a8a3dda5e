"""Registers advantage estimators, and checks their parameters and rewards.

The built-in estimators are in `advantages.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from tunix_like.config.schedules import read_schedule
from tunix_like.config.sources import ESTIMATOR_KEYS
from tunix_like.errors import UserError, nearest
from tunix_like.runtime.user_code import check_new_name, is_place, load_function
from tunix_like.tasks.results import LARGEST_REWARD
from tunix_like.types import AdvantageEstimator

Params = Mapping[str, Any]

REWARD_KINDS = ("any", "non-negative", "binary")


@dataclasses.dataclass(frozen=True)
class Estimator:
    """An advantage estimator and the options of its registration.

    Attributes:
      function: maps rewards to advantages; see `types.AdvantageEstimator`.
      zero_when_constant: given the estimator's parameters, returns whether a group of equal rewards always gets
        advantages 0, so that it can be skipped.
      takes: given the estimator's parameters, returns which rewards it accepts: `any`, `non-negative` or `binary`.
      headroom: maps a parameter name to a number h. The parameter must be at most the group size minus h.
      scored_beyond_k: if `headroom` contains the parameter `k`, a group with fewer than `k + scored_beyond_k` scored
        completions is dropped.
      sparse: whether completions often get advantage 0 although the rewards of their group differ. If True, the
        advantages are computed before the update, to skip these completions.
      by_function: whether the estimator gets `advantages.sum_of_normalised` of the rewards of the single reward
        functions, instead of their weighted sum.
      table: computes the constants of the estimator on the host; None if its parameters cannot follow a schedule.
      check: given the estimator's parameters and the group size, raises UserError for a wrong value. The message begins
        with the name of the parameter.
      least: the minimum number of scored completions of a group, apart from `k`; may depend on the parameters.
      offset_free: given the estimator's parameters, returns whether a number that is added to all rewards of a group
        changes no advantage.
    """

    function: AdvantageEstimator
    zero_when_constant: Callable[[Params], bool]
    takes: Callable[[Params], str]
    headroom: Mapping[str, int]
    scored_beyond_k: int
    sparse: bool
    by_function: bool = False
    table: Callable[..., Any] | None = None
    check: Callable[[Params, int], None] | None = None
    least: int | Callable[[Params], int] = 2
    offset_free: Callable[[Params], bool] = lambda params: False

    def parameters(self) -> dict[str, Any]:
        """Returns the names of the estimator's own parameters, with their defaults."""
        given = {"scored", "lengths"} if self.table is None else {"scored", "lengths", "table"}
        return own_parameters(self.function, frozenset(given))

    def least_scored(self, params: Params) -> int:
        """Returns the minimum number of scored completions of a group; groups with fewer are dropped."""
        least = self.least(params) if callable(self.least) else self.least
        return max(least, (params.get("k") or 0) + self.scored_beyond_k) if "k" in self.headroom else least


ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {}
"""Maps names to estimators: the registered values of `algorithm.advantage_estimator`."""


def register_advantage_estimator(
    name: str,
    *,
    zero_when_constant: bool | Callable[[Params], bool] = False,
    takes: str | Callable[[Params], str] = "any",
    headroom: Mapping[str, int] | None = None,
    scored_beyond_k: int = 0,
    sparse: bool = False,
    by_function: bool = False,
    table: Callable[..., Any] | None = None,
    check: Callable[[Params, int], None] | None = None,
    least_scored: int | Callable[[Params], int] = 2,
    offset_free: bool | Callable[[Params], bool] = False,
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Registers an advantage estimator under `name`. The estimator is traced into the compiled training step, like a
    built-in estimator.

    The keyword-only parameters of the estimator other than `scored` and `lengths` are read from the config keys of the
    same name and from `algorithm.estimator_params`.

    Args:
      zero_when_constant: whether a group with equal scored rewards always gets advantages 0. If True, such a group is
        not passed through the model.
      takes: the rewards that the estimator accepts: `any`, `non-negative` or `binary`. Other rewards are rejected
        before the training step.
      headroom: maps a parameter name to a number h: the parameter must be at most G - h, where G is the group size.
        `{"k": 1}` means `k <= G - 1`.
      scored_beyond_k: if `headroom` contains the parameter `k`, a group with fewer than `k + scored_beyond_k` scored
        completions is dropped.
      sparse: whether completions often get advantage 0 although the rewards of their group differ. If True, the
        advantages are computed before the update, to skip these completions.
      by_function: whether the rewards of each reward function are normalised over the group before they are added.
      table: `table(G, **parameters)` computes an array on the host. The estimator then has the keyword-only parameter
        `table=None`. If a parameter follows a schedule, the estimator gets the array of the step as `table` and must
        read nothing else of the parameters, so the step is compiled only once.
      check: `check(parameters, G)` raises UserError for a wrong value. The message begins with the name of the
        parameter.
      least_scored: a group with fewer scored completions is dropped. Also the smallest `algorithm.num_generations`. A
        number, or a function of the parameters.
      offset_free: whether a number that is added to all rewards of a group changes no advantage. If True, the estimator
        gets the rewards minus the largest one of the group, which lose fewer digits as float32.

    Raises:
      UserError: the name is taken, or contains `.` or `:`.
    """

    def register(function: AdvantageEstimator) -> AdvantageEstimator:
        check_new_name("advantage estimator", name, ADVANTAGE_ESTIMATORS, reserved=".:")
        if isinstance(takes, str) and takes not in REWARD_KINDS:
            raise UserError(f"advantage estimator '{name}': takes='{takes}'. {nearest(takes, REWARD_KINDS)}")
        ADVANTAGE_ESTIMATORS[name] = Estimator(
            function,
            zero_when_constant if callable(zero_when_constant) else lambda params: bool(zero_when_constant),
            takes if callable(takes) else lambda params: takes,
            dict(headroom or {}),
            scored_beyond_k,
            sparse,
            by_function,
            table,
            check,
            least_scored,
            offset_free if callable(offset_free) else lambda params: bool(offset_free),
        )
        return function

    return register


def find_estimator(name: str, others: Sequence[str] = ()) -> Estimator:
    """Returns the advantage estimator for a registered name, `FILE.py:function` or `package.module.function`.

    If the file or module itself registers the function, the options of this registration apply.

    Args:
      others: further names for the list in the message, which the caller knows.

    Raises:
      UserError: the name is unknown (the message lists the known names), or the file or module has no such function.
    """

    def unregistered(function: Callable[..., Any]) -> Estimator:
        _check_signature(name, function)
        return Estimator(function, lambda params: False, lambda params: "any", {}, 0, False)

    unknown = "algorithm.advantage_estimator: unknown estimator"
    return find_registered(name, ADVANTAGE_ESTIMATORS, unknown, unregistered, others)


def find_registered(
    name: str,
    registry: dict[str, Any],
    unknown: str,
    unregistered: Callable[[Any], Any],
    others: Sequence[str] = (),
) -> Any:
    """Returns the registry entry for a registered name, or for the location of a function, such as `file.py:function`.

    Args:
      unknown: beginning of the error message for an unknown name, such as `algorithm.policy_loss_fn: unknown loss`.
      unregistered: called with a function that is not registered; returns the entry of this function.
      others: names that are valid without an entry, for the message.
    """
    if name not in registry and is_place(name):
        function = load_function(name, unknown.partition(":")[0])
        registered = [entry for entry in registry.values() if entry.function is function]
        registry[name] = registered[0] if registered else unregistered(function)
    if name not in registry:
        names = [*others, *(registered_name for registered_name in registry if not is_place(registered_name))]
        raise UserError(
            f"{unknown} '{name}'. {nearest(name, names)} For your own function write path/to/file.py:function."
        )
    return registry[name]


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:  # some built-in functions have no signature
        parameters = {}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [key for key in ("scored", "lengths") if key not in parameters and not takes_all]
    if missing:
        raise UserError(
            f"algorithm.advantage_estimator '{name}': the function does not accept the keyword {missing[0]!r}; write "
            "def f(rewards, *, scored, lengths, <parameters>)."
        )


def own_parameters(function: Callable[..., Any], given: frozenset[str]) -> dict[str, Any]:
    """Returns a function's keyword-only parameters that are not in `given`, with their defaults.

    A required parameter has the value `inspect.Parameter.empty`.
    """
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given}


def check_parameters(name: str, params: Params, group_size: int, key: str = "algorithm") -> dict[str, Any]:
    """Checks an estimator's parameters against its signature and the group size, and returns the parameters that are
    not None.

    Args:
      key: the config section of the parameters, for the messages.

    Raises:
      UserError: a parameter is unknown, missing, not an integer or out of range.
    """
    estimator = find_estimator(name)
    declared = estimator.parameters()
    params = {field: value for field, value in params.items() if value is not None}
    for field in params:
        if field not in declared:
            reads = f"it reads {', '.join(sorted(declared))}" if declared else "it has no parameters of its own"
            raise UserError(f"{key}.{field}: the estimator '{name}' does not read it ({reads}). Unset it.")
    for field, default in declared.items():
        if default is inspect.Parameter.empty and field not in params:
            section = key
            if key == "algorithm" and field not in ESTIMATOR_KEYS:
                section = "algorithm.estimator_params"
            raise UserError(f"{section}.{field}: the estimator '{name}' requires it. Set {section}.{field}=<value>.")
    for field, spare in estimator.headroom.items():
        value = params.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
            raise UserError(f"{key}.{field}: got {value!r}; '{name}' needs an integer.")
        if value is not None and not 1 <= value <= group_size - spare:
            reason = ", one less than algorithm.num_generations" if spare else ", algorithm.num_generations"
            raise UserError(
                f"{key}.{field}: got {value}; '{name}' needs 1 <= {field} <= {group_size - spare}{reason} "
                f"({group_size})" + (", because each subset leaves out one completion." if spare else ".")
            )
    if estimator.check is not None:
        try:
            estimator.check(params, group_size)
        except UserError as error:
            raise UserError(f"{key}.{error}") from error
    return params


def is_number(value: Any) -> bool:
    """Returns whether a parameter is a finite number."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(np.isfinite(value))


def with_schedules(name: str, params: Params, group_size: int, key: str = "algorithm") -> dict[str, Any]:
    """Like `check_parameters`, but a parameter may be a mapping `{start, end, steps}`, which becomes a `Schedule`. The
    values at both of its ends are checked.

    Raises:
      UserError: as `check_parameters`, or the estimator does not accept a schedule.
    """
    estimator = find_estimator(name)
    declared = find_estimator(name).parameters()
    mappings = {field: value for field, value in params.items() if isinstance(value, Mapping) and field in declared}
    if estimator.table is None:
        for field in mappings.keys() & set(ESTIMATOR_KEYS):
            raise UserError(f"{key}.{field}: the estimator '{name}' takes no schedule. Set a number.")
        return check_parameters(name, params, group_size, key)
    schedules = {
        field: read_schedule(value, f"{key}.{field}", field in estimator.headroom) for field, value in mappings.items()
    }
    checked: dict[str, Any] = {}
    for end in ("end", "start"):
        values = {field: getattr(schedule, end) for field, schedule in schedules.items()}
        checked = check_parameters(name, {**params, **values}, group_size, key)
        if schedules:
            try:
                estimator.table(group_size, **checked)
            except UserError as error:
                raise UserError(f"{key}.{error}") from error
    return checked | schedules


def _place(group: int, sample: int) -> str:
    return f"group {group}, completion {sample}"


def check_rewards(
    name: str,
    params: Params,
    rewards: Float[np.ndarray, "P G"],
    scored: Bool[np.ndarray, "P G"],
    place: Callable[[int, int], str] = _place,
) -> None:
    """Checks, before the training step, that the advantage estimator `name` accepts the rewards.

    Args:
      place: returns the description of a completion, given its group and its index in the group.

    Raises:
      UserError: the estimator does not accept a reward. The message names the first completion with such a reward, the
        estimator and the remedy.
    """
    values = np.where(scored, rewards, 0.0)

    def refuse(bad: np.ndarray, why: str) -> None:
        if bad.any():
            group, sample = (int(i) for i in np.argwhere(bad)[0])
            raise UserError(f"{place(group, sample)}: the reward {rewards[group, sample]:.9g} {why}")

    refuse(np.abs(values) > LARGEST_REWARD, "has an absolute value above 1e15. Scale the rewards down.")
    kind = find_estimator(name).takes(params)
    if kind == "non-negative":
        cure = "algorithm.truncation_order, " if name == "maxrl" else ""
        refuse(
            values < 0,
            f"is negative, but the estimator '{name}' accepts non-negative rewards only. Set {cure}"
            "algorithm.binarize=true, or return rewards >= 0.",
        )
    if kind == "binary":
        bad = scored & (values != 0) & (values != 1)
        refuse(bad, f"is not 0 or 1, which the estimator '{name}' requires. Set algorithm.binarize=true.")


def float32_rewards(
    rewards: Float[np.ndarray, "P G"], scored: Bool[np.ndarray, "P G"], offset_free: bool | Bool[np.ndarray, "P"]
) -> Float[np.ndarray, "P G"]:
    """Returns the rewards as the estimators get them, in float32; 0 for unscored completions.

    Where `offset_free` is True, the largest reward of the group is first subtracted, because float32 keeps 7 digits:
    of 1000000.25 it loses the last two. Before that, the rewards are rounded to 15 digits, so that sums of the same
    weights in another order are equal.
    """
    size = np.abs(np.where(scored, rewards, 0.0).astype(np.float64))
    digits = 14 - np.floor(np.log10(np.where(size > 0, size, 1.0)))
    factor = 10.0 ** np.clip(digits, -300, 300)
    rounded = np.where(scored, np.round(rewards * factor) / factor, 0.0)
    top = np.where(scored, rounded, -np.inf).max(axis=-1, keepdims=True)
    shift = np.reshape(offset_free, (-1, 1)) & scored.any(axis=-1, keepdims=True)
    return np.where(scored, rounded - np.where(shift, top, 0.0), 0.0).astype(np.float32)
