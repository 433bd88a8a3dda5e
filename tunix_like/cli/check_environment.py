"""The command `check-rewards` for a config with an environment: plays scripted episodes, and calls each tool once.

No model is needed: the turns of the policy are answers from the data, or fixed nonsense texts.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix_like.cli.check_rewards import GOLD, OTHER, SAME, few_lines, other_answer, passed, problem_of
from tunix_like.config.schema import Config
from tunix_like.data import load_source
from tunix_like.rewards.pool import close_pools
from tunix_like.rewards.scoring import Scores
from tunix_like.rollout.environments.episodes import Episode, with_environment
from tunix_like.rollout.environments.failures import check_configured
from tunix_like.rollout.environments.outcomes import Environments, Outcome
from tunix_like.rollout.rollouts import WeightedReward, score_completions
from tunix_like.runs.environments import environments_of
from tunix_like.runs.reward_functions import reward_functions
from tunix_like.runtime import console
from tunix_like.types import Problem

ROWS = 8
"""Number of training rows that are played, starting with the first row. The number is small, because an environment
that hangs needs its whole time limit in every row."""

WORDS = "gold answer, a word a turn"
NONSENSE = {
    "no text": "",
    "a very long text": "word " * 20_000,
    "control characters": "\x00\x1b[J\r\n\u202e\ufffd",
    "a broken tool call": '<tool_call>{"name": "no_such_tool", "arguments": {</tool_call>',
}


@dataclasses.dataclass
class Game:
    """The state of an episode in which a script, not a model, writes the turns of the policy.

    Attributes:
      first: the first observation.
      answer: the observation that follows the first turn.
      messages: the turns so far and the observations that follow them, each with its role.
      turns: number of turns so far.
      reward: sum of the rewards of the environment so far.
      done: whether the environment has ended the episode.
      failure: kind and reason of the failure of the environment; None if it did not fail.
    """

    first: Any = None
    answer: Any = None
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    done: bool = False
    failure: list[str] | None = None

    def episode(self) -> Episode:
        reward = float("nan") if self.failure is not None else self.reward
        return Episode(self.messages, self.turns, not self.done, 0, reward, {}, self.failure)


class Tried(NamedTuple):
    """The episodes with scripted turns of one kind (such as gold answers), one episode per training row.

    `seconds` is the mean time between sending a turn to the environment and receiving the observation.
    """

    kind: str
    games: list[Game]
    scores: Scores
    seconds: float


Script = Callable[[int], str]
"""A function that returns the text of a turn of the policy, given the number of the turn (from 0)."""


def try_environment(config: Config) -> tuple[list[Problem], list[Tried], list[tuple[Mapping[str, Any], Outcome]]]:
    """Plays episodes with the first training rows, and calls each tool once.

    A script, not a model, writes the turns of the policy. There are several kinds of script, and each row is played
    once with each kind. The kinds of `NONSENSE` (turns of fixed wrong text) are always played. If all rows have a text
    in the column `answer`, further kinds are played. Their turns are:

    - the answer of the row in every turn;
    - the words of the answer, one per turn, with the last word repeated (if an answer has several words);
    - a different answer, from another row (if not all answers are equal).

    Returns:
      the problems, the episodes, and each tool's schema with the outcome of its call.

    Raises:
      UserError: the data, the environment or the reward functions are invalid, as in `tunix-like train`.
    """
    source = load_source(config.data)
    rewards = reward_functions(config, source)
    problems = [problem_of(number, source) for number in range(min(ROWS, len(source.train)))]
    with few_lines():
        environments = environments_of(config)
        assert environments is not None, "the caller has checked that the config has an environment"
        try:
            tools = [(tool, _called(environments, tool, problems[0])) for tool in environments.tools]
            most = config.environment.max_turns
            tried = [
                _tried(kind, scripts, environments, problems, most, rewards)
                for kind, scripts in _kinds(problems).items()
            ]
        finally:
            environments.close()
            close_pools(function for _, function, _ in rewards)
    return problems, tried, tools


def _kinds(problems: Sequence[Problem]) -> dict[str, list[Script]]:
    """Returns the functions that write the turns of the policy, by the kind of these turns (such as gold answers). Each
    kind has one function per problem."""
    kinds: dict[str, list[Script]] = {}
    answers = [str(problem.columns["answer"]) for problem in problems if isinstance(problem.columns.get("answer"), str)]
    if len(answers) == len(problems):
        kinds[GOLD] = [_always(answer) for answer in answers]
        if any(len(answer.split()) > 1 for answer in answers):
            kinds[WORDS] = [_words(answer.split()) for answer in answers]
        if len(set(answers)) > 1:
            kinds[OTHER] = [_always(other_answer(answers, number)) for number in range(len(answers))]
    return kinds | {name: [_always(text)] * len(problems) for name, text in NONSENSE.items()}


def _always(text: str) -> Script:
    return lambda turn: text


def _words(words: Sequence[str]) -> Script:
    return lambda turn: words[min(turn, len(words) - 1)] if words else ""


def _tried(
    kind: str,
    scripts: Sequence[Script],
    environments: Environments,
    problems: Sequence[Problem],
    most: int,
    rewards: Sequence[WeightedReward],
) -> Tried:
    """Plays one episode of up to `most` turns with each problem, and scores the episodes as in training."""
    games = [Game() for _ in problems]
    for number, problem in enumerate(problems):
        environments.reset(number, problem.columns)
    for outcome, _ in _wait(environments, len(games)):
        games[outcome.number].first = outcome.observation
        _record(games[outcome.number], outcome)
    seconds: list[float] = []
    while going := [number for number, game in enumerate(games) if not _over(game, most)]:
        for number in going:
            text = scripts[number](games[number].turns)
            games[number].messages.append({"role": "assistant", "content": text})
            games[number].turns += 1
            environments.step(number, text)
        for outcome, took in _wait(environments, len(going)):
            seconds.append(took)
            if games[outcome.number].turns == 1:
                games[outcome.number].answer = outcome.observation
            _record(games[outcome.number], outcome)
    left = [number for number, game in enumerate(games) if game.failure is None]
    for number in left:
        environments.finish(number)
    for outcome, _ in _wait(environments, len(left)):
        _record(games[outcome.number], outcome)
    texts = ["\n".join(message["content"] for message in game.messages) for game in games]
    scores = with_environment(score_completions(rewards, problems, texts, 1), [game.episode() for game in games])
    return Tried(kind, games, scores, float(np.mean(seconds)) if seconds else float("nan"))


def _over(game: Game, most: int) -> bool:
    return game.done or game.failure is not None or game.turns >= most


def _wait(environments: Environments, number: int) -> Iterable[tuple[Outcome, float]]:
    """Waits for the outcomes of `number` calls of environments. Yields each outcome with the seconds since the start of
    the wait.

    Raises:
      EnvironmentMisconfigured: an environment raised EnvironmentMisconfigured.
    """
    start = time.perf_counter()
    while number > 0:
        for outcome in environments.outcomes(wait=True):
            number -= 1
            check_configured(outcome.failure)
            yield outcome, time.perf_counter() - start


def _record(game: Game, outcome: Outcome) -> None:
    game.reward += outcome.reward
    game.done = game.done or outcome.done
    if outcome.failure is not None:
        game.failure = [*outcome.failure]
    elif game.turns and outcome.observation:
        game.messages.append({"role": "user", "content": _text(outcome.observation)})


def _text(observation: Any) -> str:
    """Returns an observation as one text. Each message begins with its role."""
    if not observation:
        return ""
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message['role']}: {message['content']}" for message in observation)


def _called(environments: Environments, tool: Mapping[str, Any], problem: Problem) -> Outcome:
    """Calls a tool once in a new environment, with example arguments that match the schema of the tool."""
    function = tool["function"]
    call = {"name": function["name"], "arguments": arguments_of(function)}
    environments.reset(0, problem.columns)
    ((outcome, _),) = _wait(environments, 1)
    if outcome.failure is None:
        environments.step(0, f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
        ((outcome, _),) = _wait(environments, 1)
    if outcome.failure is None:
        environments.finish(0)
        list(_wait(environments, 1))
    return outcome


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an example value for every parameter of a tool. The values match the JSON schema of the tool."""
    return {name: _example(schema) for name, schema in function.get("parameters", {}).get("properties", {}).items()}


