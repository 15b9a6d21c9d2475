"""A trace holds every storage and every operation of a step, and costs the same for a hundred equal blocks as for five."""

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from whole import whole

from shardwise.base.errors import InvalidModel
from shardwise.models.own.llama import Llama
from shardwise.models.shapes import GPTShape, LlamaShape
from shardwise.models.specs.ship import make_ready_spec
from shardwise.models.specs.spec_store import ready_spec
from shardwise.models.tasks import Task, cross_entropy, cross_entropy_of_tokens, token_task
from shardwise.models.trace.observe import Way
from shardwise.models.trace.trace import trace_model
from shardwise.program.spec import ROOT, ModelSpec
from shardwise.program.spec.step import Act, StepTrace, What

GPT = GPTShape(num_layers=6, width=64, num_heads=4, vocab_size=256, max_seq=32)


@cache
def traced(shape: GPTShape | LlamaShape, *ways: Way) -> ModelSpec:
    task = token_task(shape, device="meta")
    return trace_model(task.model, loss=task.loss, make_batch=task.make_batch, name="model", ways=ways or (Way(),))


def balance(trace: StepTrace) -> int:
    """Bytes of two samples that are alive at the end, gradients left out."""
    alive = 0
    for row in trace.expand():
        for event in row.stream.events:
            if event.what in (What.ACTIVATION, What.WEIGHT_COPY):
                size = event.num_bytes.at(batch=2)
                alive += size if event.act is Act.BORN else -size
    return alive


def saved(trace: StepTrace, *, unit: str = "blocks.1") -> int:
    """Bytes a sample that a unit's forward leaves behind."""
    events = [e for row in trace.rows if row.unit == unit and "forward" in row.trigger for e in row.stream.events]
    return sum(e.num_bytes.line().per_sample * (1 if e.act is Act.BORN else -1) for e in events)


@pytest.mark.parametrize(
    ("computes_in", "recompute"),
    [
        *(("fp32", "none"), ("bf16", "none"), ("bf16", "full"), ("bf16", "selective")),
        *whole(("fp32", "full"), ("fp32", "selective")),
    ],
)
def test_all_that_is_born_dies(computes_in: str, recompute: str) -> None:
    (trace,) = traced(GPT, Way(computes_in=computes_in, recompute=recompute)).traces
    # The loss itself is the caller's, and dies with the step.
    assert abs(balance(trace)) <= 8


def test_gradients_are_born_once_a_parameter() -> None:
    spec = traced(GPT)
    (trace,) = spec.traces
    born = {}
    for row in trace.expand():
        for event in row.stream.events:
            if event.what is What.GRADIENT and event.act is Act.BORN:
                owner = event.owner or row.unit
                born[owner] = born.get(owner, 0) + event.num_bytes.at(batch=2)
    assert born == {unit.name: 2 * unit.num_params for unit in spec.units}


class WithNothing(nn.Module):
    """One of its parameters has no elements, and is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.nothing = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x @ self.weight, self.nothing])


def test_a_parameter_without_elements_can_be_traced() -> None:
    spec = trace_model(
        WithNothing(), loss=lambda model, x: model(x).sum(), make_batch=lambda size: torch.ones(size, 4), name="model"
    )
    assert balance(spec.traces[0]) == 0


class KeepsItsInput(nn.Module):
    """What the root bears first dies after its last block, as Hugging Face's models keep their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embed(x)
        hidden = embedded + 1
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * 2


def test_what_the_root_bore_is_named_where_it_dies_in_a_row_of_the_last_block() -> None:
    spec = trace_model(
        KeepsItsInput(),
        loss=lambda model, x: model(x).sum(),
        make_batch=lambda size: torch.ones(size, 4),
        name="model",
        policy="class:Sequential",
    )
    (trace,) = spec.traces
    named = {(row.trigger, row.unit) for row in trace.rows for event in row.stream.events if event.owner == ROOT}
    assert ("after forward", "blocks.5") in named
    assert not any(unit in ("blocks.1", "blocks.2", "blocks.3", "blocks.4") for _, unit in named)
    assert abs(balance(trace)) <= 8


def test_what_a_block_saves_is_what_the_formula_says() -> None:
    """A token, in widths: a norm's output, q, k and v, attention's output, the stream after it, the other norm's
    output, 4 + 4 inside, and the stream again. And in fp32 two numbers for each norm, and one per head.
    """
    (trace,) = traced(GPT).traces
    widths = 1 + 3 + 1 + 1 + 1 + (4 + 4) + 1
    assert saved(trace) == GPT.max_seq * (2 * GPT.width * widths + 4 * (2 + 2) + 4 * GPT.num_heads)


def test_recomputation_saves_less_and_computes_more() -> None:
    none, full, selective = (traced(GPT, Way(recompute=how)).traces[0] for how in ("none", "full", "selective"))
    assert saved(full) == GPT.max_seq * GPT.width * 2
    assert saved(full) < saved(selective) < saved(none)
    flops = [
        sum(op.num_flops.at(batch=1) for row in trace.expand() for op in row.stream.ops)
        for trace in (none, selective, full)
    ]
    assert flops[0] == flops[1] < flops[2] < 1.5 * flops[0]


