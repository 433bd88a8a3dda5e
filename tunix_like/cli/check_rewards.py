"""The command `check-rewards`: scores gold answers and wrong answers with the reward functions of a config, or plays
scripted episodes with its environment and calls each of its tools once.

No model is needed: the turns of the policy come from the data or are fixed texts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix_like.config.load import load
from tunix_like.config.schema import Config
from tunix_like.data import load_source
from tunix_like.data.source import Record, is_conversation
from tunix_like.environments.kinds import environments_of, kind_of
from tunix_like.environments.outcomes import Environments, Outcome, check_configured, reset_arguments
from tunix_like.rewards.environment_state import failed_state
from tunix_like.rewards.pool import close_pools
from tunix_like.rewards.scoring import Scores
from tunix_like.rollout.episodes import Episode
from tunix_like.rollout.rollouts import WeightedReward, succeeds
from tunix_like.rollout.scoring import score_trajectories
from tunix_like.runs.reward_functions import reward_functions
from tunix_like.runtime import console
from tunix_like.runtime.visible import visible
from tunix_like.types import Problem

SCORED_ROWS = 256
PLAYED_ROWS = 8
"""Number of training rows, from the first, without and with an environment. The second number is small, because an
environment that hangs needs its whole time limit in every row."""

GOLD = "gold answer"
WORDS = "gold answer, a word a turn"
OTHER = "another row's answer"
SENTENCE = "I do not know."
FIXED_TURNS = {
    "no text": "",
    "a very long text": "word " * 20_000,
    "control characters": "\x00\x1b[J\r\n\u202e\ufffd",
    "a broken tool call": '<tool_call>{"name": "no_such_tool", "arguments": {</tool_call>',
}

BY_CHANCE = 0.1
"""Share of rows in which the answer of another row may succeed, because two texts can have the same final answer."""

PRINTED = 20
"""Maximum number of lines that are shown of the output of user code."""


@dataclasses.dataclass
class Game:
    """An episode in which a script writes the turns. `observations` maps the number of turns before an observation to
    it; `environment` is that of the last `Outcome`, `failure` the kind and reason of a failure."""

    observations: dict[int, Any] = dataclasses.field(default_factory=dict)
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    done: bool = False
    environment: Any = None
    failure: list[str] | None = None
    turn_rewards: list[float] = dataclasses.field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.reward += outcome.reward
        if self.turn_rewards:
            self.turn_rewards[-1] += outcome.reward
        self.done = self.done or outcome.done
        self.environment = outcome.environment
        if outcome.failure is not None:
            self.failure, self.environment = [*outcome.failure], failed_state(outcome.failure.reason)
            return
        self.observations.setdefault(self.turns, outcome.observation)
        if self.turns and outcome.observation:
            self.messages.append({"role": "user", "content": _text(outcome.observation)})

    def begin_turn(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1
        self.turn_rewards.append(0.0)

    def episode(self) -> Episode:
        reward = self.reward if self.failure is None else float("nan")
        rewards = self.turn_rewards
        return Episode(
            self.messages, self.turns, not self.done, 0, reward, {}, self.failure,
            turn_rewards=rewards, turn_potentials=[0.0] * len(rewards),
        )  # fmt: skip


class Tried(NamedTuple):
    """Completions of one kind, one per row. Without an environment, `games` is empty; `texts` are the first turns, and
    `seconds` is the mean time of a step."""

    kind: str
    texts: list[str]
    scores: Scores
    passed: np.ndarray
    games: Sequence[Game] = ()
    seconds: float = float("nan")


def run(arguments: argparse.Namespace) -> int:
    """Prints what the rewards or the environment of a config do; returns 1 if they are probably wrong, else 0."""
    config = load(arguments.config, arguments.overrides)
    played = kind_of(config) is not None
    source = load_source(config.data)
    rewards = reward_functions(config, source)
    count = min(PLAYED_ROWS if played else SCORED_ROWS, len(source.train))
    problems = [_problem(number, source.train[number]) for number in range(count)]
    tools: list[tuple[Mapping[str, Any], Outcome]] = []
    with few_lines():  # includes the ends of workers, which write their last output then
        environments = environments_of(config)
        try:
            if environments is not None:
                tools = [(tool, _called(environments, tool, problems[0])) for tool in environments.tools]
            tried = [
                _tried(kind, scripts, environments, problems, rewards, config)
                for kind, scripts in _scripts(problems, played).items()
            ]
        finally:
            if environments is not None:
                environments.close()
            close_pools(function for _, function, _ in rewards)
    threshold = config.rewards.success_threshold
    wrong = _print_tools(tools)
    (_print_games if played else _print_scores)(tried, [name for name, _, _ in rewards], config)
    if tried[0].kind != GOLD:
        console.print_text(
            "no column `answer` with a text in every row: gold answers were not checked. data.answer_template builds "
            "the column from other columns."
        )
    gold = _gold(tried, problems)
    wrong += _failures(tried) + _different_starts(tried) + _too_easy(tried, problems) + ([] if played else gold)
    notes = _exploitable(tried, rewards)
    if not any(each.passed.any() for each in tried):
        note = f"nothing succeeds: no completion above reaches rewards.success_threshold={threshold:g}"
        notes.append(f"{note}; check that some turn can reach it" if played else note)
    for line in wrong + (gold if played else []) + notes:
        console.print_text(line)
    if not wrong and not notes:
        console.print_text("nothing suspicious: no failure, and wrong answers do not succeed")
    return int(bool(wrong))


def _problem(number: int, row: Record) -> Problem:
    """Returns a row as a `Problem` whose prompt is not tokenised."""
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])  # there is no chat template here
    return Problem(number, text, [], {name: value for name, value in row.items() if name != "prompt"}, prompt)


def _scripts(problems: Sequence[Problem], played: bool) -> dict[str, list[list[str]]]:
    """Returns for each kind of completions and each problem the texts of the turns; the last text is repeated."""
    scripts: dict[str, list[list[str]]] = {}
    texts = [_answer(problem.columns.get("answer")) for problem in problems]
    answers = [text for text in texts if text is not None]
    if len(answers) == len(problems):
        scripts[GOLD] = [[answer] for answer in answers]
        if played and any(len(answer.split()) > 1 for answer in answers):
            scripts[WORDS] = [answer.split() or [""] for answer in answers]
        if len(set(answers)) > 1:
            after = [(*answers[i + 1 :], *answers[:i]) for i in range(len(answers))]
            scripts[OTHER] = [
                [next(other for other in others if other != answer)]
                for answer, others in zip(answers, after, strict=True)
            ]
    if played:
        return scripts | {kind: [[text]] * len(problems) for kind, text in FIXED_TURNS.items()}
    prompts = [[problem.text] for problem in problems]
    sentence = [[SENTENCE]] * len(problems)
    return scripts | {"no text": [[""]] * len(problems), "the prompt again": prompts, f"'{SENTENCE}'": sentence}


def _answer(value: Any) -> str | None:
    """Returns the text of a gold answer; of messages, that of the last."""
    return str(value[-1].get("content") or "") if is_conversation(value) else value if isinstance(value, str) else None


def _tried(
    kind: str,
    scripts: Sequence[Sequence[str]],
    environments: Environments | None,
    problems: Sequence[Problem],
    rewards: Sequence[WeightedReward],
    config: Config,
) -> Tried:
    """Scores completions as in training, after an episode with each problem if there are environments."""
    texts = [script[0] for script in scripts]
    threshold = config.rewards.success_threshold
    if environments is None:
        scores, _ = score_trajectories(rewards, problems, texts, 1, None, None)
        return Tried(kind, texts, scores, _passed(scores, threshold))
    games = [Game() for _ in problems]
    seconds = list[float]()
    for number, problem in enumerate(problems):
        environments.reset(number, *reset_arguments(environments, problem))
    for outcome, _ in _outcomes(environments, len(games)):
        games[outcome.number].add(outcome)
    for turn in range(config.environment.max_turns):
        going = [number for number, game in enumerate(games) if not game.done and game.failure is None]
        for number in going:
            text = scripts[number][min(turn, len(scripts[number]) - 1)]
            games[number].begin_turn(text)
            environments.step(number, text)
        for outcome, took in _outcomes(environments, len(going)):
            seconds.append(took)
            games[outcome.number].add(outcome)
    left = [number for number, game in enumerate(games) if game.failure is None]
    for number in left:
        environments.finish(number)
    for outcome, _ in _outcomes(environments, len(left)):
        games[outcome.number].add(outcome)
    states = [game.environment for game in games]
    whole = ["\n".join(message["content"] for message in game.messages) for game in games]
    played = None if all(state is None for state in states) else states
    scores, _ = score_trajectories(rewards, problems, whole, 1, [game.episode() for game in games], played)
    return Tried(kind, texts, scores, _passed(scores, threshold), games, float(np.mean(seconds or [np.nan])))


def _passed(scores: Scores, threshold: float) -> np.ndarray:
    return scores.scored & succeeds(np.nan_to_num(scores.total, nan=-np.inf), threshold)


def _outcomes(environments: Environments, number: int) -> Iterator[tuple[Outcome, float]]:
    """Waits for `number` outcomes. Yields each with the seconds since the start of the wait."""
    start = time.perf_counter()
    while number > 0:
        for outcome in environments.outcomes(wait=True):
            number -= 1
            check_configured(outcome.failure)
            yield outcome, time.perf_counter() - start


def _called(environments: Environments, tool: Mapping[str, Any], problem: Problem) -> Outcome:
    """Calls a tool once in a new environment, with arguments made from its schema."""
    function = tool["function"]
    call = {"name": function["name"], "arguments": arguments_of(function)}
    environments.reset(0, *reset_arguments(environments, problem))
    ((outcome, _),) = _outcomes(environments, 1)
    if outcome.failure is None:
        environments.step(0, f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
        ((outcome, _),) = _outcomes(environments, 1)
    if outcome.failure is None:
        environments.finish(0)
        list(_outcomes(environments, 1))
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


class _Few(io.TextIOBase):
    """Writes the first `PRINTED` lines to standard error, escaped, and counts all lines."""

    def __init__(self) -> None:
        self.to = sys.stderr
        self.lines = 0

    def write(self, text: str) -> int:
        for part in visible(text).splitlines(keepends=True):
            if self.lines < PRINTED:
                self.to.write(part)
            self.lines += part.endswith("\n")
        return len(text)


@contextlib.contextmanager
def few_lines() -> Iterator[None]:
    """Redirects the output of user code and of worker processes to standard error, up to `PRINTED` lines."""
    few = _Few()
    try:
        with contextlib.redirect_stdout(few), contextlib.redirect_stderr(few):
            yield
    finally:
        if few.lines > PRINTED:
            print(f"({few.lines - PRINTED} more lines printed by the functions are not shown)", file=sys.stderr)


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message['role']}: {message['content']}" for message in observation or ())


def _mean(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    return f"{known.mean():.3f}" if len(known) else "-"


def _print_scores(tried: Sequence[Tried], names: Sequence[str], config: Config) -> None:
    threshold = config.rewards.success_threshold
    names = names if len(names) > 1 else []
    rows = [
        [
            each.kind, _mean(each.scores.total), f"{each.passed.mean():.1%}", f"{1 - each.scores.scored.mean():.1%}",
            *(_mean(each.scores.by_function[name]) for name in names),
        ]
        for each in tried
    ]  # fmt: skip
    title = f"{len(tried[0].texts)} training rows; a completion succeeds when its reward reaches {threshold:g}"
    console.table(title, ["completion", "mean reward", "succeed", "unscored", *names], rows)


def _print_games(tried: Sequence[Tried], names: Sequence[str], config: Config) -> None:
    rows = []
    for each in tried:
        failed = {name: int(failed.sum()) for name, failed in _causes(each).items()}
        answer = next((_text(game.observations[1]) for game in each.games if game.observations.get(1)), "-")
        rows.append([
            each.kind,
            _mean(each.scores.total),
            f"{each.passed.mean():.1%}",
            f"{np.mean([game.turns for game in each.games]):.1f}",
            f"{np.mean([game.done for game in each.games]):.0%}",
            ", ".join(f"{number} {name}" for name, number in failed.items() if number) or "-",
            "-" if np.isnan(each.seconds) else f"{each.seconds:.2g}",
            console.excerpt(answer, 80).replace("\n", "\\n"),
        ])  # fmt: skip
    console.table(
        f"{len(tried[0].games)} training rows, one episode of up to {config.environment.max_turns} turns each; an "
        f"episode succeeds when its reward reaches {config.rewards.success_threshold:g}",
        ["turns of the policy", "mean reward", "succeed", "turns", "done", "failed", "s/step", "answer to turn 1"],
        rows,
        texts=["turns of the policy", "failed", "answer to turn 1"],
    )
    first = next((each.games[0].observations.get(0) for each in tried if each.games[0].failure is None), None)
    shown = console.excerpt(_text(first), 600)
    console.print_text(f"first observation of row 1: {shown}" if shown else "reset gives no first observation")


def _print_tools(tools: Sequence[tuple[Mapping[str, Any], Outcome]]) -> list[str]:
    """Prints the schemas and the results of the tools. Returns messages on calls that timed out or failed."""
    wrong = []
    notes = []
    rows = []
    for tool, outcome in tools:
        function = tool["function"]
        observation = outcome.observation
        console.print_text(json.dumps(dict(tool), indent=2, ensure_ascii=False))
        messages = observation if observation and not isinstance(observation, str) else []
        result = "\n".join(message["content"] for message in messages) or _text(observation)
        if outcome.failure is not None:
            result = outcome.failure.reason
            wrong.append(f"tool {function['name']}: {result}")
        elif result.startswith("error:"):
            notes.append(
                f"tool {function['name']}: its call returned an error; this is correct if the tool does not accept "
                "these arguments"
            )
        rows.append([function["name"], json.dumps(arguments_of(function), ensure_ascii=False)])
        rows[-1].append(console.excerpt(result, 200))
    if rows:
        columns = ["tool", "arguments made from its schema", "result"]
        console.table(f"{len(rows)} tool{'s' * (len(rows) != 1)}, each called once", columns, rows, texts=columns)
    for note in notes:
        console.print_text(note)
    return wrong


def _causes(each: Tried) -> dict[str, np.ndarray]:
    return {"timeout": each.scores.timeouts, "error": each.scores.errors}


def _failures(tried: Sequence[Tried]) -> list[str]:
    """Returns a message on the first timeout and the first error of each kind; each reason is given once."""
    lines: dict[str, str] = {}
    for each in tried:
        for name, rows in _causes(each).items():
            if rows.any():
                row = int(np.flatnonzero(rows)[0])
                failure = each.games[row].failure if each.games else None
                reason = str(each.scores.first_failure) if failure is None else failure[1]
                line = f"{each.kind}: {name} in {int(rows.sum())} of {len(rows)} rows. The first, row {row + 1}: "
                lines.setdefault(reason.partition("\nPrompt: ")[0], line + reason)
    return list(lines.values())


def _different_starts(tried: Sequence[Tried]) -> list[str]:
    """Describes the first row whose episodes did not all begin with the same observation."""
    for row in range(len(tried[0].games)):
        seen = [each.games[row].observations.get(0) for each in tried if each.games[row].failure is None]
        if any(observation != seen[0] for observation in seen):
            return [
                f"row {row + 1}: two episodes began with different observations; `reset` must depend on the columns of "
                "the row only, because the trajectories of a row share its prompt"
            ]
    return []


def _too_easy(tried: Sequence[Tried], problems: Sequence[Problem]) -> list[str]:
    """Describes each kind of wrong completions that succeeds. The answers of other rows may succeed in some rows, and
    in all rows but one if all problems look the same, because they are guesses then."""
    lines = []
    for each in tried:
        seen = [(p.text, each.games[i].observations.get(0) if each.games else None) for i, p in enumerate(problems)]
        guesses = int(BY_CHANCE * len(seen)) if any(one != seen[0] for one in seen) else len(seen) - 1
        if each.kind not in (GOLD, WORDS) and each.passed.sum() > (guesses if each.kind == OTHER else 0):
            lines.append(_finding(each, "succeeds", each.passed, problems))
    return lines


def _gold(tried: Sequence[Tried], problems: Sequence[Problem]) -> list[str]:
    """Describes gold answers that do not succeed. With an environment they may not have the form of a turn."""
    gold = [each for each in tried if each.kind in (GOLD, WORDS)]
    if not gold:
        return []
    scored = np.any([each.scores.scored for each in gold], axis=0)
    failed = np.any([each.scores.timeouts | each.scores.errors for each in gold], axis=0)
    fails = scored & ~np.any([each.passed for each in gold], axis=0)
    checks = {"not scored": ~scored & ~failed, "fails": fails}
    return [_finding(gold[0], what, rows, problems) for what, rows in checks.items() if rows.any()]


def _finding(each: Tried, what: str, rows: np.ndarray, problems: Sequence[Problem]) -> str:
    first = int(np.flatnonzero(rows)[0])
    total = each.scores.total[first]
    return (
        f"{each.kind}: {what} in {int(rows.sum())} of {len(rows)} rows. The first, row {first + 1}: prompt "
        f"{problems[first].text!r:.200}, completion {each.texts[first]!r:.200}, "
        + ("no reward" if np.isnan(total) else f"reward {total:.3g}")
    )


def _exploitable(tried: Sequence[Tried], rewards: Sequence[WeightedReward]) -> list[str]:
    """Describes reward functions (if there are several) that give their highest reward to the fixed sentence. This can
    be intended."""
    lines = []
    for name, _, weight in rewards if len(rewards) > 1 and not tried[0].games else ():
        values = weight * np.array([each.scores.by_function[name] for each in tried])
        most = np.nanmax(values, initial=0)
        rows = values[-1] >= most if most > 0 else np.zeros(1, bool)  # the sentence is tried last
        if rows.any():
            lines.append(
                f"{tried[-1].kind}: gets the full reward of {name} in {int(rows.sum())} of {len(rows)} rows; a model "
                "can learn to exploit this instead of the task"
            )
    return lines
