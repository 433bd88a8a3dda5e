"""An advantage estimator of one's own: halfway between expected reward and maximum likelihood. `maze.yaml` names it."""

import jax.numpy as jnp

from tunix_like import register_advantage_estimator


# The decorator may be left out. It makes two promises that are worth something: a group of equal rewards gets zeros
# (so it need not go through the model), and rewards other than 0 and 1 are refused before they reach the function.
@register_advantage_estimator("tempered", zero_when_constant=True, takes="binary")
def tempered(rewards, *, scored, lengths, power=0.5):
    """`(r_i - m) / m^power` with the group's pass rate `m`, zeros where nothing succeeds.

    A prompt that is solved with probability p weighs about `p^-power`: power 0 is `drgrpo` (expected reward), power 1
    is `maxrl` (log-likelihood of success), and between them hard prompts are pushed, but not as hard.

    Args:
      rewards: [groups, completions], 0 or 1. It is traced by jax: write `jnp.where`, not `if`.
      scored: False where a completion could not be scored; it must not count in the mean.
      lengths: completions' tokens, for estimators that look at them.
      power: a parameter of its own, set by `algorithm.estimator_params.power=0.8`.
    """
    successes = jnp.where(scored, rewards, 0.0).sum(axis=1, keepdims=True)
    m = successes / jnp.maximum(scored.sum(axis=1, keepdims=True), 1)
    # A division that is not wanted must not happen either: its infinity would stay in the result as a NaN.
    safe = jnp.where(m > 0, m, 1.0)
    return jnp.where(scored & (m > 0), (rewards - m) / safe**power, 0.0)