def _example(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0])
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return [_example(schema.get("items", {}))]
    return {"integer": 1, "number": 1.0, "boolean": True, "object": {}, "null": None}.get(kind, "1")


def print_report(config: Config) -> int:
    """Prints the results of the tool calls and of the episodes. Returns the exit status: 1 if the environment or its
    rewards are probably wrong, else 0."""
    problems, tried, tools = try_environment(config)
    threshold = config.rewards.success_threshold
    wrong, notes = _print_tools(tools)
    console.table(
        f"{len(problems)} training rows, one episode of up to {config.environment.max_turns} turns each; an episode "
        f"succeeds when its reward reaches {threshold:g}",
        ["turns of the policy", "mean reward", "succeed", "turns", "done", "failed", "s/step", "answer to turn 1"],
        [_row(each, threshold) for each in tried],
        texts=["turns of the policy", "failed", "answer to turn 1"],
    )
    first = next((game.first for each in tried for game in each.games[:1] if game.failure is None), None)
    shown = console.excerpt(_text(first), 600)
    console.print_text(f"first observation of row 1: {shown}" if shown else "reset gives no first observation")
    wrong += _failures(tried) + _differing(tried) + _cheap(tried, problems, threshold)
    lines, nothing_succeeds = _gold(tried, problems, threshold)
    for line in wrong + notes + lines:
        console.print_text(line)
    if not wrong and not nothing_succeeds:
        console.print_text("nothing suspicious: no failure, and nonsense does not succeed")
    return int(bool(wrong))


