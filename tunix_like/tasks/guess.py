"""The rules of the game `guess`: the numbers, the length of a game and the replies."""

NUMBERS = 64
"""The hidden number is one of 0, 1, ..., NUMBERS - 1."""

MOST_GUESSES = 7
"""The game is lost after this many turns. Bisection needs at most this many turns."""

HIGHER = "HIGHER"
LOWER = "LOWER"
INVALID = "INVALID"
