"""The time of operations: what a kernel is, and how a CPU and a device share a stream of them."""

from dataclasses import replace

import pytest
from planned_specs import spec_for

from shardwise.hardware import cluster_of, device_of, devices
from shardwise.hardware.borrowed import kernel_model_of
from shardwise.models.specs.spec_store import ready_spec
from shardwise.plan import Plan
from shardwise.planner.time.compute import (
    can_time,
    copy_seconds,
    kernel_of,
    launch_seconds,
    num_recomputed,
    stream_seconds,
    update_seconds,
)
from shardwise.planner.time.step_time import estimate_time
from shardwise.program.spec.step import Law, Op, StepTrace, Stream

H200 = device_of("h200")
BLOCK = "blocks.1"


def trace_of(name: str, *, recompute: str = "none") -> StepTrace:
    spec = ready_spec(name, ways={("bf16", recompute)})
    assert spec is not None
    (trace,) = spec.traces
    return trace


def ops_of(name: str, *, trigger: str, recompute: str = "none") -> Stream:
    rows = trace_of(name, recompute=recompute).rows
    return next(row.stream for row in rows if row.unit == BLOCK and row.trigger == trigger)


def kernels(stream: Stream, *, seq: int | None, backward: bool = False) -> list[str]:
    return [kernel_of(op, batch=2, seq=seq, precision="bf16", backward=backward).key for op in stream.ops]


def op_seconds(op: Op, *, batch: int = 1, seq: int | None = None, backward: bool = False) -> float:
    return kernel_model_of(H200).seconds(kernel_of(op, batch=batch, seq=seq, precision="bf16", backward=backward))


def law(constant: int) -> Law:
    return Law((constant, 0, 0, 0, 0, 0))


def test_the_products_of_a_linear_layer_have_their_roles() -> None:
    assert kernels(ops_of("gpt2-124m", trigger="before forward"), seq=1024) == [
        "layer_norm",
        "matmul forward bf16",
        "attention causal bf16",
        "matmul forward bf16",
        "add",
        "layer_norm",
        "matmul forward bf16",
        "gelu",
        "matmul forward bf16",
        "add",
    ]
    backward = kernels(ops_of("gpt2-124m", trigger="before backward"), seq=1024, backward=True)
    assert backward.count("matmul input bf16") == backward.count("matmul weight bf16") == 4
    assert backward.count("attention_backward causal bf16") == 1


def test_a_vocabulary_that_is_no_multiple_of_8_gets_another_kernel() -> None:
    """50,257 columns of 16 bits: rows begin at odd addresses. GPT-2's are padded to 50,304."""
    rows = trace_of("gpt2-124m").rows
    (head,) = [row for row in rows if row.trigger == "before backward" and row.unit == "(root)"]

    def unpadded(op: Op) -> Op:
        return replace(op, dims=tuple(law(50257) if dim == law(50304) else dim for dim in op.dims))

    for stream, unaligned in ((Stream(ops=tuple(map(unpadded, head.stream.ops))), True), (head.stream, False)):
        found = kernels(stream, seq=1024, backward=True)
        assert ("matmul weight unaligned bf16" in found) is unaligned
        assert ("matmul weight bf16" in found) is not unaligned


def test_attention_of_images_is_not_causal() -> None:
    assert "attention full bf16" in kernels(ops_of("vit-large", trigger="before forward"), seq=None)


def test_a_table_that_is_looked_up_is_not_read_whole() -> None:
    """50,304 rows of 768 count, of which 2 × 1024 are read and written."""
    (row,) = [row for row in trace_of("gpt2-124m").rows if row.trigger == "before forward" and row.unit == "(root)"]
    kernel = kernel_of(row.stream.ops[0], batch=2, seq=1024, precision="bf16")
    assert kernel.name == "embedding"
    assert kernel.num_bytes == pytest.approx(2 * (2 * 1024 * 768 * 2), rel=0.02)


def test_a_convolutions_sizes_come_from_its_laws() -> None:
    """64 channels to 64, 3 × 3, on images of 56 × 56."""
    for row in trace_of("resnet50").rows:
        for op in row.stream.ops:
            kernel = kernel_of(op, batch=4, seq=None, precision="bf16")
            if kernel.name == "convolution" and kernel.sizes[1] == 64 * 64 * 9:
                assert kernel.sizes[0] == 4 * 56 * 56
                return
    pytest.fail("resnet50 has no such convolution")


def test_recomputed_operations_are_those_of_the_forward() -> None:
    forward = ops_of("gpt2-124m", trigger="before forward")
    assert num_recomputed(forward, ops_of("gpt2-124m", trigger="before backward")) == 0
    again = num_recomputed(forward, ops_of("gpt2-124m", trigger="before backward", recompute="full"))
    # It stops early: nobody needs what comes after the last thing that is saved.
    assert 7 <= again <= len(forward.ops)


@pytest.mark.parametrize("name", sorted(device.name for device in devices().values() if can_time(device)))
def test_every_device_with_peaks_has_times(name: str) -> None:
    device = device_of(name)
    stream = ops_of("gpt2-124m", trigger="before forward")
    small, large = (
        stream_seconds(stream, batch=batch, seq=1024, precision="bf16", device=device, backward=False)
        for batch in (1, 16)
    )
    assert 0 < small.kernel < large.kernel
    assert small.launch == large.launch > 0
    assert copy_seconds(2**30, device=device) > copy_seconds(2**20, device=device) > 0
    assert min(update_seconds(num_elements=10**9, num_tensors=9, optimizer="sgd", device=device)) > 0


