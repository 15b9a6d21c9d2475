"""nn.Module → units: cut a model by a policy, and find the unit of each parameter.

Two rules make this exact. A unit's module covers all modules below it, except those that deeper
units cover. A parameter that several modules share belongs to the lowest unit that covers all of
them, because only that unit's forward encloses every use.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from shardwise.base.errors import InvalidModel
from shardwise.base.torch_internals.torch_private import BatchNorm
from shardwise.plan.patterns import Cut, UnitPolicy
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec, UnitSpec
from shardwise.program.spec.model import LARGE_ROOT_LAYER
from shardwise.program.units.scripted import class_name, is_scripted, scripted_around

_STACKS = (nn.ModuleList, nn.Sequential)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

LARGE_LAYER = 2**18
"""Least number of parameters of a layer in a stack that `auto` makes a unit: 512 × 512. Gathering less costs mostly
latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutModel:
    """A model cut into units: its spec, whose call order is that of registration, and the module of each unit."""

    spec: ModelSpec
    modules: Mapping[str, nn.Module]


def cut_model(model: nn.Module, *, policy: UnitPolicy | str = "auto", name: str | None = None) -> CutModel:
    """Cut a model, which may be on the meta device, into units."""
    modules = unit_modules(model, policy=policy)
    owners = _owners(model, modules=modules)
    from_root = units_from_root(model, policy=policy)
    units = tuple(
        UnitSpec(
            name=unit,
            class_name=type(module).__name__,
            from_root=unit in from_root,
            params=tuple(
                replace(tensor, linear=False) if unit in from_root else tensor
                for owner, is_buffer, tensor in owners
                if owner == unit and not is_buffer
            ),
            buffers=tuple(tensor for owner, is_buffer, tensor in owners if owner == unit and is_buffer),
        )
        for unit, module in modules.items()
    )
    spec = ModelSpec(name=name or type(model).__name__, units=units, call_order=tuple(modules))
    return CutModel(spec=spec, modules=modules)


def model_spec(model: nn.Module, *, policy: UnitPolicy | str = "auto", name: str | None = None) -> ModelSpec:
    """Return the spec of a model, which may be on the meta device; its call order is that of registration."""
    return cut_model(model, policy=policy, name=name).spec


def unit_modules(model: nn.Module, *, policy: UnitPolicy | str = "auto") -> dict[str, nn.Module]:
    """Return unit name → module, the root first, then in registration order; the first of several names counts."""
    if isinstance(policy, str):
        policy = UnitPolicy.parse(policy)
    chosen = _RULES[policy.cut](model, policy)
    chosen.update(_named(model, policy=policy))
    chosen.discard("")
    modules = dict(model.named_modules())
    named = {path: module for path, module in modules.items() if path in chosen}
    for path, module in named.items():
        outer = scripted_around(path, modules=modules)
        if outer is not None:
            raise InvalidModel(
                f"units: {path} lies inside {outer or 'the model'}, which torch.jit compiled and which calls it "
                "without hooks: name that one or a module around it, or prepare the model as it was before torch.jit"
            )
        if isinstance(module, _CONTAINERS) and not isinstance(module, nn.Sequential):
            raise InvalidModel(f"{path} is a {type(module).__name__}, which has no forward: name its children")
    return {ROOT: model, **named}


def units_from_root(model: nn.Module, *, policy: UnitPolicy | str) -> set[str]:
    """Return the units that `auto` has taken out of the root (UnitSpec.from_root), and nobody has named."""
    if isinstance(policy, str):
        policy = UnitPolicy.parse(policy)
    if policy.cut is not Cut.AUTO:
        return set()
    return _large_root_layers(model, units=_blocks(model, policy)) - set(policy.modules)


