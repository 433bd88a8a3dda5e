"""Declares the algorithms: the default estimator, loss, aggregation and KL of each learner.

In the formulas, `A_i` are the advantages and `r_i` the rewards of a group of `G` completions. `m` is the mean of the
rewards, and `std` is their standard deviation. docs/algorithms.md defines `q_i`, `V_k` and `L_k,i`. "Biased" and
"unbiased" refer to the gradient estimate with `loss_agg_mode: seq-mean-token-sum`, which other aggregations rescale by
token counts, and assume completions of the current policy (one update per batch).
"""

from __future__ import annotations

import dataclasses

from tunix_like.algorithms.distillation import DISTILLATION
from tunix_like.algorithms.ppo import PPO
from tunix_like.algorithms.registry import ADVANTAGE_ESTIMATORS, find_estimator
from tunix_like.algorithms.token_baseline import TOKEN_BASELINE
from tunix_like.config.schema import PAIR_LEARNERS, AlgorithmConfig
from tunix_like.errors import UserError, nearest
from tunix_like.runtime.user_code import is_place
from tunix_like.training.learner import Learner


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(AlgorithmConfig):
    """Defaults of GRPO: clipped-ratio loss, mean over each completion's tokens; KL estimate k3 in the loss if
    `beta` > 0."""

    advantage_estimator: str | None = "grpo"
    policy_loss_fn: str | None = "ppo_clip"
    loss_agg_mode: str | None = "sequence-mean-token-mean"
    kl_in_reward: bool | None = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(GRPOConfig):
    """Defaults of Dr. GRPO: GRPO without division by the group's standard deviation or by the completion's length."""

    advantage_estimator: str | None = "drgrpo"
    loss_agg_mode: str | None = "sequence-mean-token-scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLOOConfig(AlgorithmConfig):
    """Defaults of RLOO: REINFORCE loss, sum over each completion's tokens; KL estimate k1 in the reward if
    `beta` > 0."""

    advantage_estimator: str | None = "rloo"
    policy_loss_fn: str | None = "reinforce"
    loss_agg_mode: str | None = "seq-mean-token-sum"
    kl_in_reward: bool | None = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxRLConfig(GRPOConfig):
    """Defaults of MaxRL: clipped-ratio loss, mean over all tokens of an update. The paper uses no KL."""

    advantage_estimator: str | None = "maxrl"
    loss_agg_mode: str | None = "token-mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxPOConfig(MaxRLConfig):
    """Defaults of MaxPO, equal to those of MaxRL. `k` must be set."""

    advantage_estimator: str | None = "maxpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxKMixConfig(MaxRLConfig):
    """Defaults of MaxKMix, equal to those of MaxRL. `alpha` or `coefficients` must be set."""

    advantage_estimator: str | None = "maxk_mix"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderStatisticConfig(MaxRLConfig):
    """Defaults of order statistics, equal to those of MaxRL. `k`, and `weights` or `statistic` must be set."""

    advantage_estimator: str | None = "order_statistic"


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
class OTBConfig(RLOOConfig):
    """Defaults of OTB, equal to those of RLOO."""

    advantage_estimator: str | None = TOKEN_BASELINE


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePPConfig(MaxRLConfig):
    """Defaults of REINFORCE++, equal to those of MaxRL."""

    advantage_estimator: str | None = "reinforce_pp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(MaxRLConfig):
    """Defaults of PPO: clipped-ratio loss, mean over all tokens of an update; KL estimate k1 in the reward of each
    token if `beta` > 0."""

    advantage_estimator: str | None = PPO
    kl_in_reward: bool | None = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig(MaxRLConfig):
    """Defaults of on-policy distillation, equal to those of MaxRL."""

    advantage_estimator: str | None = DISTILLATION


@dataclasses.dataclass(frozen=True, kw_only=True)
class GDPOConfig(GRPOConfig):
    """Defaults of GDPO, equal to those of GRPO."""

    advantage_estimator: str | None = "gdpo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomConfig(MaxRLConfig):
    """Defaults for an estimator of the user, equal to those of MaxRL. `advantage_estimator` must be set."""

    advantage_estimator: str | None = None


