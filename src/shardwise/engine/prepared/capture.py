"""A whole training step as one CUDA graph: forward, backward, collectives and update are launched by one call.

    step = shardwise.capture(step, model, optimizer)     # step(batch) → loss: forward, backward, step, zero_grad
    for batch in batches:
        loss = step(batch)

A few ordinary steps come first: they learn the program, and let libraries allocate what they keep. Then one is
captured, and replayed from there on. A replay runs no Python, so what the step does in Python (branches, counters,
printing) happens no more; shapes are those that were captured, and a batch of others runs as an ordinary step.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.comm.leave import let_go_before_leaving
from shardwise.engine.activations.recompute import without_random_numbers
from shardwise.engine.engine import Engine, engine_of
from shardwise.errors import InvalidModel, InvalidPlan

_WARM_STEPS = 3

Step = TypeVar("Step", bound=Callable[..., Any])


def capture(step: Step, model: nn.Module, optimizer: Optimizer) -> Step:
    """`step` as one CUDA graph where the plan says `capture`; elsewhere `step` itself.

    `step(*inputs)` runs one whole step on tensors of the device, and may return tensors. The optimizer's learning
    rates become tensors on the device, so that a schedule is followed; a change of another option, or a state that is
    loaded, captures anew.
    """
    engine = engine_of(model)
    if not engine.plan.capture:
        return step
    _make_capturable(optimizer, device=engine.device)
    return CapturedStep(step, engine=engine, optimizer=optimizer)  # type: ignore[return-value]


def _make_capturable(optimizer: Optimizer, *, device: torch.device) -> None:
    """An update that is launched without looking at the device: step counters and learning rates lie there."""
    if "capturable" not in optimizer.defaults:
        raise InvalidPlan(
            f"capture = true: {type(optimizer).__name__} cannot be captured; use one that has the option capturable, "
            "such as AdamW, or set capture = false"
        )
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)


class CapturedStep:
    """Calls of a step: first ordinary ones, then replays of a graph."""

    def __init__(self, step: Callable[..., Any], *, engine: Engine, optimizer: Optimizer) -> None:
        self.step = step
        self.engine = engine
        self.optimizer = optimizer
        self.num_steps = 0
        self._stream = torch.cuda.Stream(engine.device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Any] = []
        self._result: Any = None
        self._fixed: list[Any] = []
        let_go_before_leaving(self)

    def let_go(self) -> None:
        """Destroy the graph: it holds communicators, which could not be destroyed before it."""
        if self._graph is not None:
            torch.cuda.synchronize(self.engine.device)
            self._graph.reset()
            self._graph = None

    def __call__(self, *inputs: Any) -> Any:
        if self._graph is not None and self._fixed != self._fixed_now():
            self._graph = None
        self.num_steps += 1
        if self.num_steps <= _WARM_STEPS:
            return self._ordinary(*inputs)
        if self._graph is None:
            self._capture(*inputs)
        leaves, _ = tree_flatten(inputs)
        if [_form(leaf) for leaf in leaves] != [_form(leaf) for leaf in self._inputs]:
            return self._ordinary(*inputs)
        for place, value in zip(self._inputs, leaves, strict=True):
            if isinstance(place, Tensor):
                place.copy_(value, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        # The next replay writes over them.
        return tree_map_only(Tensor, Tensor.clone, self._result)

    def _ordinary(self, *inputs: Any) -> Any:
        """A step on the stream that captures: autograd remembers on which stream it gave a parameter its gradient."""
        generator = torch.cuda.default_generators[self._stream.device_index]
        before = generator.get_offset()
        with self._on_stream():
            result = self.step(*inputs)
        if generator.get_offset() != before and self._recomputes():
            raise InvalidPlan(
                "capture = true with recompute: this step draws random numbers (dropout), and a captured recomputation "
                "cannot draw the same again; set capture = false, recompute = 'none', or dropout to 0"
            )
        return result

    def _capture(self, *inputs: Any) -> None:
        """Record a step; nothing is computed yet."""
        # A state that was loaded has brought numbers along.
        _make_capturable(self.optimizer, device=self.engine.device)
        # What the graph reads lies where its inputs are copied to.
        held = tree_map_only(Tensor, Tensor.clone, inputs)
        # A gather that an earlier update has started is none of the graph's.
        self.engine.runner.wait_gathers()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._stream.device_index]
        random_state = generator.clone_state()
        try:
            # The backend's own threads look at the device meanwhile, and may.
            with (
                without_random_numbers(),
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                self._result = self.step(*held)
                # Nor may one be under way when the graph ends.
                self.engine.runner.wait_gathers()
        except RuntimeError as error:
            # A capture that fails leaves the device's generator waiting for its end: no random number could be drawn.
            generator.graphsafe_set_state(random_state)
            raise InvalidModel(
                f"the step cannot be captured ({' '.join(str(error).split())[:200]}): it must not look at values "
                "(.item(), print, if loss > …) nor leave parameters unused; set capture = false otherwise"
            ) from error
        self._inputs, _ = tree_flatten(held)
        self._fixed = self._fixed_now()
        self._graph = graph

    @contextmanager
    def _on_stream(self) -> Any:
        current = torch.cuda.current_stream(self.engine.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _recomputes(self) -> bool:
        return any(self.engine.plan.recompute_of(name) != "none" for name in self.engine.runner.units)

    def _fixed_now(self) -> list[Any]:
        """What a graph has in it: the options that are numbers, and where the optimizer's state lies."""
        groups = self.optimizer.param_groups
        options = [[item for item in group.items() if not isinstance(item[1], Tensor | list)] for group in groups]
        return [options, [id(state) for state in self.optimizer.state.values()]]


def _form(leaf: Any) -> Any:
    """What must not change from one replay to the next."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
