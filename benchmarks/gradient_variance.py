"""Computes the exact variance of the gradient of one group, by estimator, pass rate p, group size G and K.

    python -m benchmarks.gradient_variance [--json FILE]

The gradient estimate of one group is `g = (1/G) sum_i A_i S_i`, `S_i` the gradient of log pi(y_i) by the logits. Its
variance is the trace of its covariance. Rewards are 0/1, so that an estimator is two functions of the number of
successes `c ~ Bin(G, p)`, `A_succ(c)` and `A_fail(c)`, taken from the library's own estimators. Given `c`, successes
are independent samples among the successful answers, failures among the others. With

    mean of S over successes  (1-p) d        trace of its covariance there  v_succ
    mean of S over failures     -p  d        trace of its covariance there  v_fail         d = grad p / (p (1-p))
    h(c) = (c A_succ(c) (1-p) - (G-c) A_fail(c) p) / G

the expected gradient is `E[h] d`, and

    variance = E[ c A_succ^2 v_succ + (G-c) A_fail^2 v_fail ] / G^2  +  |d|^2 Var[h].

The first part is the variance due to which answers were sampled, the second that due to the number of successes.
Policies:

- `two-arm`: one logit, p = sigmoid(theta). All successes are the same answer: v_succ = v_fail = 0, |d| = 1.
- `20-arm`: softmax of 20 equal logits, 20 p of them successful: v_succ = 1 - 1/(20 p), v_fail = 1 - 1/(20 (1-p)),
  |d|^2 = 1 / (20 p (1-p)).
- `many-arm`: the limit of many arms, in which all completions differ: v_succ, v_fail -> 1 and |d| -> 0. Only ratios of
  two variances exist.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tunix_like.algorithms.objective import GroupEstimator
from tunix_like.algorithms.population_weights import advantages_of, binomial_pmf

PASS_RATES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
GROUP_SIZES = (8, 16, 64)
MIDDLE_ORDER = 4
"""The K at which the max@K estimators are compared with the others."""
ALPHAS = (0.5, 1.5)
"""Between and beyond `rloo`, which is `maxk_mix` with alpha 0, and `maxrl`, which is alpha 1."""


def orders(size: int) -> list[int]:
    """Returns the values of K at one group size. The last is the largest that L2O has."""
    return [k for k in (2, MIDDLE_ORDER, 8) if k < size - 1] + [size - 1]


@dataclasses.dataclass(frozen=True)
class Policy:
    """The values of a policy that the variance depends on at one pass rate: `v_succ`, `v_fail` and `|d|^2`."""

    name: str
    within_success: float
    within_failure: float
    between: float


def policies(p: float, arms: int = 20) -> tuple[Policy, ...]:
    """Returns the three policies at pass rate `p`; `p * arms` must be an integer."""
    good = round(p * arms)
    if not math.isclose(good, p * arms) or not 0 < good < arms:
        raise ValueError(f"p = {p} of {arms} arms is no whole number of them between 1 and {arms - 1}")
    bad = arms - good
    return (
        Policy("two-arm", 0.0, 0.0, 1.0),
        Policy(f"{arms}-arm", 1 - 1 / good, 1 - 1 / bad, arms / (good * bad)),
        Policy("many-arm", 1.0, 1.0, 0.0),
    )


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of the gradient estimate of one group: the trace of its covariance and the squared norm of its
    expectation."""

    variance: float
    signal: float


def moments(success: Float[np.ndarray, "C"], failure: Float[np.ndarray, "C"], p: float, policy: Policy) -> Moments:
    """Computes the formula of the module's docstring.

    Args:
      success: `A_succ(c)` for `c = 0..G` (any number at `c = 0`).
      failure: `A_fail(c)` (any number at `c = G`).
    """
    size = len(success) - 1
    c = np.arange(size + 1)
    weight = binomial_pmf(size, np.array([p]))[0]
    which = c * success**2 * policy.within_success + (size - c) * failure**2 * policy.within_failure
    pull = (c * success * (1 - p) - (size - c) * failure * p) / size
    mean = weight @ pull
    variance = weight @ which / size**2 + policy.between * (weight @ (pull - mean) ** 2)
    return Moments(float(variance), float(policy.between * mean**2))


def plain_leave_one_out(size: int, k: int) -> tuple[Float[np.ndarray, "C"], Float[np.ndarray, "C"]]:
    """`A_succ(c)`, `A_fail(c)` of PKPO's `s_loo` (arXiv 2505.15201, eq. 29), times G for the mean over the group.

    The paper subtracts from `S(i, k, group) = (k/G) q_i` the average of `S(j, k, group without i)` over `j != i`, which
    is `k/(G-1) V_k(-i)`. Times G: `k (q_i - G/(G-1) V_k(-i))`: the Leave-Two-Out advantage except for the factor
    `G/(G-1)`, because of which it does not sum to zero.
    """
    pairs = []
    for c in range(size + 1):
        hopeless = lambda failures, count, k: math.comb(max(failures, 0), k) / math.comb(count, k)  # noqa: E731
        f = size - c
        q = 1.0, 1 - hopeless(f - 1, size - 1, k - 1)
        without = 1 - hopeless(f, size - 1, k), 1 - hopeless(f - 1, size - 1, k)
        pairs.append([k * (q[i] - size / (size - 1) * without[i]) for i in range(2)])
    success, failure = np.array(pairs).T
    return success, failure


