"""Defines the environment `guess`: the policy has to find a hidden number from the answers HIGHER and LOWER."""

from __future__ import annotations

import re

from tunix_like.environments.protocol import EnvStepResult
from tunix_like.tasks.guess import HIGHER, INVALID, LOWER, MOST_GUESSES, NUMBERS

COST = 0.05
"""Reduction of the reward for each turn after the first."""


class Guess:
    """The environment of one game in which the policy guesses a hidden number. The last number in the text of a turn is
    the guess.

    The reward is `1 - COST * (turns - 1)` if the hidden number is found after `turns` turns, otherwise 0. `COST` is a
    constant. A turn without a valid number counts as a turn, and the environment answers INVALID. The game ends after
    `MOST_GUESSES` turns. If the number is not found, the metric `turns_to_success` is `MOST_GUESSES + 1`. The `state`
    is what is known of the number, and the number of turns.
    """

    def reset(self, number: int) -> None:
        """Starts a game with the hidden number `number`."""
        self.number = number
        self.turns = 0
        self.lowest = 0
        self.highest = NUMBERS - 1

    def step(self, completion: str) -> EnvStepResult:
        """Compares the guess in a turn with the hidden number. Answers HIGHER or LOWER if the hidden number is higher
        or lower than the guess, and INVALID if the turn has no valid guess. There is no answer when the game ends."""
        self.turns += 1
        numbers = re.findall(r"(?<![\d.-])\d{1,9}(?![\d.]*\d)", completion)
        guess = int(numbers[-1]) if numbers else -1
        if guess == self.number:
            info = {"turns_to_success": float(self.turns), "solved": 1.0}
            return EnvStepResult(None, 1 - COST * (self.turns - 1), True, info)
        over = self.turns == MOST_GUESSES
        text = INVALID if not 0 <= guess < NUMBERS else HIGHER if guess < self.number else LOWER
        if text == HIGHER:
            self.lowest = max(self.lowest, guess + 1)
        if text == LOWER:
            self.highest = min(self.highest, guess - 1)
        info = {"turns_to_success": MOST_GUESSES + 1.0, "solved": 0.0}
        state = f"{self.lowest}-{self.highest} after {self.turns}"
        return EnvStepResult(None if over else text, 0.0, over, info | {"state": state})