class GRPOLearner(Learner):
    """Group Relative Policy Optimization (arXiv 2402.03300): `A_i = (r_i - m) / (std + 1e-6)`.

    The gradient estimate is biased: it gives more weight to prompts with a pass rate p near 0 or 1. In the limit of
    large groups, the weight is `1 / sqrt(p (1 - p))`.
    """

    config_class = GRPOConfig


class DrGRPOLearner(Learner):
    """Dr. GRPO (arXiv 2503.20783): `A_i = r_i - m`. The loss of a completion is divided by a constant length.

    The expected gradient is `(G-1)/G` times the gradient of the expected reward.
    """

    config_class = DrGRPOConfig


class RLOOLearner(Learner):
    """REINFORCE leave-one-out (arXiv 2402.14740): `A_i = r_i - mean_{j != i} r_j`.

    The gradient estimate is unbiased for the expected reward.
    """

    config_class = RLOOConfig


class MaxRLLearner(Learner):
    """Maximum Likelihood RL (arXiv 2602.02710): `A_i = (r_i - m) / m`, or 0 if `m` is 0.

    The log-likelihood of success is a power series in `1 - p`, where p is the pass rate of a prompt. For 0/1 rewards,
    the gradient estimate is unbiased for the sum of the terms of this series up to order `G - 1`, in which the prompt
    has the weight `(1 - (1-p)^(G-1)) / p`. Rewards must be non-negative.
    """

    config_class = MaxRLConfig


class MaxPOLearner(Learner):
    """Max-at-K Policy Optimization (arXiv 2606.06080): `A_i = k L_k,i`.

    `L_k,i` is the Leave-Two-Out advantage. The gradient estimate is unbiased for max@k. The advantages of a group sum
    to 0. `k` must be from 1 to `G - 1`.
    """

    config_class = MaxPOConfig


class MaxKMixLearner(Learner):
    """A sum of Leave-Two-Out advantages: `A_i = sum_k c_k L_k,i`.

    For 0/1 rewards, a prompt with pass rate p has the weight `sum_k c_k (1-p)^(k-1)`, exactly. `alpha` chooses the
    coefficients of the series of `p^-alpha`: 0 is RLOO, 1 is MaxRL of order `G - 1`. For other rewards, the gradient
    estimate is unbiased for `sum_k c_k max@k / k`. The advantages of a group sum to 0.
    """

    config_class = MaxKMixConfig


class OrderStatisticLearner(Learner):
    """OrderGrad (arXiv 2606.06096): `A_i = k (inc_i - loo_i)`.

    `inc_i` and `loo_i` are the means of a statistic of k sorted rewards over the subsets of k completions with and
    without completion i. The gradient estimate is unbiased for the expected statistic of k completions, such as their
    median or the mean of the worst. The advantages of a group sum to 0. `k` must be from 1 to `G - 1`.
    """

    config_class = OrderStatisticConfig


class PKPOLearner(Learner):
    """Pass-at-k Policy Optimization (arXiv 2505.15201): `A_i = k (q_i - V_{k-1}(-i))`.

    This is G times the paper's advantage s_loo-1. `q_i` is the mean maximum reward of the subsets of k completions that
    contain completion i; `V_{k-1}(-i)` is that of the subsets of k - 1 other completions. The gradient estimate is
    unbiased for max@k. In contrast to MaxPO, the advantages of a group do not sum to 0. A completion that does not
    raise the maximum of any subset has the advantage 0 and is left out of the update. `k` must be from 1 to `G`.
    """

    config_class = PKPOConfig


class PassKLearner(Learner):
    """Pass@k training (arXiv 2508.10751): `A_i = (q_i - V_k) / (sqrt(V_k (1 - V_k)) + 1e-6)`, for 0/1 rewards only.

    `V_k` is the group's pass@k estimate: the fraction of the subsets of k completions that contain a success. `q_i` is
    this fraction among the subsets that contain completion i. The denominator is the standard deviation of a 0/1
    variable with mean `V_k`, plus 1e-6. It makes the gradient estimate biased. `k` must be from 1 to `G - 1`.
    """

    config_class = PassKConfig