def _print_tools(tools: Sequence[tuple[Mapping[str, Any], Outcome]]) -> tuple[list[str], list[str]]:
    """Prints the schemas and the results of the tools. Returns two lists of messages: on calls that failed (timeout or
    exception), and on calls whose result begins with `error:`."""
    wrong, notes, rows = [], [], []
    for tool, outcome in tools:
        function = tool["function"]
        console.print_text(json.dumps(dict(tool), indent=2, ensure_ascii=False))
        messages = outcome.observation if outcome.observation and not isinstance(outcome.observation, str) else []
        result = "\n".join(message["content"] for message in messages) or _text(outcome.observation)
        if outcome.failure is not None:
            result = outcome.failure.reason
            wrong.append(f"tool {function['name']}: {outcome.failure.reason}")
        elif result.startswith("error:"):
            notes.append(
                f"tool {function['name']}: its call returned an error; this is correct if the tool does not accept "
                "these arguments"
            )
        arguments = json.dumps(arguments_of(function), ensure_ascii=False)
        rows.append([function["name"], arguments, console.excerpt(result, 200)])
    if rows:
        columns = ["tool", "arguments made from its schema", "result"]
        console.table(f"{len(rows)} tool{'s' * (len(rows) != 1)}, each called once", columns, rows, texts=columns)
    return wrong, notes


def _row(each: Tried, threshold: float) -> list[str]:
    known = each.scores.total[each.scores.scored]
    failed = {name: int(rows.sum()) for name, rows in _causes(each).items() if rows.any()}
    answer = next((_text(game.answer) for game in each.games if game.answer), "-")
    return [
        each.kind,
        f"{known.mean():.3f}" if len(known) else "-",
        f"{passed(each.scores, threshold).mean():.1%}",
        f"{np.mean([game.turns for game in each.games]):.1f}",
        f"{np.mean([game.done for game in each.games]):.0%}",
        ", ".join(f"{number} {name}" for name, number in failed.items()) or "-",
        "-" if np.isnan(each.seconds) else f"{each.seconds:.2g}",
        console.excerpt(answer, 80).replace("\n", "\\n"),
    ]


