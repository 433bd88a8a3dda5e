"""A reward of the examples beside this file."""


def right_places(prompts, completions, answer, **columns):
    """Returns for each completion the share of places at which it has the character of the answer."""
    pairs = zip(completions, answer, strict=True)
    return [sum(map(str.__eq__, text, right)) / max(len(text), len(right), 1) for text, right in pairs]