def advantage_pairs(size: int) -> dict[str, tuple[Float[np.ndarray, "C"], Float[np.ndarray, "C"]]]:
    """Returns `A_succ(c)` and `A_fail(c)` of every estimator at one group size, from the functions that a run trains
    with."""
    chosen = {name: GroupEstimator(name, {}) for name in ("rloo", "grpo", "maxrl")}
    chosen |= {f"{name} k={k}": GroupEstimator(name, {"k": k}) for name in ("maxpo", "pkpo") for k in orders(size)}
    chosen |= {f"alpha {alpha}": GroupEstimator("maxk_mix", {"alpha": alpha}) for alpha in ALPHAS}
    groups = (np.arange(size)[None] < np.arange(size + 1)[:, None]).astype(np.float64)
    found = advantages_of(list(chosen.values()), groups)
    pairs = {name: (each[:, 0], each[:, -1]) for name, each in zip(chosen, found, strict=True)}
    return pairs | {f"s_loo k={k}": plain_leave_one_out(size, k) for k in orders(size)}


def study(pass_rates: Sequence[float], sizes: Sequence[int], arms: int = 20) -> list[dict[str, Any]]:
    """Returns a row for every estimator, policy, p and G: `variance`, and `signal`, the squared norm of its expected
    gradient."""
    rows = []
    for size in sizes:
        pairs = advantage_pairs(size)
        for p in pass_rates:
            for policy in policies(p, arms):
                for name, (success, failure) in pairs.items():
                    found = moments(success, failure, p, policy)
                    place = {"policy": policy.name, "p": p, "G": size, "estimator": name}
                    rows.append(place | dataclasses.asdict(found))
    return rows


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, aligned so that it is readable in a terminal."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    first, *others = (
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (header, *rows)
    )
    return "\n".join([first, rule, *others])


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


class Results:
    """The rows of a study, by policy, p, G and estimator, and as tables."""

    def __init__(self, rows: Sequence[dict[str, Any]]):
        self.found = {(row["policy"], row["p"], row["G"], row["estimator"]): row for row in rows}
        self.policies, self.rates, self.sizes = (
            list(dict.fromkeys(row[key] for row in rows)) for key in ("policy", "p", "G")
        )
        self.header = [f"p={p:g}" for p in self.rates]

    def variances(self, policy: str, size: int, estimator: str) -> list[float]:
        return [self.found[policy, p, size, estimator]["variance"] for p in self.rates]

    def ratios(self, estimator: str, middle_only: bool = False) -> str:
        """Returns variances over those of s_loo-1 (`pkpo`) at the same K, that is with the same expected gradient."""
        lines = []
        for size in self.sizes:
            for k in [MIDDLE_ORDER] if middle_only else orders(size):
                for policy in self.policies:
                    own = self.variances(policy, size, f"{estimator} k={k}")
                    base = self.variances(policy, size, f"pkpo k={k}")
                    lines.append([str(size), str(k), policy, *(_number(a / b) for a, b in zip(own, base, strict=True))])
        return table(["G", "K", "policy", *self.header], lines)

    def noise_to_signal(self) -> str:
        """Returns the variance over the squared norm of the estimator's expected gradient."""
        k = f" k={MIDDLE_ORDER}"
        lines = []
        for size in self.sizes:
            for policy in (name for name in self.policies if name != "many-arm"):
                for name in ("rloo", "alpha 0.5", "maxrl", "alpha 1.5", "grpo", "maxpo" + k, "pkpo" + k):
                    each = [self.found[policy, p, size, name] for p in self.rates]
                    lines.append([str(size), policy, name, *(_number(row["variance"] / row["signal"]) for row in each)])
        return table(["G", "policy", "estimator", *self.header], lines)


def report(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Returns the printed tables, each with its title."""
    results = Results(rows)
    return {
        "Variance of L2O (maxpo) over that of s_loo-1 (pkpo)": results.ratios("maxpo"),
        "Variance of s_loo over that of s_loo-1 (pkpo)": results.ratios("s_loo", middle_only=True),
        "Variance over squared expected gradient, each estimator's own": results.noise_to_signal(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Exact gradient variance of the advantage estimators.")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/gradient_variance.json"))
    arguments = parser.parse_args(argv)
    rows = study(PASS_RATES, GROUP_SIZES)
    for title, lines in report(rows).items():
        print(f"{title}:\n\n{lines}\n")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
