"""A small run with environments in processes, an async reward, evaluations and checkpoints.

`python -m tests.training.traced_run FOLDER STEPS KILL_AT` kills itself with SIGKILL after the row of step `KILL_AT`.
"""

import asyncio
import os
import signal
import sys

from tests.training.small_learner import ROWS, collect, make
from tests.training.test_environments import LENGTHS, TURNS
from tunix_like import EnvironmentPool, EvalConfig, MaxRLConfig

NUMBERS = [row | {"number": i} for i, row in enumerate(ROWS)]
GROUP, BATCH = 4, 4


async def service(prompt, completion, **columns):
    await asyncio.sleep(0.02)
    return float(len(completion) % 2)


def run(folder, steps, kill_at=None):
    """Trains and returns the rows of metrics."""
    learner = make(MaxRLConfig(num_generations=GROUP), reward=service, rollout=LENGTHS, max_steps=steps,
                   environment=EnvironmentPool("guess", workers=2), environment_config=TURNS, output_dir=str(folder),
                   checkpoint_every_n_steps=2, eval_every_n_steps=2,
                   eval_config=EvalConfig(samples=2, batch_size=4))  # fmt: skip
    if kill_at is None:
        return collect(learner, NUMBERS, NUMBERS[:4], batch_size=BATCH)

    def kill(row, total):
        if row["step"] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    learner._listeners[0] = kill
    return learner.train(NUMBERS, NUMBERS[:4], batch_size=BATCH)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
