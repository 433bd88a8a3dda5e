"""Declares the algorithms: the default estimator, loss, aggregation and KL of each learner.

"Unbiased" refers to the sequence-level estimator, i.e. `loss_agg_mode: seq-mean-token-sum`; the other aggregations
rescale it by token counts. All statements assume rollouts of the current policy (one update per batch).
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
    """Defaults of GRPO: clipped ratio, mean over each completion's tokens, k3 in the loss when beta > 0."""

    advantage_estimator: str | None = "grpo"
    policy_loss_fn: str | None = "ppo_clip"
    loss_agg_mode: str | None = "sequence-mean-token-mean"
    kl_in_reward: bool | None = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(GRPOConfig):
    """Defaults of Dr. GRPO: GRPO without division by the group's standard deviation and by the completion's length."""

    advantage_estimator: str | None = "drgrpo"
    loss_agg_mode: str | None = "sequence-mean-token-scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLOOConfig(AlgorithmConfig):
    """Defaults of RLOO: REINFORCE on whole completions, k1 in the reward when beta > 0."""

    advantage_estimator: str | None = "rloo"
    policy_loss_fn: str | None = "reinforce"
    loss_agg_mode: str | None = "seq-mean-token-sum"
    kl_in_reward: bool | None = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxRLConfig(GRPOConfig):
    """Defaults of MaxRL: clipped ratio and mean over all tokens. The paper uses no KL."""

    advantage_estimator: str | None = "maxrl"
    loss_agg_mode: str | None = "token-mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxPOConfig(MaxRLConfig):
    """Defaults of MaxPO, equal to those of MaxRL. `k` must be set."""

    advantage_estimator: str | None = "maxpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PKPOConfig(MaxRLConfig):
    """Defaults of PKPO, equal to those of MaxRL. `k` must be set."""

    advantage_estimator: str | None = "pkpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassKConfig(MaxRLConfig):
    """Defaults of pass@k training, equal to those of MaxRL. `k` must be set."""

    advantage_estimator: str | None = "passk"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPOConfig(MaxRLConfig):
    """Defaults of OPO, equal to those of MaxRL."""

    advantage_estimator: str | None = "opo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePPConfig(MaxRLConfig):
    """Defaults of REINFORCE++, equal to those of MaxRL."""

    advantage_estimator: str | None = "reinforce_pp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomConfig(MaxRLConfig):
    """Defaults for the user's own estimator: those of MaxRL. `advantage_estimator` must be set."""

    advantage_estimator: str | None = None


class GRPOLearner(Learner):
    """Group Relative Policy Optimization (arXiv 2402.03300): `A_i = (r_i - m) / (std + 1e-6)`.

    Biased for the pass rate p: easy and hard prompts get more weight, `1 / sqrt(p (1 - p))` in the limit of large
    groups.
    """

    config_class = GRPOConfig


class DrGRPOLearner(Learner):
    """Dr. GRPO (arXiv 2503.20783): `A_i = r_i - m`, divided by a constant length.

    The expected gradient is `(G-1)/G` times the gradient of the expected reward.
    """

    config_class = DrGRPOConfig


class RLOOLearner(Learner):
    """REINFORCE leave-one-out (arXiv 2402.14740): `A_i = r_i - mean_{j != i} r_j`. Unbiased for the expected reward."""

    config_class = RLOOConfig


class MaxRLLearner(Learner):
    """Maximum Likelihood RL (arXiv 2602.02710): `A_i = (r_i - m) / m`, 0 if no completion succeeds.

    For 0/1 rewards it is unbiased for the log-likelihood of success truncated after order `G - 1`, with population
    weight `(1 - (1-p)^(G-1)) / p`. With more rollouts per prompt it approaches maximum likelihood. Rewards must be
    non-negative.
    """

    config_class = MaxRLConfig


class MaxPOLearner(Learner):
    """Max-at-K Policy Optimization (arXiv 2606.06080): `A_i = k L_k,i`, where `L` is the Leave-Two-Out advantage.

    Unbiased for max@k and centred in every group. Needs `1 <= k <= G - 1`.
    """

    config_class = MaxPOConfig


class PKPOLearner(Learner):
    """Pass-at-k Policy Optimization (arXiv 2505.15201): `A_i = k (q_i - V_{k-1}(-i))`, the paper's s_loo-1.

    Unbiased for max@k like MaxPO, but not centred: completions that do not raise a maximum get 0 and are skipped. Needs
    `1 <= k <= G`.
    """

    config_class = PKPOConfig


class PassKLearner(Learner):
    """Pass@k training (arXiv 2508.10751): `A_i = (q_i - V_k) / (sqrt(V_k (1 - V_k)) + 1e-6)`, for 0/1 rewards only.

    This is the standardised gradient of pass@k; like GRPO it is biased. Needs `1 <= k <= G - 1`.
    """

    config_class = PassKConfig


class OPOLearner(Learner):
    """On-Policy RL with Optimal reward baseline (arXiv 2505.23585): `A_i = r_i - sum_j l_j r_j / sum_j l_j`.

    `l_j` are the completions' lengths. It assumes that the variance of a completion's gradient grows with its length.
    The baseline includes the completion's own reward. With equal lengths the expected gradient is therefore exactly
    `(G-1)/G` times the gradient of the expected reward. Unequal lengths add a term of order 1/G in another direction.
    """

    config_class = OPOConfig


class ReinforcePPLearner(Learner):
    """REINFORCE++ with a group baseline (arXiv 2501.03262): `A_i = r_i - m`, whitened over all tokens of the batch.

    Biased, because shift and scale are computed from the same batch. It assumes large batches, for which it is the
    gradient of the expected reward up to a scale.
    """

    config_class = ReinforcePPConfig


class CustomLearner(Learner):
    """Uses the user's own estimator, registered or given as `FILE.py:function`, with MaxRL's loss and aggregation."""

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
"""Maps `algorithm.advantage_estimator` to the learner class with its default loss and aggregation."""


def find_learner(name: str | None) -> type[Learner]:
    """Returns the learner class of an estimator's name or of `FILE.py:function`.

    Raises:
      UserError: the name is unknown (the message lists the known names), or the file or module has no such function.
    """
    if name is None:
        names = [estimator for estimator in ADVANTAGE_ESTIMATORS if not is_place(estimator)]
        raise UserError(f"algorithm.advantage_estimator: choose one. {nearest('', names)}")
    find_estimator(name)
    return LEARNERS.get(name, CustomLearner)