def test_a_cpu_without_a_calibration_has_no_times() -> None:
    assert not can_time(device_of("cpu"))


def test_products_of_rows_that_begin_at_odd_places_are_slower() -> None:
    times = [
        op_seconds(
            Op(
                name="mm",
                num_flops=law(2 * 4096 * vocab * 768),
                num_bytes=law(1),
                dims=tuple(map(law, (4096, vocab, 768))),
            )
        )
        for vocab in (50_264, 50_260, 50_258, 50_257)
    ]
    aligned, by_four, by_two, odd = times
    assert 1.5 * aligned < by_four < odd
    assert by_four == pytest.approx(by_two, rel=0.1)


def test_an_elementwise_kernel_that_looks_for_each_element_goes_with_their_number() -> None:
    alike = Op(name="mul", num_flops=law(0), num_bytes=law(6 * 2**24))
    broadcast = Op(name="mul", num_flops=law(0), num_bytes=law(4 * 2**24), dims=(law(2**24),))
    in_fp32 = Op(name="mul", num_flops=law(0), num_bytes=law(8 * 2**24), dims=(law(2**24),))
    fast, slow, as_slow = (op_seconds(op) for op in (alike, broadcast, in_fp32))
    # 2.6 times as long for each byte.
    assert slow > 1.5 * fast
    assert slow == as_slow


def test_a_node_of_autograd_that_issues_two_operations_is_paid_for_once() -> None:
    op = Op(name="mul", num_flops=law(0), num_bytes=law(1))
    alone, shared = (launch_seconds(op, backward=True, device=H200, nodes_per_op=nodes) for nodes in (1.0, 0.5))
    assert 0.6 * alone < shared < 0.9 * alone
    assert launch_seconds(op, backward=False, device=H200, nodes_per_op=0.5) == pytest.approx(1.3 * 16.4e-6, rel=0.02)


def test_a_stream_is_its_operations_one_after_the_other() -> None:
    """The device waits for the CPU, or the CPU is ahead: end = max over k of (issued up to k + done from k on)."""
    stream = ops_of("gpt2-124m", trigger="before backward")
    total = stream_seconds(stream, batch=4, seq=1024, precision="bf16", device=H200, backward=True)
    issued = [launch_seconds(op, backward=True, device=H200) for op in stream.ops]
    done = [op_seconds(op, batch=4, seq=1024, backward=True) for op in stream.ops]
    assert total.launch == pytest.approx(sum(issued))
    assert total.kernel == pytest.approx(sum(done))
    ends = [sum(issued[: k + 1]) + sum(done[k:]) for k in range(len(done))]
    assert total.span == pytest.approx(max(ends))


def test_an_operation_that_nobody_measured_takes_the_time_of_its_bytes() -> None:
    def op(name: str) -> Op:
        return Op(name=name, num_flops=Law((0,) * 6), num_bytes=Law((0, 0, 0, 2**30, 0, 0)))

    added, other = (op_seconds(op(name)) for name in ("add", "erfinv"))
    assert other == pytest.approx(added, rel=0.2)


def _const(value: int) -> Law:
    return Law((value, 0, 0, 0, 0, 0))


def _chain(num_bytes: int) -> Stream:
    """A product, three operations that memory bounds, and another product."""
    product = Op(name="mm", num_flops=_const(2**30), num_bytes=_const(2**20), dims=(_const(512),) * 3)
    single = [Op(name=name, num_flops=_const(0), num_bytes=_const(num_bytes)) for name in ("mul", "add", "silu")]
    return Stream(ops=(product, *single, product))


def test_a_compiled_chain_is_one_pass_over_memory() -> None:
    options = {"batch": 1, "seq": None, "precision": "bf16", "device": device_of("h200"), "backward": False}
    eager = stream_seconds(_chain(2**30), **options)  # type: ignore[arg-type]
    fused = stream_seconds(_chain(2**30), fuses=True, **options)  # type: ignore[arg-type]
    products = stream_seconds(_chain(1), fuses=True, **options)  # type: ignore[arg-type]
    assert fused.kernel - products.kernel == pytest.approx((eager.kernel - products.kernel) / 3, rel=0.1)
    assert fused.launch < eager.launch


@pytest.mark.parametrize(("backend", "is_faster"), [("inductor", True), ("aot_eager", False)])
def test_only_inductor_makes_kernels_of_chains(backend: str, is_faster: bool) -> None:
    plan = Plan(precision="bf16", micro_batch=2, engine="torch")
    spec = spec_for("llama-3.2-1b", plan)
    eager, compiled = (
        estimate_time(spec, plan=one, cluster=cluster_of("8xh100")) for one in (plan, replace(plan, compile=backend))
    )
    assert eager is not None
    assert compiled is not None
    assert (compiled.step_seconds < 0.95 * eager.step_seconds) == is_faster
    assert is_faster or compiled.step_seconds == eager.step_seconds


@pytest.mark.parametrize(("recompute", "is_faster"), [("none", True), ("full", True), ("selective", False)])
def test_units_that_recompute_selectively_run_uncompiled(recompute: str, is_faster: bool) -> None:
    plan = Plan(precision="bf16", micro_batch=2, recompute=recompute)
    spec = spec_for("llama-3.2-1b", plan)
    eager, compiled = (
        estimate_time(spec, plan=one, cluster=cluster_of("8xh100")) for one in (plan, replace(plan, compile="inductor"))
    )
    assert eager is not None
    assert compiled is not None
    assert (compiled.step_seconds < 0.95 * eager.step_seconds) == is_faster
    assert is_faster or compiled.step_seconds == eager.step_seconds