def _causes(each: Tried) -> dict[str, np.ndarray]:
    return {"timeout": each.scores.timeouts, "error": each.scores.errors}


def _failures(tried: Sequence[Tried]) -> list[str]:
    """Returns messages on failures of the environment and of the reward functions.

    Each element of `tried` has the episodes with turns of one kind (such as gold answers). For each element, there is
    one message on its first timeout and one message on its first error. If several failures have the same reason, only
    the first message on this reason is returned.
    """
    lines: dict[str, str] = {}
    for each in tried:
        for name, rows in _causes(each).items():
            if rows.any():
                row = int(np.flatnonzero(rows)[0])
                failure = each.games[row].failure
                reason = str(each.scores.first_failure) if failure is None else failure[1]
                line = f"{each.kind}: {name} in {int(rows.sum())} of {len(rows)} rows. The first, row {row + 1}: "
                lines.setdefault(reason, f"{line}{reason}")
    return list(lines.values())


def _differing(tried: Sequence[Tried]) -> list[str]:
    """Describes the first row whose episodes did not all begin with the same observation. Each element of `tried` has
    one episode per row."""
    for row in range(len(tried[0].games)):
        seen = [each.games[row].first for each in tried if each.games[row].failure is None]
        if any(observation != seen[0] for observation in seen):
            return [
                f"row {row + 1}: two episodes began with different observations; `reset` must depend on the columns of "
                "the row only, because the trajectories of a row share its prompt"
            ]
    return []


def _cheap(tried: Sequence[Tried], problems: Sequence[Problem], threshold: float) -> list[str]:
    """Returns a message for each kind of wrong turns (such as an empty text) that succeeds, with the first row where it
    does.

    An episode succeeds if its total reward is at least `threshold`. For the answers of other rows, there is a message
    only if they succeed in more than the fraction `SAME` of the rows.
    """
    lines = []
    for each in tried:
        rows = passed(each.scores, threshold)
        if each.kind not in (GOLD, WORDS) and rows.mean() > (SAME if each.kind == OTHER else 0):
            row = int(np.flatnonzero(rows)[0])
            lines.append(
                f"{each.kind}: succeeds in {int(rows.sum())} of {len(rows)} rows. The first, row {row + 1}: prompt "
                f"{problems[row].text!r:.200}, reward {each.scores.total[row]:.3g}"
            )
    return lines


def _gold(tried: Sequence[Tried], problems: Sequence[Problem], threshold: float) -> tuple[list[str], bool]:
    """Returns notes on training rows whose gold answer (column `answer`) fails, and whether the gold answers of all
    rows fail.

    A gold answer fails if no episode with it has a total reward of at least `threshold`. Such failures do not change
    the exit status of the command, because the column `answer` may hold a text that is not a valid turn.
    """
    gold = [passed(each.scores, threshold) for each in tried if each.kind in (GOLD, WORDS)]
    if not gold:
        line = "no column `answer` with a text in every row: gold answers were not played. data.answer_template builds "
        return [f"{line}the column from other columns."], False
    failing = ~np.any(gold, axis=0)
    if not failing.any():
        return [], False
    row = int(np.flatnonzero(failing)[0])
    if failing.all():
        line = f"no gold answer succeeds: none reaches rewards.success_threshold={threshold:g}"
        line = f"{line}; check that some turn can reach it"
    else:
        line = f"gold answer: fails in {int(failing.sum())} of {len(failing)} rows"
    case = f"prompt {problems[row].text!r:.200}, answer {problems[row].columns['answer']!r:.200}"
    return [f"{line}. The first, row {row + 1}: {case}"], bool(failing.all())