class OPOLearner(Learner):
    """On-Policy RL with Optimal reward baseline (arXiv 2505.23585): `A_i = r_i - sum_j l_j r_j / sum_j l_j`.

    `l_j` are the lengths of the group's completions. The baseline assumes that the variance of a completion's gradient
    grows with its length, and includes the completion's own reward. With equal lengths, the expected gradient is
    therefore `(G-1)/G` times the gradient of the expected reward. With unequal lengths, it has an additional term of
    order 1/G with another direction.
    """

    config_class = OPOConfig


class OTBLearner(Learner):
    """RLOO with the optimal baseline of each token (arXiv 2602.07078): `A_i,n = r_i - sum_j W_j,n r_j / sum_j W_j,n`
    over the other completions j that have an n-th sampled token.

    `W_j,n` is the sum of the squared norms of the gradients of the first n log-probabilities with respect to the
    logits, which one more forward pass computes. In contrast to the paper and verl, completion i is not part of its own
    baseline, so the gradient estimate is unbiased for the expected reward.
    """

    config_class = OTBConfig


class ReinforcePPLearner(Learner):
    """REINFORCE++ with a group baseline (arXiv 2501.03262): `A_i = r_i - m`, whitened over all tokens of the batch.

    Whitening shifts and scales the advantages to mean 0 and variance 1. The gradient estimate is biased, because shift
    and scale are computed from the same batch. For large batches, it approaches the gradient of the expected reward
    times a constant.
    """

    config_class = ReinforcePPConfig


class PPOLearner(Learner):
    """Proximal policy optimization with a critic (arXiv 1707.06347): each token has its generalised advantage estimate
    (arXiv 1506.02438), whitened over the batch.

    `critic_config` has the settings of the critic. Completions of a prompt are not compared, so `num_generations` can
    be 1. With `gae_lambda` and `gamma` 1 the gradient estimate is, up to whitening, unbiased for the expected reward.
    """

    config_class = PPOConfig


class DistillationLearner(Learner):
    """On-policy distillation (arXiv 2306.13649): a teacher scores the tokens that the policy samples.

    `teacher_config` selects the divergence. Rewards are not read and `reward_fns` can be empty; they are only reported.
    To add a teacher to rewards, give `teacher` and `teacher_config` to another learner.
    """

    config_class = DistillationConfig


class GDPOLearner(Learner):
    """Group reward-Decoupled Normalization Policy Optimization (arXiv 2601.05242), for several reward functions.

    The rewards of each function are standardised over the group, added with the weights of the functions, and divided
    by their standard deviation over the batch. Functions of small rewards then count as much as others of equal weight.
    The gradient estimate is biased like that of GRPO.
    """

    config_class = GDPOConfig


class CustomLearner(Learner):
    """Uses an estimator of the user, with MaxRL's loss and aggregation.

    `advantage_estimator` is the registered name of the estimator, or `FILE.py:function`.
    """

    config_class = CustomConfig


LEARNERS: dict[str, type[Learner]] = {
    str(learner.config_class().advantage_estimator): learner
    for learner in (
        GRPOLearner,
        DrGRPOLearner,
        RLOOLearner,
        MaxRLLearner,
        MaxPOLearner,
        MaxKMixLearner,
        OrderStatisticLearner,
        PKPOLearner,
        PassKLearner,
        OPOLearner,
        OTBLearner,
        ReinforcePPLearner,
        PPOLearner,
        DistillationLearner,
        GDPOLearner,
    )
}
"""Maps the name of an estimator (`algorithm.advantage_estimator`) to its learner class, which has the default loss and
aggregation for this estimator."""


def find_learner(name: str | None) -> type[Learner]:
    """Returns the learner class for an estimator, given by its name or as `FILE.py:function`.

    Raises:
      UserError: the name is None or unknown (the message lists the known names), or the file or module does not have
        the function.
    """
    if name is None:
        names = [*PAIR_LEARNERS, *(estimator for estimator in ADVANTAGE_ESTIMATORS if not is_place(estimator))]
        raise UserError(f"algorithm.advantage_estimator: choose one. {nearest('', names)}")
    find_estimator(name, PAIR_LEARNERS)
    return LEARNERS.get(name, CustomLearner)