def test_a_model_that_recomputes_its_blocks_itself_gives_the_trace_of_the_plan_that_does() -> None:
    shape = LlamaShape(num_layers=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=128, vocab_size=256, max_seq=32)
    task = token_task(shape, device="meta")
    by_plan, by_itself = (_operations(task, way) for way in (Way(recompute="full"), Way()))
    assert by_itself != by_plan
    assert isinstance(task.model, Llama)
    for block in task.model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert _operations(task, Way()) == by_plan


def _operations(task: Task, way: Way) -> list[tuple[str, str, str]]:
    spec = trace_model(task.model, loss=task.loss, make_batch=task.make_batch, name="model", ways=(way,))
    return [(row.trigger, row.unit, op.name) for row in spec.traces[0].expand() for op in row.stream.ops]


def test_the_flops_of_a_step_are_six_a_parameter_and_token() -> None:
    spec = traced(GPT)
    (trace,) = spec.traces
    products = sum(
        op.num_flops.at(batch=1) for row in trace.expand() for op in row.stream.ops if op.name in ("mm", "addmm")
    )
    in_blocks = sum(param.num_elements for unit in spec.units for param in unit.params if len(param.shape) == 2)
    # Positions are looked up, not multiplied; the embedding is multiplied as the head that it is tied to.
    multiplied = in_blocks - GPT.max_seq * GPT.width
    assert products == 6 * multiplied * GPT.max_seq


@pytest.mark.parametrize(("loss_of", "times"), [(cross_entropy, 3 - 1 / 2), (cross_entropy_of_tokens, 3 / 4)])
def test_the_usual_loss_has_the_logits_in_fp32_three_times_at_once_and_the_lean_one_three_quarters(
    loss_of: Callable[..., Tensor], times: float
) -> None:
    """Softmax for backward, its gradient, and the logits' own: the spike that often is the peak."""
    task = token_task(GPT, device="meta")
    spec = trace_model(task.model, loss=loss_of, make_batch=task.make_batch, name="model", ways=(Way(),))
    (trace,) = spec.traces
    (loss,) = [row for row in trace.rows if row.trigger == "after forward" and row.unit == ROOT]
    logits = GPT.max_seq * GPT.vocab_size * 4
    heights, height = [], 0
    for event in loss.stream.events:
        height += event.num_bytes.line().per_sample * (1 if event.act is Act.BORN else -1)
        heights.append(height)
    assert max(heights) == pytest.approx(times * logits, rel=0.05)


def test_a_hundred_blocks_give_the_trace_of_five() -> None:
    specs = [traced(GPTShape(num_layers=n, width=64, num_heads=4, vocab_size=256, max_seq=32)) for n in (5, 100)]
    few, many = (spec.traces[0] for spec in specs)
    assert [row.stream for row in few.rows] == [row.stream for row in many.rows]
    assert len(specs[1].call_order) == 101


def test_a_cut_trace_is_the_whole_one() -> None:
    """The trace of six blocks, of which four ran, against one of which all did, because they are told apart."""
    task = token_task(GPT, device="meta")
    cut = trace_model(task.model, loss=task.loss, make_batch=task.make_batch, ways=[Way()])
    for index, block in enumerate(task.model.blocks):  # type: ignore[arg-type]
        block.unlike = index
    whole = trace_model(task.model, loss=task.loss, make_batch=task.make_batch, ways=[Way()])
    assert len(cut.traces[0].runs) == 1
    assert whole.traces[0].runs == ()
    assert list(cut.traces[0].expand()) == list(whole.traces[0].expand())
    assert cut.call_order == whole.call_order


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    before = dict(model.named_parameters()), [dict(vars(module)) for module in model.modules()]
    trace_model(model, loss=lambda m, x: m(x).sum(), make_batch=lambda n: torch.ones(n, 3), ways=[Way()])
    assert all(model.get_parameter(name) is parameter for name, parameter in before[0].items())
    assert [dict(vars(module)) for module in model.modules()] == before[1]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attention_makes_no_square_matrix_on_a_gpu() -> None:
    shape = LlamaShape(num_layers=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=96, vocab_size=64, max_seq=512)
    (trace,) = traced(shape).traces
    names = {op.name for row in trace.rows for op in row.stream.ops}
    assert {"_scaled_dot_product_flash_attention", "_fused_rms_norm"} <= names
    square = shape.num_heads * shape.max_seq**2 * 2
    assert all(e.num_bytes.line().per_sample < square for row in trace.rows for e in row.stream.events)


SHARED_KEYS = LlamaShape(num_layers=6, width=64, num_heads=4, num_kv_heads=2, ffn_width=96, vocab_size=64, max_seq=32)


