"""Tests costs and trip counts that are read from the text of compiled programs: small ones written by hand, and tiny
ones compiled for v5e."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.process import python
from tunix_like.compile.costs import Costs, Counter, _convolution, _group_size, _pairs, times
from tunix_like.compile.hlo import Module, shapes_of
from tunix_like.runtime.accelerators import KINDS

COUNTED = """HloModule jit_f, is_scheduled=true

%cond.1 (p.1: (s32[], f32[4,8])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %end = s32[]{:T(128)} constant(10)
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %end), direction=LT
}

%body.1 (p.2: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p.2 = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %one = s32[]{:T(128)} constant(1)
  %half = s32[]{:T(128)} add(%i.2, %one)
  %next = s32[]{:T(128)} add(%half, %one)
  %x = f32[4,8]{1,0:T(8,128)} get-tuple-element(%p.2), index=1
  %y = f32[4,8]{1,0:T(8,128)} negate(%x), backend_config={"estimated_cycles":"100"}
  ROOT %out = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}) tuple(%next, %y)
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0:T(8,128)} parameter(0)
  %start = s32[]{:T(128)} constant(2)
  %state = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}) tuple(%start, %a)
  %loop = (s32[], /*index=1*/f32[4,8]) while(%state), condition=%cond.1, body=%body.1, metadata={op_name="jit(f)/while"}
  ROOT %done = f32[4,8]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""

COLLECTIVES = """HloModule jit_f

%fused.1 (q: bf16[4,8]) -> bf16[32,8] {
  %q = bf16[4,8]{1,0} parameter(0)
  ROOT %gather.1 = bf16[32,8]{1,0} all-gather(%q), channel_id=7, replica_groups=mesh['x'=8,'y'=1] {'x'}, dimensions={0}
}

%fused.2 (r: bf16[4,8]) -> bf16[32,8] {
  %r = bf16[4,8]{1,0} parameter(0)
  ROOT %gather.2 = bf16[32,8]{1,0} all-gather(%r), channel_id=7, replica_groups=mesh['x'=8,'y'=1] {'x'}, dimensions={0}
}

ENTRY %main (a: bf16[4,8], b: f32[16]) -> bf16[32,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %one = bf16[32,8]{1,0} fusion(%a), kind=kCustom, calls=%fused.1
  %sum-start = f32[16]{0} all-reduce-start(%b), channel_id=8, replica_groups={{0,1},{2,3}}, to_apply=%add
  %sum-done = f32[16]{0} all-reduce-done(%sum-start)
  %moved = f32[16]{0} collective-permute(%sum-done), channel_id=9, source_target_pairs={{0,1},{1,0}}
  ROOT %two = bf16[32,8]{1,0} fusion(%a), kind=kCustom, calls=%fused.2
}
"""

