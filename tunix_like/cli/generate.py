"""The command `generate`: completes one prompt, or a conversation in which a person or an environment answers."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tunix_like.cli.common import chosen_source, setup_jax
from tunix_like.config.load import load
from tunix_like.config.schema import Config
from tunix_like.data import load_source
from tunix_like.data.shared import warn_text_prompts
from tunix_like.data.stream import Prompt, render, row_variables
from tunix_like.environments.arguments import make_player, with_tools
from tunix_like.environments.history import Histories, History
from tunix_like.environments.kinds import environments_of, kind_of
from tunix_like.environments.outcomes import Environments
from tunix_like.environments.trajectories import first_observation
from tunix_like.errors import UserError
from tunix_like.models.loading import check_fit
from tunix_like.rewards import Scores, close_pools
from tunix_like.rewards.turns import TurnReward, is_potential
from tunix_like.rollout.requests import generate as sample
from tunix_like.rollout.rollouts import WeightedReward, completion_texts, score_completions
from tunix_like.rollout.scoring import score_trajectories
from tunix_like.runs.reward_functions import reward_functions
from tunix_like.runs.trained import Trained, open_trained
from tunix_like.runtime import console, output, progress
from tunix_like.runtime.object_storage import is_remote
from tunix_like.runtime.profile import Stopwatch
from tunix_like.runtime.visible import visible
from tunix_like.text.tokenizer import Tokenizer
from tunix_like.training.engine import make_engine
from tunix_like.training.generation import completed, rendered
from tunix_like.types import Engine, Problem, Reply, Request, SamplingParams, Turn

QUIT = "/quit"


def _greedy(overrides: Sequence[str]) -> list[str]:
    names = [f"rollout.{name}" for name in ("temperature", "top_p", "top_k")]
    given = [word for word in overrides if word.partition("=")[0].strip() in names]
    greedy = ["rollout.temperature=0"]
    if given and load(None, given).rollout != load(None, greedy).rollout:
        raise UserError(f"generate: --greedy sets rollout.temperature=0; remove {' and '.join(given)} or --greedy.")
    return [*overrides, *greedy]


def generate(arguments: argparse.Namespace) -> None:
    """Completes one prompt. If an environment or a person answers the turns of the model, prints all turns."""
    _check_options(arguments)
    overrides = _greedy(arguments.overrides) if arguments.greedy else arguments.overrides
    setup_jax()
    source = chosen_source(arguments.source, arguments.best)
    by_row = arguments.row is not None
    trained = open_trained(source, overrides, need_data=by_row)
    config = trained.config
    rollout = trained.config.rollout
    check_fit(trained.model_config, trained.tokenizer, rollout)
    environments = environments_of(config)
    try:
        trained = trained._replace(tokenizer=with_tools(trained.tokenizer, environments))
        row = _row(config, arguments.row) if by_row else {"prompt": _prompt(config, arguments.prompt, trained.of_run)}
        if config.data.apply_chat_template is not False:
            warn_text_prompts([row], trained.tokenizer)
        sampler = make_engine(trained.graphdef, trained.tokenizer, rollout, trained.mesh)
        sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)
        print(_sampling_line(sampling, config.training.seed), file=sys.stderr)
        if arguments.interactive:
            tools = environments is not None and bool(environments.tools)
            talk(sampler, trained, row, sampling, tools)
        elif environments is not None:
            play(sampler, trained, row, sampling, environments, by_row)
        else:
            if by_row:
                _print_prompt(trained, row)
            watch = Stopwatch()
            out = completed(sampler, trained.params, trained.tokenizer, [row], sampling, config.training.seed)
            seconds = watch.seconds()
            (completion,) = completion_texts(out, trained.tokenizer)
            _print_completion(completion)
            cut = f"; cut at rollout.max_tokens_to_generate={rollout.max_tokens_to_generate}"
            print(console.speed(float(out.lengths.sum()), seconds) + cut * (not out.finished.all()), file=sys.stderr)
            if by_row:
                problem = Problem(0, *_rendered(trained, row), moment=trained.moment)
                _print_score(trained, row, lambda rewards: score_completions(rewards, [problem], [completion], 1))
    finally:
        if environments is not None:
            environments.close()


def _check_options(arguments: argparse.Namespace) -> None:
    given = [f"--{name}" for name in ("prompt", "row") if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise UserError("generate: --prompt and --row both set the prompt; give one of them.")
    if not given and not arguments.interactive:
        raise UserError("generate: give the prompt by --prompt TEXT or --row N, or type it with --interactive.")
    if arguments.row is not None and arguments.row < 1:
        raise UserError(f"generate: --row {arguments.row}: rows are counted from 1.")


def _prompt(config: Config, text: str | None, of_run: bool) -> Any:
    """Returns the prompt: messages if the config asks for the chat template, or if a run was trained on messages;
    otherwise text. If `text` is None, it is read from standard input."""
    if text is None:
        text = read_line("prompt> ")
        if text is None:
            raise UserError("generate: no prompt was written; give one by --prompt TEXT.")
    data = config.data
    if not data.apply_chat_template and data.system_prompt is None and not (of_run and _trained_on_chats(config)):
        return text
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    return [*system, {"role": "user", "content": text}]


def _trained_on_chats(config: Config) -> bool:
    """Returns whether the prompts of a run's data are messages; False if this is not known without a download, or if
    the data cannot be read any more."""
    data = config.data
    elsewhere = data.path is None or is_remote(data.path)
    if data.name in ("hub", "verifiers", "mix") or (elsewhere and data.name in ("gsm8k", "jsonl")):
        return False
    try:
        return data.apply_chat_template is not False and not isinstance(load_source(data).train[0]["prompt"], str)
    except UserError:
        return False


def _row(config: Config, number: int) -> Mapping[str, Any]:
    source = load_source(config.data)
    rows, what = (source.eval, "held-out") if len(source.eval) else (source.train, "training")
    if number > len(rows):
        raise UserError(f"generate: --row {number}: the data has {len(rows)} {what} rows.")
    return rows[number - 1]


def _rendered(trained: Trained, row: Mapping[str, Any]) -> Prompt:
    return render(row, trained.tokenizer, trained.config.rollout.max_prompt_length)


def _print_prompt(trained: Trained, row: Mapping[str, Any]) -> None:
    print(f"prompt: {console.excerpt(_rendered(trained, row).text, 2000)}", file=sys.stderr)


def _print_score(trained: Trained, row: Mapping[str, Any], score: Callable[[Sequence[WeightedReward]], Scores]) -> None:
    """Prints the column `answer` and rewards to standard error, or why the reward functions cannot be used.

    Args:
      score: calls reward functions for the completion.
    """
    config = trained.config
    if "answer" in row:
        print(f"column answer: {console.excerpt(str(row['answer']), 600)}", file=sys.stderr)
    try:
        rewards = reward_functions(config, load_source(config.data))
    except UserError as error:
        print(f"no reward: {error}", file=sys.stderr)
        return
    turns = kind_of(config) is not None
    rewards = [each for each in rewards if not (is_potential(each[1]) if turns else isinstance(each[1], TurnReward))]
    try:
        scores = score(rewards)
    finally:
        close_pools(function for _, function, _ in rewards)
    parts = [f"{name} {values[0]:g}" for name, values in scores.by_function.items()]
    print(f"reward: {scores.total[0]:g} ({', '.join(parts)})", file=sys.stderr)


def _print_completion(completion: str) -> None:
    if not completion:
        print("the completion is empty: the model ended it before any text", file=sys.stderr)
    console.print_completion(completion)
    sys.stdout.flush()  # before the lines of standard error
    output.check()


def _sampling_line(sampling: SamplingParams, seed: int) -> str:
    if sampling.temperature == 0:
        return "greedy: the most likely token at every position"
    top_k = "" if sampling.top_k is None else f", top-k {sampling.top_k}"
    return (
        f"sampled at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}{top_k}, seed {seed}; --greedy "
        "takes the most likely token at every position"
    )


def read_line(label: str) -> str | None:
    """Returns the next line of standard input; None at its end or if the line is `/quit`. On a terminal, prints `label`
    before."""
    if sys.stdin is None:
        return None
    if sys.stdin.isatty():
        print(label, end="", file=sys.stderr, flush=True)
    # Invalid bytes are replaced, so that they raise no error.
    line = sys.stdin.buffer.readline().decode(sys.stdin.encoding or "utf-8", "replace")
    text = line.removesuffix("\n").removesuffix("\r")
    return None if not line or text.strip() == QUIT else text


class Person:
    """Answers the turns of the model with lines of standard input. Implements `Responder`."""

    lockstep = True

    def __init__(self, tokenizer: Tokenizer, histories: Histories, history: History):
        self._tokenizer = tokenizer
        self._histories = histories
        self._history = history
        self._opening = history.opening
        self._turn: Turn | None = None

    def opening(self, group: int, sample: int) -> Sequence[int]:
        """Returns the tokens at the end of the prompt that the chat template may change in later turns; often there are
        no such tokens."""
        return self._opening

    def submit(self, turns: Sequence[Turn]) -> None:
        """Prints a turn of the model, which is the only element of `turns`."""
        (turn,) = turns
        text = self._tokenizer.decode(turn.tokens)
        self._history.add_turn(text, turn.tokens)
        with progress.paused():
            if not text:
                print("the turn is empty: the model ended it before any text", file=sys.stderr)
            if sys.stdin is not None and sys.stdin.isatty():
                print("model> ", end="", file=sys.stderr, flush=True)
            console.print_completion(text)
            sys.stdout.flush()
        self._turn = None if turn.truncated else turn

    def replies(self, wait: bool) -> list[Reply]:
        """Reads the person's answer to the last turn of the model, again if a line cannot be converted to tokens.
        Returns no reply if the turn was truncated; at the end of the input, the tokens of the reply are None."""
        turn = self._turn
        self._turn = None
        while turn is not None:
            with progress.paused():
                line = read_line("you> ")
            if line is None:
                return [Reply(turn.group, turn.sample, None)]
            try:
                tokens, restart, cut = self._histories.add(self._history, line)
            except UserError as error:
                print(f"the line cannot be sent: {error}", file=sys.stderr)
                continue
            if cut:
                print("the line was shortened: it exceeds the token limit of the conversation", file=sys.stderr)
            return [Reply(turn.group, turn.sample, tokens, restart)]
        return []


def talk(engine: Engine, trained: Trained, row: Mapping[str, Any], sampling: SamplingParams, tools: bool) -> None:
    """Lets a person answer the turns of the model, until the end of standard input, `/quit` or the token limit. If the
    prompt is a list of messages, each line of the person becomes a user message. Otherwise each line is appended as
    plain text."""
    rollout = trained.config.rollout
    tokenizer = trained.tokenizer
    _, tokens, columns, prompt, *_ = rendered(row, tokenizer, engine.max_prompt_length)
    most = rollout.max_tokens_to_generate
    ends = rollout.eos_tokens or tokenizer.eos_ids
    config = dataclasses.replace(trained.config.environment, max_observation_tokens=most, overlong_observation="cut")
    chat = not isinstance(prompt, str)
    if not chat:
        config = dataclasses.replace(config, history="sampled")
    histories = Histories(tokenizer, chat, ends, tools, config)
    history = histories.begin(prompt, tokens, **row_variables(prompt, columns, tokenizer))
    person = Person(tokenizer, histories, history)
    key = jax.random.key(trained.config.training.seed)
    requests = [Request(tokens[: history.prompt], number=0, samples=1)]
    (sample,) = engine.generate(engine.place(trained.params), requests, key, sampling, person)
    if not sample.finished:
        print(
            f"the conversation has reached rollout.max_tokens_to_generate={most} tokens; raise it for longer ones",
            file=sys.stderr,
        )


def play(
    engine: Engine,
    trained: Trained,
    row: Mapping[str, Any],
    sampling: SamplingParams,
    environments: Environments,
    by_row: bool,
) -> None:
    """Plays one trajectory of a data row. Prints the turns to standard output, and the reward to standard error; if
    `by_row`, also the prompt, the column `answer` and the rewards of functions."""
    config = trained.config
    tokenizer = trained.tokenizer
    prompt = rendered(row, tokenizer, engine.max_prompt_length)
    problem = Problem(0, *prompt, moment=trained.moment)
    player = make_player(environments, config.environment, tokenizer, config.rollout)
    assert player is not None, "environments were given"
    cure = (
        ""
        if prompt.columns
        else " The environment got no columns, because the prompt is not a row of the data; use --row N."
    )
    try:
        first_observation(environments, row, "")  # fails before sampling if the environment cannot be reset
    except UserError as error:
        raise UserError(f"{visible(str(error))}{cure}") from error
    if by_row:
        _print_prompt(trained, row)
    key = jax.random.key(config.training.seed)
    watch = Stopwatch()
    (opened,), out, trajectories = sample(engine, player, engine.place(trained.params), [problem], 1, key, sampling)
    seconds = watch.seconds()
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
    sampled = out.lengths if out.token_mask is None else out.token_mask.sum(axis=-1)
    print(console.speed(float(sampled.sum()), seconds), file=sys.stderr)
    print(f"reward of the environment {episode.reward:g}, {number}, ended {ended}", file=sys.stderr)
    if by_row:
        texts = completion_texts(out, tokenizer)
        played = trajectories.environments()
        _print_score(
            trained, row, lambda rewards: score_trajectories(rewards, [opened], texts, 1, [episode], played)[0]
        )


def _print_turn(role: str, text: str) -> None:
    console.print_completion(f"{role}: {text}")
