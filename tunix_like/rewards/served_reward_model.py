"""A reward model on a vLLM server: `rewards.functions: [{name: served_reward_model, url: ...}]`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_like.rewards.calls import FunctionRewards
from tunix_like.rewards.served_model import ServedModel, without_control
from tunix_like.rewards.services import Limits, as_rewards
from tunix_like.workers.failures import Failure


class ServedRewardModel(ServedModel):
    """Scores completions with a reward model (a sequence classifier with one label) behind `/classify` of vLLM.

    The server renders the messages of the prompt and the completion with the chat template of the reward model; a
    prompt of text is one message of the user. The score is the logit.

    Args:
      url: the server, with or without `/v1`.
      model: the name of the model; defaults to the first that the server lists.
      key_env: environment variable with the key.
      options: further fields of a request, such as `chat_template_kwargs`.
    """

    unrendered = True

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key_env: str = "REWARD_MODEL_API_KEY",
        options: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
    ):
        # Without activation: vLLM would return a probability, which is 1 for all good completions.
        given = {"use_activation": False} | dict(options or {})
        super().__init__("served_reward_model", url, model, key_env, given, limits)

    @property
    def code(self) -> tuple[str, ...]:
        return str(self.model), str(self.options)

    def score_groups(
        self, name: str, arguments: Mapping[str, Sequence[Any]], count: int, group_size: int
    ) -> FunctionRewards:
        pairs = zip(arguments["prompts"], arguments["completions"], strict=True)
        return as_rewards(name, self.wait_for(name, [functools.partial(self._score, name, *pair) for pair in pairs]))

    async def _score(self, name: str, prompt: Any, completion: str) -> float | Failure:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = without_control(completion)
        if messages[-1]["role"] == "assistant":  # the completion continues this message
            messages, text = messages[:-1], messages[-1]["content"] + text
        answer = {"role": "assistant", "content": text}
        found = (await self.ask("classify", [*messages, answer]))["data"][0]["probs"]
        if len(found) == 1:
            return float(found[0])
        return Failure("error", f"Reward '{name}': {self.url}: the model has {len(found)} labels, not one")

    async def probe(self) -> str | Failure:
        """Also scores a completion: the model may be no reward model, or have no chat template."""
        found = await self.find()
        score = await self._score(self.__name__, "What is 2 + 3?", "5")
        return score if isinstance(score, Failure) else found
