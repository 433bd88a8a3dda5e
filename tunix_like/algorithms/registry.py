"""What an advantage estimator is to the rest: a function, the parameters it reads, and what it asks of rewards.

The registry, and every check of an estimator's parameters and of the rewards it is given. The built-in functions stand
in `advantages.py`. This module knows no model, no loss and no config file.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from tunix_like.errors import UserError, nearest
from tunix_like.runtime.user_code import is_place, load_function
from tunix_like.types import AdvantageEstimator

Params = Mapping[str, Any]

LARGEST_REWARD = 1e15
"""Rewards beyond this are refused on the host: their squares would leave float32."""

REWARD_KINDS = ("any", "non-negative", "binary")


@dataclasses.dataclass(frozen=True)
class Estimator:
    """A registered estimator.

    Attributes:
      function: rewards to advantages, see `types.AdvantageEstimator`.
      zero_when_constant: with these parameters a group of equal rewards gets zeros, and can be left out of the compute.
      takes: with these parameters, the rewards it is defined for: one of `REWARD_KINDS`.
      headroom: the largest value of a parameter is the group's size minus this.
      scored_beyond_k: a group needs this many scored completions more than `k`, else it is dropped.
      sparse: groups whose rewards differ may get zeros too, often enough to look for them before the update.
    """

    function: AdvantageEstimator
    zero_when_constant: Callable[[Params], bool]
    takes: Callable[[Params], str]
    headroom: Mapping[str, int]
    scored_beyond_k: int
    sparse: bool

    def parameters(self) -> dict[str, Any]:
        """The parameters of its own, with their defaults."""
        return own_parameters(self.function, frozenset({"scored", "lengths"}))

    def least_scored(self, params: Params) -> int:
        """Scored completions below which a group has no signal and is dropped."""
        return max(2, (params.get("k") or 0) + self.scored_beyond_k) if "k" in self.headroom else 2


ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {}
"""Name to estimator: what `algorithm.advantage_estimator` may say."""


def register_advantage_estimator(
    name: str,
    *,
    zero_when_constant: bool | Callable[[Params], bool] = False,
    takes: str | Callable[[Params], str] = "any",
    headroom: Mapping[str, int] | None = None,
    scored_beyond_k: int = 0,
    sparse: bool = False,
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Makes an estimator known under `name`; it is traced into the same compiled step as the built-in ones.

    Its keyword-only parameters beyond `scored` and `lengths` are read from the config's keys of the same name, and from
    `algorithm.estimator_params`.

    Args:
      zero_when_constant: the promise of zeros for a group whose scored rewards are all equal, so that such groups need
        not go through the model.
      takes: the rewards it is defined for, `any`, `non-negative` or `binary`; others are refused before the step.
      headroom: largest value of a parameter, counted down from the group's size: `{"k": 1}` means `k <= G - 1`.
      scored_beyond_k: scored completions that a group needs beyond `k`; groups with fewer (and with less than two) are
        dropped.
      sparse: groups whose rewards differ may get zeros too; it is then asked before the update, to leave those out.

    Raises:
      UserError: the name is taken, or looks like a file or a module.
    """

    def register(function: AdvantageEstimator) -> AdvantageEstimator:
        if name in ADVANTAGE_ESTIMATORS:
            raise UserError(f"advantage estimator '{name}' is already registered; choose another name.")
        if is_place(name):
            raise UserError(f"advantage estimator '{name}': '.' and ':' mean files and modules; choose a name without.")
        if isinstance(takes, str) and takes not in REWARD_KINDS:
            raise UserError(f"advantage estimator '{name}': takes='{takes}'. {nearest(takes, REWARD_KINDS)}")
        ADVANTAGE_ESTIMATORS[name] = Estimator(
            function,
            zero_when_constant if callable(zero_when_constant) else lambda params: bool(zero_when_constant),
            takes if callable(takes) else lambda params: takes,
            dict(headroom or {}),
            scored_beyond_k,
            sparse,
        )
        return function

    return register


