"""Reward functions that ask for the step and the progress of the run, or do not."""


def both(completions, step, progress):
    return [step + progress] * len(completions)


def both_of_row(completions, step, progress):
    return [each + progress for each in step]


def defaults(completions, step=100, progress=0.0):
    return [step + progress] * len(completions)


def only_step(completions, step):
    return [step] * len(completions)


def only_columns(completions, **columns):
    return [float("step" in columns) + 2.0 * ("progress" in columns)] * len(completions)


def with_collected(completions, **progress):
    return [float(len(progress) > 1)] * len(completions)  # `prompts` is one of them


def positional(step, /, completions):
    return [step] * len(completions)


def fails_for_c(completions, step, progress):
    if "c" in completions:
        raise ValueError("c")
    return both(completions, step, progress)


async def one_completion(completion, step, progress):
    return step + progress


async def all_at_once(completions, step, progress):
    return both(completions, step, progress)


class Asking:
    __name__ = "asking"

    def __call__(self, completions, step, progress):
        return both(completions, step, progress)


instance = Asking()
