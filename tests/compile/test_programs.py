"""Tests `doctor --config --devices`: the compiled programs for devices that are not present, against the programs of a
run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from types import SimpleNamespace

import jax
import pytest
from flax import nnx

from tests.process import ROOT, python
from tests.tiny_model import HF
from tunix_like.cli import main as cli
from tunix_like.compile import report as programs
from tunix_like.compile.costs import Times
from tunix_like.compile.programs import decode_program, make_plan, programs_of, update_program
from tunix_like.config.load import load
from tunix_like.config.schema import OptimizerConfig
from tunix_like.errors import UserError
from tunix_like.models.counts import parameter_count
from tunix_like.models.sharding import place_params
from tunix_like.planning.sizes import Device
from tunix_like.runtime.accelerators import KINDS
from tunix_like.step.optimizer import build_optimizer, init_optimizer, state_shapes

pytestmark = pytest.mark.slow

YAML = str(ROOT / "examples" / "debug" / "reverse_text.yaml")
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
V5E = Device("tpu", 16 * 10**9)
SMALL = (f"model.config={json.dumps(MODEL)}", "data.batch_size=8", "algorithm.num_generations=4", "sft.max_steps=0")


def test_already_initialized_backend_is_an_error():
    programs.pretend(len(jax.devices()))
    with pytest.raises(UserError, match="a new process"):
        programs.pretend(len(jax.devices()) + 1)


@pytest.fixture(scope="module")
def plan():
    return make_plan(load(YAML, [*SMALL, "mesh.shape=[4, 2]"]), V5E)


def test_shardings_equal_those_of_a_run(plan):
    """Compares parameters and optimizer state with those of a loaded model."""
    params = plan.split[1]
    made = nnx.to_pure_dict(nnx.split(type(plan.model)(plan.model.config, rngs=nnx.Rngs(0), dtype=plan.model.dtype))[1])
    placed = place_params(made, plan.mesh)
    optimizer = build_optimizer(OptimizerConfig(), 1)
    state = init_optimizer(optimizer, placed)
    found = params, state_shapes(optimizer, params)
    assert jax.tree.structure(found) == jax.tree.structure((placed, state))
    for shape, array in zip(jax.tree.leaves(found), jax.tree.leaves((placed, state)), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)


@pytest.mark.parametrize("shape", ["auto", "[2, 1]"])
def test_weights_and_caches_of_sampling_are_on_one_mesh(shape):
    """jax 0.11 does not compile a program whose arguments are on different meshes, even of the same device."""
    devices = jax.devices()[: 1 if shape == "auto" else 2]
    made = make_plan(load(YAML, [*SMALL, f"mesh.shape={shape}"]), V5E, devices)
    assert made.sampling_mesh.size == len(devices)
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(made.sampled)} == {made.sampling_mesh}


def simulated(number, kind="v5e"):
    return programs.Target(f"{kind}-{number}", KINDS[kind], number, None, "a simulation")


def test_costs_of_the_update_per_device(plan):
    """A device has an eighth of every matrix and of its moments, and all of the other arrays. Its products are those of
    the step and a few more, because the two key heads are not split over four devices."""
    update = programs.compile_program(update_program(plan))
    matrices = sum(x.size for x in jax.tree.leaves(plan.split[1]) if x.ndim > 1)
    weights = 3 * 4 * (matrices // 8 + parameter_count(plan.model.config) - matrices)
    assert weights < update.arguments < weights + 50_000, "a batch of 8 x 4 x 8 tokens"
    assert update.temporaries > matrices and 0.9 < 8 * update.costs.operations / update.program.operations < 8
    assert update.program.estimate is not None and update.program.estimate.name in ("update", "optimizer")
    assert update.costs.network_bytes > 0 and not update.unknown and update.times(simulated(8)) is None


def test_costs_of_decoding_one_token(plan):
    """Covers one iteration of the loop over tokens, which runs once per token of a completion."""
    program = decode_program(plan)
    decode = programs.compile_program(program)
    assert program.token_loop is not None and decode.token is not None and not decode.unknown
    trips = program.trips[program.token_loop]
    assert trips == plan.widths[1] and 0 < decode.token.operations * trips <= decode.costs.operations


def test_names_of_the_programs(plan):
    assert [program.name for program in programs_of(plan)] == ["update", "reshard", "prefill", "decode"]


def test_log_probability_programs_are_listed_if_needed():
    """They are computed for several updates per batch, and for a KL in the reward those of the reference and of the
    policy."""
    overrides = ["mesh.shape=[4, 2]", "algorithm.beta=0.1", "algorithm.kl_in_reward=true", "algorithm.num_iterations=2"]
    overrides += ["algorithm.advantage_estimator=rloo", "algorithm.policy_loss_fn=ppo_clip"]
    plan = make_plan(load(YAML, [*SMALL, *overrides]), V5E)
    found = {program.name: program for program in programs_of(plan)}
    assert list(found) == ["update", "logprobs", "reshard", "prefill", "decode"]
    assert (found["logprobs"].calls, found["update"].calls) == (3, 2)
    compiled = programs.compile_program(found["logprobs"])
    assert not compiled.unknown and compiled.costs.operations > 0.9 * found["logprobs"].operations / 8


def test_model_far_beyond_the_memory_is_rejected_before_compilation(plan):
    fixed = max(phase.fixed for phase in plan.estimate.phases)
    target = dataclasses.replace(simulated(8), kind=dataclasses.replace(KINDS["v5e"], memory=fixed // 2))
    with pytest.raises(UserError, match=r"--devices v5e-8: .* By estimate v5e-32 or v5e-8 or .*8xh100 .* would fit"):
        programs.check_size(plan, target)
    programs.check_size(plan, simulated(8))
    programs.check_size(plan, dataclasses.replace(target, kind=None))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("CompileTimeHbmOom: Ran out of memory in memory space hbm. Used 15.97G of 15.75G hbm.", "15.97G of 15.75G"),
        ("Ran out of memory on HBM, the total memory required for HLO temporaries (56.00G) exceeds available HBM "
         "(15.75G).", "56.00G of 15.75G"),
    ],
)  # fmt: skip
def test_out_of_memory_error_of_the_compiler_is_a_row_of_the_table(plan, message, said):
    def lower():
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")

    program = dataclasses.replace(decode_program(plan), lower=lower)
    refused = programs.compile_program(program)
    assert refused.refusal == f"does not fit: used {said}"
    rows = dict(row for row in programs.rows_of([refused], simulated(8)))
    assert rows["sum"] == refused.refusal and rows["arguments"] == "-"
    found = programs._as_json(refused, simulated(8))
    assert found["error"] == refused.refusal and found["argument_bytes"] is None and found["cycles"] is None


def test_other_errors_of_the_compiler_are_not_about_memory(plan):
    def lower():
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    with pytest.raises(jax.errors.JaxRuntimeError):
        programs.compile_program(dataclasses.replace(decode_program(plan), lower=lower))


WITHOUT = (
    "import sys; from tunix_like.compile import devices; devices.compiler_of = lambda kind: None; "
    "from tunix_like.cli.main import main; sys.exit(main())"
)
"""Runs the command on a machine without the compilers of accelerators."""


def test_report_of_simulated_devices(tmp_path):
    """Simulates eight devices in a separate process, from a folder that has only config.json."""
    (tmp_path / "config.json").write_text(json.dumps(HF | {"num_attention_heads": 2}))
    argv = ["doctor", "--config", YAML, "--devices", "v5e-8", *SMALL[1:], "data.train_size=50"]
    own = ["model.config=null", f"model.path={tmp_path}", "model.init=pretrained", "rollout.max_tokens_to_generate=8"]
    done = python("-c", WITHOUT, *argv, *own, "--json", "report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "pip install 'tunix-like[tpu]'" in said and "simulated CPU devices" in said
    assert "v5e-8: fsdp 8, tp 1; 16.9 GB per device; bfloat16" in said
    names = ("arguments", "temporaries", "sum", "estimated", "operations needed", "bytes needed", "network a token")
    for name in (*names, "seconds"):
        assert re.search(rf"{name}.*\d", said), name
    for name in ("update", "reshard", "prefill", "decode"):
        assert re.search(rf"{name}: compiled, \d+\.\d s\n", said), name
    assert "upper bound" in said and "of the bound" not in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["devices"] == "v5e-8" and report["compiler"].startswith("XLA:CPU")
    assert [program["name"] for program in report["programs"]] == ["update", "reshard", "prefill", "decode"]
    assert "collective_bytes_per_token" not in report["programs"][0]
    assert report["programs"][3]["collective_bytes_per_token"] > 0
    assert all(program["predicted_seconds"] is None for program in report["programs"])
    again = [*argv[:3], "--devices", "v5e-4", "mesh.shape=[2, 1]"]
    done = python("-c", WITHOUT, *again, cwd=tmp_path)
    assert done.returncode == 2 and re.fullmatch(r"error: mesh.shape: \[2, 1\] needs 2 .* there are 4.*\n", done.stderr)


def test_bad_options_end_before_anything_is_compiled(tmp_path, capsys):
    for options, said in (
        (["--devices", "v5e-3"], "no v5e slice of 3 chips"),
        (["--devices", "v5e-8", "--json", str(tmp_path / "no" / "file")], r"--json .*does not exist"),
        (["--json", "x"], "give both options or neither"),
    ):
        assert cli.main(["doctor", "--config", YAML, *options]) == 2
        assert re.search(f"error: .*{said}", capsys.readouterr().err)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")
def test_the_report_of_the_tpu_compiler(tmp_path):
    argv = ["doctor", "--config", YAML, "--devices", "v5e-4", *SMALL, "--json", "report.json"]
    done = python("-m", "tunix_like", *argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "XLA:TPU (libtpu" in done.stdout and "time by cycles" in done.stdout and "upper bound" not in done.stdout
    assert "number of iterations depends on data" not in done.stdout
    for program in json.loads((tmp_path / "report.json").read_text())["programs"]:
        assert program["predicted_seconds"] >= program["cycles"] / 1.5e9 * 0.999 > 0
        assert program["argument_bytes"] > 0 and program["hbm_bytes"] > 0
        assert (program["flops"] > 0) == (program["name"] != "reshard")
        assert program["collective_bytes"] > 0 or program["name"] not in ("update", "reshard")
        assert program["needed_bytes"] > 0 and 0 < program["bound_seconds"] < program["typical_seconds"][0]


DECODE = """
import sys
from tunix_like.compile import devices
devices.prepare()
from tunix_like.compile import report
from tunix_like.compile.programs import decode_program, make_plan
from tunix_like.config.load import load
target = report.find_target("v5e-4")
device = report.Device("tpu", target.kind.memory, target.kind)
plan = make_plan(load(sys.argv[1], sys.argv[2:]), device, target.described)
print(report.compile_program(decode_program(plan)).temporaries)
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")
def test_decoding_of_the_tpu_compiler_gathers_few_layers_at_a_time(tmp_path):
    """All temporaries are smaller than the layers without their sharding over `fsdp`."""
    wide = MODEL | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "head_dim": 128}
    wide |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    more = [f"model.config={json.dumps(wide)}", "model.dtype=bfloat16", "rollout.mesh=[1,4,1]", "data.batch_size=32"]
    done = python("-c", DECODE, YAML, *more, "algorithm.num_generations=8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    layers = 8 * (3 * 1024 * 4096 + 4 * 1024 * 1024) * 2
    assert 0 < int(done.stdout.splitlines()[-1]) < layers


EXPERTS = """
from tunix_like.compile import devices
devices.prepare()
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from tunix_like.compile.costs import Counter
from tunix_like.models.grouped_products import grouped_product

kind, number, _ = devices.parse_devices("v5e-1")
device = SingleDeviceSharding(devices.described_devices(kind, number)[0])

def gradients(x, matrices, sizes, cotangent):
    return jax.vjp(lambda x, matrices: grouped_product(x, matrices, sizes), x, matrices)[1](cotangent)

kinds = {(8200, 2048): jnp.bfloat16, (16, 2048, 1024): jnp.bfloat16, (16,): jnp.int32, (8200, 1024): jnp.bfloat16}
given = (jax.ShapeDtypeStruct(shape, dtype, sharding=device) for shape, dtype in kinds.items())
costs = Counter(jax.jit(gradients).lower(*given).compile().as_text(), {}).total()
print(costs.operations, costs.kernels)
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")
def test_gradients_of_experts_by_the_tpu_compiler(tmp_path):
    """All products are in kernels, so none is over all rows for every expert."""
    done = python("-c", EXPERTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    operations, kernels = map(float, done.stdout.splitlines()[-1].split())
    assert operations == 0 and kernels >= 2


class Timed(programs.Compiled):
    """A compiled program with given predicted times."""

    def __init__(self, found):
        self.__dict__ |= {"found": found, "costs": SimpleNamespace(collectives={})}

    def times(self, target):
        return self.found

    def bound(self, target, shares=(1.0, 1.0)):
        return None


def test_the_time_of_a_run_is_that_of_its_steps():
    """The sum of the programs' times, times `training.max_steps`; none if the time of a program is unknown."""
    one, other = Timed(Times(30.0, 1.0, 2.0, None)), Timed(Times(1.0, 6.0, 2.0, 3.0))
    config = load(None, ["training.max_steps=1000"])
    (line,) = [line for line in programs.notes_of([one, other], simulated(8), config) if "max_steps" in line]
    assert float(re.search(r"([\d.]+) hours", line)[1]) == pytest.approx(1000 * 36 / 3600, rel=0.05)
    assert not any("max_steps" in line for line in programs.notes_of([one, Timed(None)], simulated(8), config))