def called_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose call is a forward of this one: itself, or the models in a ModuleDict or ModuleList.

    A module that lies inside another of them is called by that one, and does not count.
    """
    if not isinstance(module, nn.ModuleDict | nn.ModuleList):
        return [module]
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        return [module]
    models = list(module.children())
    inside = {id(part) for model in models for part in model.modules() if part is not model}
    return [model for model in models if id(model) not in inside]


def _auto(model: nn.Module, policy: UnitPolicy) -> set[str]:
    blocks = _blocks(model, policy)
    return blocks | _large_root_layers(model, units=blocks)


def _large_root_layers(model: nn.Module, *, units: set[str]) -> set[str]:
    """Choose large embeddings and linear layers outside of these units that share their weight with no other module."""
    own = _untied_sizes(model)
    return {
        path
        for path, module in _called(model)
        if path
        and (isinstance(module, nn.Embedding) or is_plain_linear(module))
        and sum(own[id(parameter)] for parameter in module.parameters()) >= LARGE_ROOT_LAYER
        and not any(path == unit or path.startswith(unit + ".") for unit in units)
    }


def _blocks(model: nn.Module, policy: UnitPolicy) -> set[str]:
    """Choose repeated blocks; where most of the model is outside of them, large layers of its stacks as well."""
    blocks = _repeated_blocks(model)
    own = _untied_sizes(model)
    sizes = {path: sum(own[id(p)] for p in module.parameters()) for path, module in model.named_modules()}
    in_blocks = sum(sizes.get(path, 0) for path in blocks)
    if 2 * in_blocks >= sizes[""]:
        return blocks
    return blocks | _large_layers(model, sizes=sizes, blocks=blocks)


def _repeated_blocks(model: nn.Module) -> set[str]:
    """Choose the outermost modules in stacks whose class occurs at least twice in stacks.

    A block has parts of its own: a Linear in a Sequential is not one, nor is a stack in a stack.
    """
    blocks = {
        path: child
        for path, child in _stacked(model)
        if any(True for _ in child.children())
        and not isinstance(child, _CONTAINERS)
        and any(True for _ in child.parameters())
    }
    classes = [type(block) for block in blocks.values()]
    return _outermost({path for path, block in blocks.items() if classes.count(type(block)) > 1})


def _large_layers(model: nn.Module, *, sizes: dict[str, int], blocks: set[str]) -> set[str]:
    """Choose the outermost modules in stacks with at least LARGE_LAYER parameters, outside of blocks.

    A module with most of the model is left out in favour of the large modules inside it.
    """
    large = {
        path
        for path, child in _stacked(model)
        if sizes.get(path, 0) >= LARGE_LAYER
        and not isinstance(child, _CONTAINERS)
        and not any(path == block or path.startswith(block + ".") or block.startswith(path + ".") for block in blocks)
    }
    for path in sorted(large):
        if 2 * sizes[path] > sizes[""] and any(other.startswith(path + ".") for other in large):
            large.discard(path)
    return _outermost(large)


def _stacked(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of each module directly in a ModuleList or Sequential."""
    for path, stack in _called(model):
        if isinstance(stack, _STACKS):
            for key, child in stack.named_children():
                yield f"{path}.{key}" if path else key, child


def _outermost(paths: set[str]) -> set[str]:
    return {path for path in paths if not any(path.startswith(outer + ".") for outer in paths)}


def _untied_sizes(model: nn.Module) -> dict[int, int]:
    """Return parameter id → elements that it adds to its module's unit: none if several modules share it."""
    holders = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {id(p): p.numel() if holders[id(p)] == 1 else 0 for p in model.parameters()}


def _classes(model: nn.Module, policy: UnitPolicy) -> set[str]:
    found = {
        path: class_name(module) for path, module in model.named_modules() if class_name(module) in policy.class_names
    }
    for wanted in policy.class_names:
        if wanted not in found.values():
            there = sorted({class_name(module) for module in model.modules() if any(module.children())})
            raise InvalidModel(f"units = '{policy}': the model has no {wanted}; its modules are {', '.join(there)}")
    return set(found)


def _min_params(model: nn.Module, policy: UnitPolicy) -> set[str]:
    """Choose the deepest modules that still hold enough parameters outside of deeper units."""
    chosen: set[str] = set()
    counted: set[int] = set()

    def visit(module: nn.Module, path: str) -> int:
        own = [p for p in _own_parameters(module) if id(p) not in counted]
        counted.update(map(id, own))
        left = sum(p.numel() for p in own)
        for key, child in _called_children(module):
            left += visit(child, f"{path}.{key}" if path else key)
        if left >= policy.min_params and (not isinstance(module, _CONTAINERS) or isinstance(module, nn.Sequential)):
            chosen.add(path)
            return 0
        return left

    visit(model, "")
    return chosen