SLICED = """HloModule jit_f

%fused (stack: f32[28,4,8], index: s32[]) -> f32[4,8] {
  %stack = f32[28,4,8]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,4,8]{2,1,0} dynamic-slice(%stack, %index, %zero, %zero), dynamic_slice_sizes={1,4,8}
  ROOT %flat = f32[4,8]{1,0} bitcast(%one)
}

ENTRY %main (a: f32[28,4,8], i: s32[], w: f32[8,16]) -> f32[4,16] {
  %a = f32[28,4,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %w = f32[8,16]{1,0} parameter(2)
  %x = f32[4,8]{1,0:T(8,128)S(1)} fusion(%a, %i), kind=kLoop, calls=%fused
  ROOT %y = f32[4,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_bytes_of_shapes():
    (first, second) = shapes_of("(bf16[2,<=3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/pred[5]{0})")
    assert (first.dtype, first.dims, first.on_chip, first.bytes) == ("bf16", (2, 3), True, 12)
    assert (second.dims, second.on_chip, second.bytes) == ((5,), False, 5)
    assert [shape.bytes for shape in shapes_of("s4[8] f8e4m3fn[2] token[]")] == [4, 2, 0]


def test_a_loop_with_a_counter():
    """The counter runs from 2 to 10 in steps of two."""
    module = Module(COUNTED)
    loop = module["main"]["loop"]
    assert module.entry == "main" and module.trip_count("main", loop) == 4
    assert Counter(COUNTED, {}).total().cycles == 400
    assert Counter(COUNTED.replace('"100"', f'"{2**63 - 1}"'), {}).total().cycles == 0, "no estimate"


def test_known_trip_count_has_priority():
    text = COUNTED.replace('metadata={op_name="jit(f)/while"}', 'backend_config={"known_trip_count":{"n":"7"}}')
    assert Counter(text, {}).total().cycles == 700


@pytest.mark.parametrize(
    ("trips", "cycles", "unknown"),
    [({}, 100, {"chunks"}), ({"chunks": 2.5}, 250, set()), ({"chunks": lambda around: around + 2}, 300, set())],
)
def test_loop_whose_trip_count_depends_on_data(trips, cycles, unknown):
    text = COUNTED.replace("constant(10)", "parameter(1)").replace("jit(f)/while", "jit(f)/jvp(chunks)/while")
    counter = Counter(text, trips)
    assert counter.total().cycles == cycles and counter.unknown == unknown
    assert counter.one_trip("chunks").cycles == 100 and counter.one_trip("sets").cycles == 0


def test_attributes_over_several_lines():
    """The Pallas kernel and the copies of its results have such attributes."""
    broken = 'negate(%x), frontend_attributes={kernel_metadata={\n"metadata":"{\\"q\\": 1}"\n}}, backend_config='
    text = COUNTED.replace("negate(%x), backend_config=", broken)
    assert text != COUNTED and Counter(text, {}).total() == Counter(COUNTED, {}).total()


@pytest.mark.parametrize(
    "target",
    ["tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call_ffi", "mosaic_gpu_v2", "__cudnn$fmhaSoftmax"],
)
def test_kernels_are_counted(target):
    """Without an estimate of its own, a kernel reads its operands and writes its results: 2 x 128 bytes in main
    memory."""
    text = COUNTED.replace("negate(%x)", f'custom-call(%x), custom_call_target="{target}"')
    costs = Counter(text, {}).total()
    assert (costs.kernels, costs.kernel_bytes) == (4, 4 * 2 * 4 * 8 * 4)
    none = Counter(COUNTED, {}).total()
    assert (none.kernels, none.kernel_bytes, none.memory_bytes) == (0, 0, costs.memory_bytes)


def test_bytes_of_a_kernel_with_an_estimate():
    """The TPU compiler copies a kernel's `pl.CostEstimate`, the GPU compiler its attributes; the estimate of another
    custom call does not count."""
    estimate = '"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"123","bytes_accessed":"777"}}'
    text = COUNTED.replace('"estimated_cycles":"100"', estimate)
    kernel = text.replace("negate(%x)", 'custom-call(%x), custom_call_target="tpu_custom_call"')
    other = text.replace("negate(%x)", 'custom-call(%x), custom_call_target="Sharding"')
    target = 'custom_call_target="__gpu$xla.gpu.triton", frontend_attributes={bytes_accessed="555"}'
    gpu = COUNTED.replace("negate(%x)", f"custom-call(%x), {target}")
    assert Counter(kernel, {}).total().kernel_bytes == 4 * 777
    assert Counter(gpu, {}).total().kernel_bytes == 4 * 555
    assert Counter(other, {}).total().kernel_bytes == 0
    assert Counter(other, {}).total().memory_bytes - Counter(kernel, {}).total().memory_bytes == 4 * (256 - 777)


def test_the_time_of_kernels():
    """They take 1 / 0.7 of the time of other memory traffic, and are added to the cycles, which do not contain them."""
    kind = KINDS["v5e"]
    found = times(Costs(memory_bytes=10e9, kernel_bytes=7e9, cycles=3e9), 0.0, kind, 1)
    assert found.memory == pytest.approx((3e9 + 10e9) / 819e9)
    assert found.cycles == pytest.approx(3e9 / 1.5e9 + 10e9 / 819e9)


def test_bytes_of_collectives():
    """Of two fusions with the same channel one is counted, and an asynchronous collective is counted once. Bytes are
    those that a device receives."""
    costs = Counter(COLLECTIVES, {}).total()
    assert costs.numbers == {"all-gather": 1, "all-reduce": 1, "collective-permute": 1}
    assert costs.collectives == {"all-gather": 7 * 64, "all-reduce": 2 * 64 / 2, "collective-permute": 64}
    assert costs.network_bytes == 7 * 64 + 64 + 64


def test_a_reduce_scatter_of_the_tpu_compiler():
    """It is written as a fusion of an all-reduce and a slice, but transfers half the bytes of an all-reduce."""
    text = COLLECTIVES.replace("fused.1", "all-reduce-scatter.14.clone").replace("all-gather(%q)", "all-reduce(%q)")
    costs = Counter(text, {}).total()
    assert costs.collectives["reduce-scatter"] == 64 * 7 / 8 and costs.numbers["all-reduce"] == 1


@pytest.mark.parametrize(
    ("groups", "size"),
    [("{{0,1,2},{3,4,5}}", 3), ("[2,4]<=[8]", 4), ("[4,2]<=[2,4]T(1,0)", 2), ("mesh['a'=2,'b'=4] {'b'}", 4),
     ("mesh['a'=2,'b'=4] {'a','b'}", 8), ("{}", 1)],
)  # fmt: skip
def test_the_devices_of_a_collective(groups, size):
    assert _group_size(f", channel_id=1, replica_groups={groups}, dimensions={{0}}") == size


def test_memory_and_products():
    """Only the slice of a stack is read. Its destination is memory on the chip, which is not main memory."""
    costs = Counter(SLICED, {}).total()
    assert costs.operations == 2 * 4 * 8 * 16
    assert costs.memory_bytes == pytest.approx(4 * 8 * 4 + 4 + (8 * 16 + 4 * 16) * 4, abs=4)


NESTED = """
%inner (stack: f32[28,4,8], index: s32[]) -> f32[4,8] {
  %stack = f32[28,4,8]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,4,8]{2,1,0} dynamic-slice(%stack, %index, %zero, %zero), dynamic_slice_sizes={1,4,8}
  ROOT %flat = f32[4,8]{1,0} bitcast(%one)
}

