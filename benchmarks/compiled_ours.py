"""This library's side of `benchmarks.peer_compiled`: its update and its decoding, from `compile/programs.py`."""

from __future__ import annotations

from typing import Any

from benchmarks.compiled import Work, read_costs, serve
from tunix_like.compile.devices import prepare

prepare()

from tunix_like.compile.programs import Plan, decode_program, make_plan, update_program  # noqa: E402
from tunix_like.config.load import load  # noqa: E402 (after `prepare`, which has to run before jax is imported)
from tunix_like.models.sharding import scope  # noqa: E402
from tunix_like.planning.sizes import Device  # noqa: E402


def plan_of(work: Work, prompts: int) -> Plan:
    """Returns the plan of a run with `prompts` prompts a step; every key that is not named has its default."""
    overrides = [
        "model.init=random",
        f"model.config={work.model}",
        "data.name=maze",
        f"data.batch_size={prompts}",
        "algorithm.advantage_estimator=grpo",
        f"algorithm.num_generations={work.group}",
        f"rollout.max_prompt_length={work.prompt_length}",
        f"rollout.max_tokens_to_generate={work.length}",
        f"rollout.max_concurrent_rows={work.rows}",
        "optimizer.learning_rate=1e-6",
        "optimizer.max_grad_norm=null",
        "training.max_steps=1",
        "training.remat=true",
    ]
    kind, _ = work.target
    return make_plan(load(None, overrides), Device(kind.backend, kind.memory, kind), work.described())


def update(work: Work) -> dict[str, Any]:
    """Compiles an update of all prompts."""
    plan = plan_of(work, work.prompts)
    program = update_program(plan)
    with scope(program.mesh):
        found = read_costs(program.lower, program.trips)
    return found | {"attention": plan.model.attention, "needed": program.operations}


def decode(work: Work) -> dict[str, Any]:
    """Compiles decoding with all rows; the costs are those of one token of every row."""
    plan = plan_of(work, work.rows // work.group)
    program = decode_program(plan)
    with scope(program.mesh):
        found = read_costs(program.lower, program.trips, program.token_loop)
    mesh = dict(program.mesh.shape) if program.mesh is not None else {}
    return found | {"layout": ", ".join(f"{name} {size}" for name, size in mesh.items() if size > 1)}


if __name__ == "__main__":
    serve({"update": update, "decode": decode})
