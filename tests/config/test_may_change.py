"""The keys whose values a resumed run may change: written out once more, so that none is added or lost unnoticed."""

from __future__ import annotations

from tunix_like.config.keys import fixed_settings
from tunix_like.config.load import keys
from tunix_like.config.schema import Config
from tunix_like.runs.folder import may_change
from tunix_like.training.arguments import environment_identity, rollout_identity

MAY_CHANGE = {
    "data": "overlong_prompts",
    "rollout": "max_concurrent_rows mesh engine_arguments urls weights_folder request_timeout_seconds "
    "wait_for_servers_seconds",
    "rewards": "workers timeout_seconds memory_gb concurrency retries",
    "environment": "workers timeout_seconds memory_gb",
    "eval": "samples k max_problems batch_size temperature top_p",
    "training": "output_dir max_steps train_micro_batch_size eval_every_n_steps checkpoint_every_n_steps "
    "changed_inputs max_checkpoints_to_keep best_metric log_rollouts_every_n_steps log_samples_every_n_steps loggers "
    "callbacks profile_steps max_unscored_steps max_logprob_gap later_logprob_gap",
}
NAMES = {f"{section}.{name}" for section, names in MAY_CHANGE.items() for name in names.split()}


def test_the_keys_that_may_change():
    assert {key.name for key in keys() if may_change(key.name)} == NAMES


def test_parts_of_keys():
    assert may_change("rollout.engine_arguments.size") and may_change("environment.arguments.url")
    assert not may_change("environment.arguments.seed") and not may_change("rollout.mesh_of_mine")


def test_identities_of_learners_have_the_other_keys():
    config = Config()
    fixed = {f"rollout.{name}" for name in fixed_settings(config.rollout)}
    assert fixed & NAMES == set() and fixed | NAMES >= {key.name for key in keys() if key.name.startswith("rollout.")}
    assert set(rollout_identity(config.rollout)) == {
        *("max_prompt_length", "max_tokens_to_generate", "temperature", "top_p", "top_k", "eos_tokens"),
        *("max_staleness", "routing_replay"),
    }
    assert set(environment_identity(config.environment)) == {
        *("name", "arguments", "tools", "max_turns", "max_observation_tokens", "overlong_observation"),
    }