%update (cache: f32[28,4,8], new: f32[1,4,8], at: s32[]) -> f32[28,4,8] {
  %cache = f32[28,4,8]{2,1,0} parameter(0)
  %new = f32[1,4,8]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %put = f32[28,4,8]{2,1,0} dynamic-update-slice(%cache, %new, %at, %none, %none)
}

%outer (whole: f32[28,4,8], number: s32[]) -> f32[28,4,8] {
  %whole = f32[28,4,8]{2,1,0} parameter(0)
  %number = s32[] parameter(1)
  %taken = f32[4,8]{1,0} fusion(%whole, %number), kind=kLoop, calls=%inner
  %wide = f32[1,4,8]{2,1,0} bitcast(%taken)
  ROOT %set = f32[28,4,8]{2,1,0} fusion(%whole, %wide, %number), kind=kLoop, calls=%update
}

ENTRY %main (a: f32[28,4,8], i: s32[]) -> f32[28,4,8] {
  %a = f32[28,4,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %y = f32[28,4,8]{2,1,0} fusion(%a, %i), kind=kLoop, calls=%outer
}
"""


def test_memory_of_fusions_inside_a_fusion():
    """Reads one slice of a stack and an index, and writes the slice."""
    assert Counter(NESTED, {}).total().memory_bytes == 4 * 8 * 4 + 4 + 4 * 8 * 4


PASSED_ON = """
%same (given: f32[32,8]) -> f32[4,8,8] {
  %given = f32[32,8]{1,0} parameter(0)
  ROOT %cut = f32[4,8,8]{2,1,0} bitcast(%given)
}

%put (cache: f32[32,8], new: f32[1,8], at: s32[]) -> f32[32,8] {
  %cache = f32[32,8]{1,0} parameter(0)
  %new = f32[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %set = f32[32,8]{1,0} dynamic-update-slice(%cache, %new, %at, %none)
}

%outer (matrix: f32[32,8], token: f32[1,8], column: s32[]) -> f32[] {
  %matrix = f32[32,8]{1,0} parameter(0)
  %token = f32[1,8]{1,0} parameter(1)
  %column = s32[] parameter(2)
  %first = CHANGED
  %zero = f32[] constant(0)
  ROOT %sum = f32[] reduce(%first, %zero), dimensions={0,1}, to_apply=%add
}

ENTRY %main (a: f32[32,8], b: f32[1,8], i: s32[]) -> f32[] {
  %a = f32[32,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %y = f32[] fusion(%a, %b, %i), kind=kInput, calls=%outer
}
"""


@pytest.mark.parametrize(
    ("changed", "others"),
    [
        ("f32[4,8,8]{2,1,0} fusion(%matrix), kind=kLoop, calls=%same", 0),
        ("f32[32,8]{1,0} fusion(%matrix, %token, %column), kind=kLoop, calls=%put", 4 * 8 + 4),
        ("f32[32,8]{1,0} dynamic-update-slice(%matrix, %token, %column, %column)", 4 * 8 + 4),
    ],
    ids=["bitcast", "nested update", "update"],
)
def test_an_array_that_is_passed_on_and_then_read_is_read_whole(changed, others):
    """The array, the written token and its index are read, and one number is written."""
    assert Counter(PASSED_ON.replace("CHANGED", changed), {}).total().memory_bytes == 4 * 32 * 8 + others + 4


def test_a_product_that_is_written_as_a_convolution():
    """The batch of eight is a spatial axis, dilated so that each output meets one pair."""
    text = (
        "ENTRY %main (a: f32[8,512,256]) -> f32[8,512,128] {\n  ROOT %y = f32[8,512,128]{2,1,0} convolution(%a, %b), "
    )
    text += "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf\n}\n"
    (product,) = Module(text)["main"].values()
    assert _convolution(product, (8, 512, 256), (8, 256, 128)) == 2 * 8 * 512 * 256 * 128
    assert _pairs(5, 3, 5, 1, 1, 1, 1) == 13  # 3 x 5, minus one at each end


COMPILED = """
import json, sys
from tunix_like.compile import devices
devices.prepare()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tunix_like.compile.costs import Counter

kind, number, _ = devices.parse_devices("v5e-8")
mesh = Mesh(np.array(devices.described_devices(kind, number)), ("fsdp",))

def f(n, x, stack):
    def layer(x, w):
        return jnp.tanh(x @ w), None
    def chunk(i, x):
        return jax.lax.scan(layer, x, stack)[0]
    with jax.named_scope("chunks"):
        return jax.lax.fori_loop(0, n, chunk, x)

def shape(spec, *sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

args = shape(P(), dtype=jnp.int32), shape(P("fsdp"), 1024, 512), shape(P(None, "fsdp"), 6, 512, 512)
text = jax.jit(f).lower(*args).compile().as_text()
found = []
for trips in (1, 3):
    counter = Counter(text, {"chunks": trips})
    costs = counter.total()
    found.append([costs.operations, costs.cycles, costs.network_bytes, sorted(counter.unknown)])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")
def test_a_program_of_the_tpu_compiler(tmp_path):
    """Chunks of data with six layers each, whose weights are gathered over eight devices."""
    done = python("-c", COMPILED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (one, _), (three, _) = ((found[:3], found[3]) for found in json.loads(done.stdout))
    assert json.loads(done.stdout)[0][3] == []
    assert one[0] == 6 * 2 * 128 * 512 * 512 and three[0] == 3 * one[0]
    assert one[1] > 0 and three[1] > 2.5 * one[1] * 0.9
    layer = 512 * 512 * 2 * 7 / 8  # the received bytes of a layer's weights, hoisted or not
    assert 6 * layer <= one[2] <= three[2] <= 18 * layer


KERNEL = """
import json, sys
from tunix_like.compile import devices
devices.prepare()
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import SingleDeviceSharding
from tunix_like.compile.costs import Counter

kind, number, _ = devices.parse_devices("v5e-1")
on_device = SingleDeviceSharding(devices.described_devices(kind, number)[0])
block = pl.BlockSpec((512, 512), lambda i: (i, 0))

def double(x, out):
    out[...] = 2 * x[...]

found = []
for cost in (None, pl.CostEstimate(flops=1, transcendentals=0, bytes_accessed=777)):
    def f(n, x):
        call = pl.pallas_call(double, x, grid=256, in_specs=[block], out_specs=block, cost_estimate=cost)
        with jax.named_scope("loop"):
            return jax.lax.fori_loop(0, n, lambda _, x: call(x), x)
    shapes = (jax.ShapeDtypeStruct(size, kind, sharding=on_device) for size, kind in
              (((), jnp.int32), ((131072, 512), jnp.float32)))
    costs = Counter(jax.jit(f, donate_argnums=1).lower(*shapes).compile().as_text(), {"loop": 3}).total()
    found.append([costs.kernels, costs.kernel_bytes])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")
def test_bytes_of_a_kernel_of_the_tpu_compiler(tmp_path):
    """Three calls of a kernel on 268 MB, more than the memory on the chip, without and with an estimate of its own."""
    done = python("-c", KERNEL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[3, 3 * 2 * 131072 * 512 * 4], [3, 3 * 777]]


STREAMED = """
import json
from tunix_like.compile import devices
devices.prepare()
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from tunix_like.compile.costs import Counter

kind, number, _ = devices.parse_devices("v5e-1")
on_device = SingleDeviceSharding(devices.described_devices(kind, number)[0])

def f(n, x, stack):
    with jax.named_scope("tokens"):
        return jax.lax.fori_loop(0, n, lambda _, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0], x)

shapes = (jax.ShapeDtypeStruct(size, kind, sharding=on_device) for size, kind in
          (((), jnp.int32), ((8, 8192), jnp.bfloat16), ((4, 8192, 8192), jnp.bfloat16)))
counter = Counter(jax.jit(f).lower(*shapes).compile().as_text(), {"tokens": 5})
print(json.dumps([counter.total().memory_bytes, counter.one_trip("tokens").memory_bytes]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed")
def test_memory_traffic_of_a_loop_over_matrices(tmp_path):
    """Each of five tokens reads four matrices of 134 MB, more than fit on the chip; its activations stay there."""
    done = python("-c", STREAMED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    matrices = 4 * 8192 * 8192 * 2
    assert json.loads(done.stdout) == pytest.approx([5 * matrices, matrices], rel=0.005)
