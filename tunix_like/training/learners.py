"""The algorithms, one declaration each: what a name means in estimator, loss, aggregation and KL.

"Unbiased" speaks of the sequence-level estimator, which `loss_agg_mode: seq-mean-token-sum` keeps; the other
aggregations rescale it by token counts. All gradients are exact for rollouts of the current policy (one update per
batch).
"""

from __future__ import annotations

import dataclasses

from tunix_like.algorithms.registry import ADVANTAGE_ESTIMATORS, find_estimator
from tunix_like.config.schema import AlgorithmConfig
from tunix_like.errors import UserError, nearest
from tunix_like.runtime.user_code import is_place
from tunix_like.training.learner import Learner


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(AlgorithmConfig):
    """GRPO's defaults: a clipped ratio, the mean over each completion's tokens, k3 in the loss when beta > 0."""

    advantage_estimator: str | None = "grpo"
    policy_loss_fn: str | None = "ppo_clip"
    loss_agg_mode: str | None = "sequence-mean-token-mean"
    kl_in_reward: bool | None = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(GRPOConfig):
    """GRPO without the two biases: no division by the group's deviation, none by the completion's length."""

    advantage_estimator: str | None = "drgrpo"
    loss_agg_mode: str | None = "sequence-mean-token-scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLOOConfig(AlgorithmConfig):
    """Plain REINFORCE on whole completions; k1 in the reward when beta > 0."""

    advantage_estimator: str | None = "rloo"
    policy_loss_fn: str | None = "reinforce"
    loss_agg_mode: str | None = "seq-mean-token-sum"
    kl_in_reward: bool | None = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxRLConfig(GRPOConfig):
    """A clipped ratio and the mean over all tokens; the paper uses no KL."""

    advantage_estimator: str | None = "maxrl"
    loss_agg_mode: str | None = "token-mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxPOConfig(MaxRLConfig):
    """As MaxRL; `k` must be set."""

    advantage_estimator: str | None = "maxpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PKPOConfig(MaxRLConfig):
    """As MaxRL; `k` must be set."""

    advantage_estimator: str | None = "pkpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassKConfig(MaxRLConfig):
    """As MaxRL; `k` must be set."""

    advantage_estimator: str | None = "passk"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPOConfig(MaxRLConfig):
    """As MaxRL."""

    advantage_estimator: str | None = "opo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePPConfig(MaxRLConfig):
    """As MaxRL."""

    advantage_estimator: str | None = "reinforce_pp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomConfig(MaxRLConfig):
    """For an estimator of the user's own: `advantage_estimator` names it."""

    advantage_estimator: str | None = None


class GRPOLearner(Learner):
    """Group Relative Policy Optimization (arXiv 2402.03300): `A_i = (r_i - m) / (std + 1e-6)`.

    Not unbiased for the pass rate p: easy and hard prompts are weighed up, by `1 / sqrt(p (1 - p))` in the limit.
    """

    config_class = GRPOConfig


class DrGRPOLearner(Learner):
    """Dr. GRPO (arXiv 2503.20783): `A_i = r_i - m`, divided by a constant length. `(G-1)/G` of the gradient of p."""

    config_class = DrGRPOConfig


class RLOOLearner(Learner):
    """REINFORCE leave-one-out (arXiv 2402.14740): `A_i = r_i - mean_{j != i} r_j`. Unbiased for the expected reward."""

    config_class = RLOOConfig


class MaxRLLearner(Learner):
    """Maximum Likelihood RL (arXiv 2602.02710): `A_i = (r_i - m) / m`, zeros where nothing succeeds.

    For 0/1 rewards unbiased for the log-likelihood of success truncated after order `G - 1`, population weight
    `(1 - (1-p)^(G-1)) / p`: more rollouts per prompt bring it closer to maximum likelihood. Assumes rewards >= 0.
    """

    config_class = MaxRLConfig


class MaxPOLearner(Learner):
    """Max-at-K Policy Optimization (arXiv 2606.06080): `A_i = k L_k,i`, the Leave-Two-Out advantage. Unbiased for
    max@k, centred in every group; needs `1 <= k <= G - 1`."""

    config_class = MaxPOConfig


class PKPOLearner(Learner):
    """Pass-at-k Policy Optimization (arXiv 2505.15201): `A_i = k (q_i - V_{k-1}(-i))`, the paper's s_loo-1.

    Unbiased for max@k like MaxPO, not centred: the completions that do not raise a maximum get 0 and cost nothing.
    Needs `1 <= k <= G`.
    """

    config_class = PKPOConfig


class PassKLearner(Learner):
    """Pass@k training (arXiv 2508.10751): `A_i = (q_i - V_k) / (sqrt(V_k (1 - V_k)) + 1e-6)`, 0/1 rewards only.

    The standardised gradient of pass@k: like GRPO not unbiased for any objective. Needs `1 <= k <= G - 1`.
    """

    config_class = PassKConfig


class OPOLearner(Learner):
    """On-Policy RL with Optimal reward baseline (arXiv 2505.23585): `A_i = r_i - sum_j l_j r_j / sum_j l_j`, `l_j` the
    completions' lengths. Assumes that the variance of a completion's gradient grows with its length. The baseline holds
    the completion's own reward: for equal lengths that is exactly `(G-1)/G` of the gradient of the expected reward, and
    unequal ones add a term of order 1/G in another direction."""

    config_class = OPOConfig


class ReinforcePPLearner(Learner):
    """REINFORCE++ with a group baseline (arXiv 2501.03262): `A_i = r_i - m`, whitened over all tokens of the batch.

    Not unbiased: shift and scale come from the batch itself. For large batches, which it assumes, the gradient of the
    expected reward up to a scale.
    """

    config_class = ReinforcePPConfig


class CustomLearner(Learner):
    """An estimator of the user's own, registered or named as `FILE.py:function`, with MaxRL's loss and aggregation."""

    config_class = CustomConfig


LEARNERS: dict[str, type[Learner]] = {
    str(learner.config_class().advantage_estimator): learner
    for learner in (
        GRPOLearner,
        DrGRPOLearner,
        RLOOLearner,
        MaxRLLearner,
        MaxPOLearner,
        PKPOLearner,
        PassKLearner,
        OPOLearner,
        ReinforcePPLearner,
    )
}
"""`algorithm.advantage_estimator` to the learner that brings its loss and aggregation."""


def find_learner(name: str | None) -> type[Learner]:
    """The learner of an estimator's name, or of `FILE.py:function`.

    Raises:
      UserError: an unknown name (with the list), or a place where there is no such function.
    """
    if name is None:
        known = [each for each in ADVANTAGE_ESTIMATORS if not is_place(each)]
        raise UserError(f"algorithm.advantage_estimator: choose one. {nearest('', known)}")
    find_estimator(name)
    return LEARNERS.get(name, CustomLearner)