@pytest.mark.parametrize("shape", [GPT, SHARED_KEYS], ids=["keys of its own", "shared keys"])
def test_causal_attention_counts_the_half_that_is_computed(shape: GPTShape | LlamaShape) -> None:
    """4 · S² · D operations a head for all of it, 10 in backward; its sizes are heads, queries, keys and a head's width."""
    (trace,) = traced(shape).traces
    ops = [op for row in trace.rows if row.unit == "blocks.1" for op in row.stream.ops]
    seq, heads, width = shape.max_seq, shape.num_heads, shape.width // shape.num_heads
    for name, times in (("flash_attention", 4), ("flash_attention_backward", 10)):
        (op,) = [op for op in ops if op.name.endswith(name)]
        assert op.num_flops.at(batch=2) == 2 * heads * times * seq**2 * width // 2
        assert [dim.at(batch=2) for dim in op.dims] == [2 * heads, seq, seq, width]


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y @ y.T


class Branching(Quadratic):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if y.sum() > 0 else -y


class Uneven(Quadratic):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return F.relu(y) if len(x) % 2 else y


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Quadratic(), "does not grow in proportion to the batch"),
        (Branching(), "aten._local_scalar_dense.default depends on the data"),
        (Uneven(), "runs other operations for another batch size"),
    ],
)
def test_what_cannot_be_traced_is_one_line(model: nn.Module, message: str) -> None:
    with pytest.raises(InvalidModel, match=message) as caught:
        trace_model(model, loss=lambda m, x: m(x).sum(), make_batch=lambda n: torch.ones(n, 4), ways=[Way()])
    assert "\n" not in str(caught.value)


class Layouts(nn.Module):
    """One operation on operands that lie alike, and three on others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        alike = x * x
        turned = alike.transpose(1, 2)
        broadcast = turned * x[:, :1].transpose(1, 2)
        halves = torch.cat((broadcast[..., 2:], broadcast[..., :2]), -1)
        return halves + turned


def test_elementwise_operations_on_operands_that_do_not_lie_alike_are_marked_with_their_elements() -> None:
    model = Layouts()
    spec = trace_model(
        model, loss=lambda m, x: m(x * m.weight[0]).sum(), make_batch=lambda n: torch.ones(n, 4, 16), ways=[Way()]
    )
    marked = [
        (op.name, [dim.at(batch=3) for dim in op.dims])
        for row in spec.traces[0].rows
        for op in row.stream.ops
        if row.trigger == "before forward" and op.name in ("mul", "cat", "add")
    ]
    elements = [3 * 4 * 16]
    assert marked == [("mul", elements), ("mul", []), ("mul", elements), ("cat", elements), ("add", elements)]


@pytest.mark.parametrize("recompute", ["full", pytest.param("compiled", marks=pytest.mark.whole)])
def test_the_shipped_specs_are_what_a_trace_gives_now(recompute: str) -> None:
    way = Way(computes_in="bf16", recompute=recompute)
    shipped = ready_spec("gpt-tiny", ways={("bf16", recompute)})
    assert make_ready_spec("gpt-tiny", ways=(way,)) == shipped


def test_laws_in_the_length_hold_for_other_lengths() -> None:
    shipped = ready_spec("gpt-tiny", ways={("bf16", "none")})
    task = token_task(
        GPTShape(num_layers=4, width=128, num_heads=4, vocab_size=256, max_seq=128), seq=96, device="meta"
    )
    spec = trace_model(task.model, loss=task.loss, make_batch=task.make_batch, name="gpt-tiny", ways=[Way()])
    assert shipped is not None
    for mine, theirs in zip(spec.traces[0].expand(), shipped.traces[0].expand(), strict=True):
        sizes = [event.num_bytes.at(batch=3) for event in mine.stream.events]
        assert sizes == [event.num_bytes.at(batch=3, seq=96) for event in theirs.stream.events]


def test_products_of_experts_are_counted_by_the_tokens_that_each_gets() -> None:
    transformers = pytest.importorskip("transformers")
    from shardwise.models.tasks.transformers_task import task_of_model
    from shardwise.models.transformers_model import model_of_config

    config = transformers.AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=128, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        task = task_of_model(model_of_config(config), seq=64)
    spec = trace_model(task.model, loss=task.loss, make_batch=task.make_batch, name="moe", ways=[Way()])
    products = [
        op
        for row in spec.traces[0].rows
        for op in row.stream.ops
        # Up to transformers 5.18 the angles of rotary embeddings are a batched product too, of one position per token.
        if op.name == "bmm" and op.dims[0].at(batch=2, seq=None) == config.num_experts
    ]
    # 2 × 64 tokens, each to 2 of 8 experts: 32 rows per expert, through gate and up together, and down.
    rows, flops = 32, {2 * 8 * 32 * 64 * 64, 2 * 8 * 32 * 32 * 64}
    assert {op.num_flops.at(batch=2, seq=None) for op in products} == flops
    assert all(rows in [dim.at(batch=2, seq=None) for dim in op.dims] for op in products)
    # Forward, and for backward the gradients of inputs and of weights.
    assert len(products) == 6
