"""Defines the losses of pairs of completions, the better of which is known: DPO, IPO, ORPO and Bradley-Terry.

`s_c` and `s_r` are the sums over the chosen and the rejected completion of `log pi - log pi_ref` (of `log pi` without a
reference), `n_c` and `n_r` their numbers of tokens, and `sigma` the logistic function:

- `sigmoid` (DPO, arXiv 2305.18290): `-(1 - e) log sigma(beta (s_c - s_r)) - e log sigma(-beta (s_c - s_r))`, where `e`
  is the label smoothing.
- `ipo` (arXiv 2310.12036): `(s_c / n_c - s_r / n_r - 1 / (2 beta))^2`. As in TRL, log-ratios are means over tokens.
- `orpo` (arXiv 2403.07691): the mean of `-log pi` over all tokens of the chosen completions of the batch, minus
  `beta log sigma(log odds_c - log odds_r)`, where `log odds = m - log(1 - exp(m))` and `m` is the mean of `log pi` over
  the tokens of a completion.
- `bradley_terry`: `-log sigma(s_c - s_r) + center (s_c + s_r)^2`, where `s` is the reward of a completion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from tunix_like.algorithms.losses import Rows, TokenInputs, Tokens

CHOSEN = 1.0
REJECTED = -1.0
"""The `GroupBatch.rewards` of the two completions of a pair, which tell the loss which one is chosen."""

_PAIRS = "pairs"
"""The metric that counts pairs in a compiled step, and the prefix of its other metrics per pair."""


class PairSums(NamedTuple):
    """Sums over the tokens of completions: log-probabilities, those of the reference, and numbers of tokens."""

    logps: Float[Array, "*pairs"]
    ref: Float[Array, "*pairs"]
    tokens: Shaped[Array, "*pairs"]


def over_pairs(metrics: Mapping[str, float]) -> dict[str, float]:
    """Converts the metrics of a compiled step per pair, which are means over tokens, to means over pairs."""
    count = metrics[_PAIRS]
    prefix = f"{_PAIRS}/"
    rest = {name: value for name, value in metrics.items() if not name.startswith(_PAIRS)}
    return rest | {
        name.removeprefix(prefix): value / count for name, value in metrics.items() if name.startswith(prefix)
    }


@dataclasses.dataclass(frozen=True)
class PairObjective:
    """The objective of a compiled step on pairs: groups of two completions, which are in the same lane of a chunk.

    Attributes:
      loss: `sigmoid`, `ipo`, `orpo` or `bradley_terry`.
      beta, label_smoothing, center: as in the formulas above.
    """

    loss: str
    beta: float = 1.0
    label_smoothing: float = 0.0
    center: float = 0.0

    built_in = True

    def key(self) -> Hashable:
        return self

    def advantages(
        self,
        rewards: Float[Array, "P G"],
        scored: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        return rewards

    def weights(
        self,
        scored: Bool[Array, "P G"],
        trained: Bool[Array, "P G"],
        lengths: Int[Array, "P G"],
        in_update: Bool[Array, "P"],
        ids: Int[Array, "P"],
    ) -> Float[Array, "P G"]:
        """Returns `1 / pairs` for rejected completions, whose first token has the loss of the pair, and one divided by
        the number of chosen tokens for chosen completions, whose tokens have the likelihood term of ORPO."""
        each = jnp.array([1 / lengths[:, 0].sum(), 1 / len(lengths)], jnp.float32)
        return jnp.broadcast_to(each, lengths.shape)

    def token_loss(self, tokens: TokenInputs, advantages: Rows) -> tuple[Tokens, dict[str, Tokens]]:
        """Returns the loss and the metrics of each pair at the first trained token of its rejected completion."""
        mask = tokens.mask
        role = advantages[..., 0]

        def of(kind: float, values: Tokens) -> Float[Array, "A"]:
            return jnp.where((role == kind)[..., None] & mask, values, 0.0).sum((-2, -1))

        ref = jnp.zeros_like(tokens.logprobs) if tokens.ref_logprobs is None else tokens.ref_logprobs
        sums = [
            PairSums(of(kind, tokens.logprobs), of(kind, ref), of(kind, jnp.ones_like(ref)))
            for kind in (CHOSEN, REJECTED)
        ]
        loss, metrics = self.pairs(*sums)
        place = (role == REJECTED)[..., None] & mask & (jnp.cumsum(mask, axis=-1) == 1)
        out = jnp.where(place, loss[..., None, None], 0.0)
        if self.loss == "orpo":
            out = jnp.where((role == CHOSEN)[..., None] & mask, -tokens.logprobs, out)
        metrics = {_PAIRS: jnp.ones_like(loss)} | {f"{_PAIRS}/{name}": value for name, value in metrics.items()}
        return out, {name: jnp.where(place, value[..., None, None], 0.0) for name, value in metrics.items()}

    def pairs(self, chosen: PairSums, rejected: PairSums) -> tuple[Float[Array, "*pairs"], dict[str, Any]]:
        """Returns the loss of each pair, for ORPO without the likelihood term, and its metrics.

        A lane of a chunk without a pair has no tokens, and its loss is finite.
        """
        logps, ref, tokens = (jnp.stack(parts) for parts in zip(chosen, rejected, strict=True))
        count = jnp.maximum(tokens, 1)
        if self.loss == "orpo":
            logps = jnp.where(tokens > 0, logps / count, -1.0)
            log_odds = logps - _log1mexp(logps)
            ratio = jax.nn.log_sigmoid(log_odds[0] - log_odds[1])
            loss = -self.beta * ratio
            rewards = self.beta * logps
            extra = {"log_odds_ratio": ratio}
        else:
            rewards = self.beta * (logps - ref)
            extra = {}
            margin = rewards[0] - rewards[1]
            if self.loss == "ipo":
                means = (logps - ref) / count
                loss = (means[0] - means[1] - 1 / (2 * self.beta)) ** 2
            else:
                swapped = self.label_smoothing
                loss = -(1 - swapped) * jax.nn.log_sigmoid(margin) - swapped * jax.nn.log_sigmoid(-margin)
                loss += self.center * (rewards[0] + rewards[1]) ** 2
        metrics = {
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/margins": rewards[0] - rewards[1],
            "rewards/accuracies": (rewards[0] > rewards[1]).astype(jnp.float32),
        } | extra
        if self.loss != "bradley_terry":
            metrics |= {"logps/chosen": logps[0], "logps/rejected": logps[1]}
        return loss, jax.lax.stop_gradient(metrics)

    def of_batch(
        self, logps: Float[Any, "N 2"], ref: Float[Any, "N 2"] | None, tokens: Int[Any, "N 2"]
    ) -> dict[str, Float[Array, ""]]:
        """Returns the loss and the metrics of pairs, as `token_loss` and `weights` define them, from the sums of the
        log-probabilities and the numbers of tokens of their completions. Column 0 is chosen."""
        columns = [jnp.asarray(logps), jnp.zeros_like(logps) if ref is None else jnp.asarray(ref), jnp.asarray(tokens)]
        loss, metrics = self.pairs(*(PairSums(*(each[:, i] for each in columns)) for i in (0, 1)))
        means = {name: value.mean() for name, value in ({"loss": loss} | metrics).items()}
        if self.loss == "orpo":
            means["loss"] -= columns[0][:, 0].sum() / columns[2][:, 0].sum()
        return means


def _log1mexp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `log(1 - exp(x))` for `x <= 0`; at 0, where it is infinite, the value at the largest float below."""
    x = jnp.minimum(x, -jnp.finfo(jnp.float32).tiny)
    near = x > -0.6931472  # each branch gets an argument for which its gradient is finite
    small = jnp.where(near, x, -0.5)
    large = jnp.where(near, -1.0, x)
    return jnp.where(near, jnp.log(-jnp.expm1(small)), jnp.log1p(-jnp.exp(large)))