def find_estimator(name: str) -> Estimator:
    """The estimator of a registered name, or of `FILE.py:function` or `package.module.function`.

    A function that its file registers under another name keeps what it was registered with.

    Raises:
      UserError: an unknown name (with the list), or a place where there is no such function.
    """
    if name not in ADVANTAGE_ESTIMATORS and is_place(name):
        function = load_function(name, "algorithm.advantage_estimator")
        found = [each for each in ADVANTAGE_ESTIMATORS.values() if each.function is function]
        if not found:
            _check_signature(name, function)
        plain = Estimator(function, lambda params: False, lambda params: "any", {}, 0, False)
        ADVANTAGE_ESTIMATORS[name] = found[0] if found else plain
    if name not in ADVANTAGE_ESTIMATORS:
        known = [each for each in ADVANTAGE_ESTIMATORS if not is_place(each)]
        raise UserError(
            f"algorithm.advantage_estimator: unknown estimator '{name}'. {nearest(name, known)} "
            "Your own is written as path/to/file.py:function."
        )
    return ADVANTAGE_ESTIMATORS[name]


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:  # some of Python's own functions have no signature
        parameters = {}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [key for key in ("scored", "lengths") if key not in parameters and not takes_all]
    if missing:
        raise UserError(
            f"algorithm.advantage_estimator '{name}': the function takes no keyword {missing[0]!r}; write "
            "def f(rewards, *, scored, lengths, <its own parameters>)."
        )


def own_parameters(function: Callable[..., Any], given: frozenset[str]) -> dict[str, Any]:
    """The keyword-only parameters a function declares beyond those `given` by its caller, with their defaults
    (`inspect.Parameter.empty` where one is required)."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given}


def check_parameters(name: str, params: Params, group_size: int, key: str = "algorithm") -> dict[str, Any]:
    """The estimator's parameters that are set, checked against what it declares and against the group's size.

    Args:
      key: the config section they were given in, for the messages.

    Raises:
      UserError: one that it does not read, one that it needs, or one that is no whole number or out of range.
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
            own = "" if key != "algorithm" or field in ("k", "truncation_order", "ddof") else ".estimator_params"
            raise UserError(f"{key}{own}.{field}: the estimator '{name}' needs it. Set {key}{own}.{field}=<value>.")
    for field, spare in estimator.headroom.items():
        value = params.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
            raise UserError(f"{key}.{field}: got {value!r}; '{name}' needs a whole number.")
        if value is not None and not 1 <= value <= group_size - spare:
            reason = ", one less than algorithm.num_generations" if spare else ", algorithm.num_generations"
            raise UserError(
                f"{key}.{field}: got {value}; '{name}' needs 1 <= {field} <= {group_size - spare}{reason} "
                f"({group_size})" + (", since each subset leaves one completion out." if spare else ".")
            )
    return params


def _place(group: int, sample: int) -> str:
    return f"group {group}, completion {sample}"


def check_rewards(
    name: str,
    params: Params,
    rewards: Float[np.ndarray, "P G"],
    scored: Bool[np.ndarray, "P G"],
    place: Callable[[int, int], str] = _place,
) -> None:
    """Value checks on the host, before the step.

    Args:
      place: how to name a completion, given its group and its number in the group.

    Raises:
      UserError: naming the estimator, the first completion whose reward it does not take, and what to do.
    """
    values = np.where(scored, rewards, 0.0)

    def refuse(bad: np.ndarray, why: str) -> None:
        if bad.any():
            group, sample = (int(i) for i in np.argwhere(bad)[0])
            raise UserError(f"{place(group, sample)}: the reward {rewards[group, sample]:.9g} {why}")

    refuse(np.abs(values) > LARGEST_REWARD, "is beyond 1e15.")
    kind = find_estimator(name).takes(params)
    if kind == "non-negative":
        cure = "algorithm.truncation_order, " if name == "maxrl" else ""
        refuse(
            values < 0,
            f"is negative, and the estimator '{name}' takes non-negative rewards only. Set {cure}"
            "algorithm.binarize=true, or give rewards >= 0.",
        )
    if kind == "binary":
        bad = scored & (values != 0) & (values != 1)
        refuse(bad, f"is neither 0 nor 1, which the estimator '{name}' needs. Set algorithm.binarize=true.")
