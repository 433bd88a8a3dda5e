"""Implements the conversations of `generate`: a person or an environment answers the turns of the policy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tunix_like.cli.generate import rendered
from tunix_like.data.tokenizer import Tokenizer
from tunix_like.errors import UserError
from tunix_like.rollout.environments.arguments import make_player
from tunix_like.rollout.environments.bridge import Bridge, make_bridge
from tunix_like.rollout.environments.conversations import Continued, Conversation, Conversations
from tunix_like.rollout.environments.failures import first_observation
from tunix_like.rollout.environments.generation import generate as sample
from tunix_like.rollout.environments.outcomes import Environments
from tunix_like.runs.trained import Trained
from tunix_like.runtime import console, progress
from tunix_like.runtime.visible import visible
from tunix_like.types import Engine, Problem, Reply, Request, SamplingParams, Turn

QUIT = "/quit"


def read_line(label: str) -> str | None:
    """Returns the next line of standard input without its line break; None at the end of the input or if the line is
    `/quit`.

    On a terminal, prints `label` before the line.
    """
    if sys.stdin is None:
        return None
    if sys.stdin.isatty():
        print(label, end="", file=sys.stderr, flush=True)
    # Invalid bytes are replaced, so that they raise no error.
    line = sys.stdin.buffer.readline().decode(sys.stdin.encoding or "utf-8", "replace")
    text = line.removesuffix("\n").removesuffix("\r")
    return None if not line or text.strip() == QUIT else text


class Person:
    """Answers the turns of the model in one conversation with lines of standard input. Implements `Responder`.

    Args:
      bridge: converts a line to tokens.
      conversation: the object that renders the whole conversation with the chat template at each turn, and the
        conversation; None unless `environment.history=template` is set.
    """

    lockstep = True

    def __init__(
        self, tokenizer: Tokenizer, bridge: Bridge, conversation: tuple[Conversations, Conversation] | None = None
    ):
        self._tokenizer, self._bridge, self._conversation = tokenizer, bridge, conversation
        self._turn: Turn | None = None

    def opening(self, group: int) -> Sequence[int]:
        """Returns the tokens at the end of the prompt that the chat template may change in later turns; often there are
        no such tokens."""
        return () if self._conversation is None else self._conversation[1].opening

    def submit(self, turns: Sequence[Turn]) -> None:
        """Prints a turn of the model, which is the only element of `turns`."""
        (turn,) = turns
        if self._conversation is not None:
            self._conversation[1].add_turn(self._tokenizer.decode(turn.tokens), turn.tokens)
        with progress.paused():
            if not self._tokenizer.decode(turn.tokens):
                print("the turn is empty: the model ended it before any text", file=sys.stderr)
            if sys.stdin is not None and sys.stdin.isatty():
                print("model> ", end="", file=sys.stderr, flush=True)
            console.print_completion(self._tokenizer.decode(turn.tokens))
            sys.stdout.flush()
        self._turn = None if turn.truncated else turn

    def replies(self, wait: bool) -> list[Reply]:
        """Reads the person's answer to the last turn of the model. If a line cannot be converted to tokens, prints the
        reason and reads the next line.

        Returns:
          a list with one reply, or an empty list if the last turn was truncated. At the end of the input, the tokens of
            the reply are None.
        """
        turn, self._turn = self._turn, None
        while turn is not None:
            with progress.paused():
                line = read_line("you> ")
            if line is None:
                return [Reply(turn.group, turn.sample, None)]
            (bridged,) = self._bridge.tokens([line], [turn.tokens[-1]])
            found = Continued(bridged.tokens, problem=bridged.problem)
            if self._conversation is not None and found.tokens is not None:
                conversations, conversation = self._conversation
                (found,) = conversations.continued([(conversation, bridged.chat)])
            if found.tokens is not None:
                if bridged.cut:
                    print("the line was shortened: it exceeds the token limit of the conversation", file=sys.stderr)
                return [Reply(turn.group, turn.sample, found.tokens, found.restart)]
            print(f"the line cannot be sent: {found.problem}", file=sys.stderr)
        return []


def talk(
    engine: Engine, trained: Trained, prompt: Any, sampling: SamplingParams, tools: Sequence[Mapping[str, Any]]
) -> None:
    """Lets a person answer the turns of the model, until the end of standard input, `/quit` or the token limit.

    The conversation stays in one row of the KV cache of the engine. Earlier tokens are computed again only if the chat
    template changes them (`environment.history=template`). If the prompt is a list of messages, each line of the person
    becomes a user message. Otherwise each line is appended as plain text.

    Raises:
      UserError: the prompt has no tokens or too many tokens, or the chat template cannot be used for several turns.
    """
    rollout, tokenizer = trained.config.rollout, trained.tokenizer
    tokens = rendered(prompt, tokenizer, engine.max_prompt_length).tokens
    most = rollout.max_tokens_to_generate
    ends = rollout.eos_tokens or tokenizer.eos_ids
    bridge = make_bridge(tokenizer, not isinstance(prompt, str), ends, tools, most_tokens=most, overlong="cut")
    conversation = None
    if trained.config.environment.history == "template" and not isinstance(prompt, str):
        conversations = Conversations(tokenizer, bool(tools))
        (begun,) = conversations.begin([(prompt, tokens)])
        conversation, tokens = (conversations, begun), tokens[: begun.prompt]
    person = Person(tokenizer, bridge, conversation)
    key = jax.random.key(trained.config.training.seed)
    requests = [Request(tokens, number=0, samples=1)]
    (sample,) = engine.generate(engine.place(trained.params), requests, key, sampling, person)
    if not sample.finished:
        print(
            f"the conversation has reached rollout.max_tokens_to_generate={most} tokens; raise it for longer ones",
            file=sys.stderr,
        )


def play(
    engine: Engine, trained: Trained, row: Mapping[str, Any], sampling: SamplingParams, environments: Environments
) -> None:
    """Plays one trajectory with the environment of the config. Prints the turns to standard output and the reward to
    standard error.

    Args:
      row: a data row: the column `prompt`, and further columns, which the environment receives.

    Raises:
      UserError: the prompt has no tokens or too many tokens, the prompt cannot be continued for several turns, or the
        environment failed.
    """
    config, tokenizer = trained.config, trained.tokenizer
    prompt = rendered(row["prompt"], tokenizer, engine.max_prompt_length)
    columns = {name: value for name, value in row.items() if name != "prompt"}
    problem = Problem(0, prompt.text, prompt.tokens, columns, row["prompt"])
    player = make_player(environments, config.environment, tokenizer, config.rollout)
    assert player is not None, "environments were given"
    player.check_prompt(row["prompt"])  # checked for trajectories of one turn too
    cure = (
        "" if columns else " The environment got no columns, because the prompt is not a row of the data; use --row N."
    )
    try:
        first_observation(environments, row, "")  # fails before sampling if the environment cannot be reset
    except UserError as error:
        raise UserError(f"{visible(str(error))}{cure}") from error
    key = jax.random.key(config.training.seed)
    given = engine, player, engine.place(trained.params), [problem], 1, key, sampling
    (opened,), out, trajectories = sample(*given)
    assert trajectories is not None, "a player was given"
    (episode,) = trajectories.episodes()
    if opened.text != problem.text:
        _print_turn("prompt", opened.text)
    for message in episode.messages:
        _print_turn(message["role"], message["content"])
    if episode.failure is not None:
        raise UserError(f"{visible(episode.failure[1])}{cure}")
    ended = "by the environment"
    if episode.limited:
        ended = f"by environment.max_turns={config.environment.max_turns}"
    elif not out.finished.all():
        ended = f"by rollout.max_tokens_to_generate={config.rollout.max_tokens_to_generate}"
    number = f"{episode.turns} turn{'s' * (episode.turns != 1)}"
    print(f"reward of the environment {episode.reward:g}, {number}, ended {ended}", file=sys.stderr)


def _print_turn(role: str, text: str) -> None:
    console.print_completion(f"{role}: {text}")