def _leaves(model: nn.Module, policy: UnitPolicy) -> set[str]:
    return {path for path, module in _called(model) if any(True for _ in _own_parameters(module))}


def _uncalled(module: nn.Module) -> set[str]:
    """Return the children whose parameters a module computes with, without calling these children."""
    if isinstance(module, nn.MultiheadAttention):
        return {"out_proj"}
    if is_scripted(module):
        return {name for name, _ in module.named_children()}
    return {"parametrizations"} if is_parametrized(module) else set()


def _called_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(key, child) for key, child in module.named_children() if key not in _uncalled(module)]


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield a module's parameters that are in no module that it calls."""
    yield from module.parameters(recurse=False)
    for key in _uncalled(module):
        yield from getattr(module, key).parameters()


def _called(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of the model and of the modules in it that are called, each once."""
    uncalled: set[str] = set()
    for path, module in model.named_modules():
        if not any(path == other or path.startswith(other + ".") for other in uncalled):
            yield path, module
            uncalled |= {f"{path}.{key}" if path else key for key in _uncalled(module)}


_RULES: dict[Cut, Callable[[nn.Module, UnitPolicy], set[str]]] = {
    Cut.AUTO: _auto,
    Cut.BLOCKS: _blocks,
    Cut.CLASSES: _classes,
    Cut.MIN_PARAMS: _min_params,
    Cut.LEAVES: _leaves,
    Cut.NOTHING: lambda model, policy: set(),
}


def _named(model: nn.Module, *, policy: UnitPolicy) -> set[str]:
    paths = [path for path, _ in model.named_modules()]
    for path in policy.modules:
        if path not in paths:
            raise InvalidModel(f"units = '{policy}': the model has no module {path}")
    return set(policy.modules)


def _owners(model: nn.Module, *, modules: dict[str, nn.Module]) -> list[tuple[str, bool, TensorSpec]]:
    """Return (unit, is it a buffer, tensor) for every parameter and buffer, each once, in registration order."""
    unit_at = _unit_paths(model, modules=modules)
    saved = _persistent_buffers(model)
    modules_at = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, tuple[list[str], bool, TensorSpec]] = {}
    for path, tensor, is_buffer in _tensors(model):
        holder = path.rpartition(".")[0]
        if id(tensor) not in found:
            spec = TensorSpec(
                name=path,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                trainable=tensor.requires_grad,
                persistent=not is_buffer or path in saved,
                keep_fp32=isinstance(modules_at[holder], BatchNorm),
                linear=path.endswith("weight") and is_plain_linear(modules_at[holder]),
            )
            found[id(tensor)] = ([holder], is_buffer, spec)
        else:
            holders, _, spec = found[id(tensor)]
            spec = replace(spec, aliases=(*spec.aliases, path), linear=False)
            found[id(tensor)] = ([*holders, holder], is_buffer, spec)
    return [(_lowest_common(holders, unit_at), is_buffer, spec) for holders, is_buffer, spec in found.values()]


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is called for what nn.Linear computes, with a weight of its own."""
    # nn.MultiheadAttention computes with the weight of this class, and does not call it.
    if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    computes_so = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
    return computes_so and "weight" in module._parameters


def _unit_paths(model: nn.Module, *, modules: dict[str, nn.Module]) -> dict[str, str]:
    """Return module path → unit; a module that is registered twice is one unit at two paths."""
    unit_of = {id(module): name for name, module in modules.items()}
    return {
        path: unit_of[id(module)]
        for path, module in model.named_modules(remove_duplicate=False)
        if id(module) in unit_of
    }


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for path, parameter in model.named_parameters(remove_duplicate=False):
        yield path, parameter, False
    for path, buffer in model.named_buffers(remove_duplicate=False):
        yield path, buffer, True


def _persistent_buffers(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name, _ in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }


def _lowest_common(paths: Iterable[str], unit_at: dict[str, str]) -> str:
    """Return the deepest unit at or above all of these module paths."""
    first, *others = (_units_above(path, unit_at) for path in paths)
    return next(unit for unit in first if all(unit in other for other in others))


def _units_above(path: str, unit_at: dict[str, str]) -> list[str]:
    """Return the units at or above a module's path, deepest first; the root is always the last."""
    units = []
    while path:
        if path in unit_at:
            units.append(unit_at[path])
        path = path.rpartition(".")[0]
    return [*units, ROOT]
