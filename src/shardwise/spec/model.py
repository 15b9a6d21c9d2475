"""A model as the planner and the step program see it: units, what they hold, and the order they run in."""

from dataclasses import dataclass

from shardwise.errors import InvalidModel
from shardwise.spec.tensor import TensorSpec

ROOT = "(root)"
"""The name of the unit that holds what no other unit covers; no module path looks like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """Modules that are communicated together. The name is the module's own path, or `(root)`."""

    name: str
    class_name: str
    params: tuple[TensorSpec, ...] = ()
    buffers: tuple[TensorSpec, ...] = ()

    @property
    def num_params(self) -> int:
        return sum(param.num_elements for param in self.params)

    @property
    def param_bytes(self) -> int:
        return sum(param.num_bytes for param in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The units of a model, the root first, and the order in which one forward calls them.

    Invariants, checked here: names are unique; the root is there; every parameter and buffer is
    in exactly one unit; the call order names units. A unit that is called twice is listed twice.
    """

    name: str
    units: tuple[UnitSpec, ...]
    call_order: tuple[str, ...]

    def __post_init__(self) -> None:
        names = [unit.name for unit in self.units]
        if not names or names[0] != ROOT:
            raise InvalidModel(f"{self.name}: the first unit must be {ROOT}")
        if len(set(names)) != len(names):
            raise InvalidModel(f"{self.name}: two units have one name")
        seen: set[str] = set()
        for unit in self.units:
            for tensor in (*unit.params, *unit.buffers):
                for path in (tensor.name, *tensor.aliases):
                    if path in seen:
                        raise InvalidModel(f"{self.name}: {path} is in two units")
                    seen.add(path)
        for name in self.call_order:
            if name not in names:
                raise InvalidModel(f"{self.name}: the call order names {name}, which is no unit")

    @property
    def num_params(self) -> int:
        return sum(unit.num_params for unit in self.units)

    @property
    def param_bytes(self) -> int:
        return sum(unit.param_bytes for unit in self.units)

    def unit(self, name: str) -> UnitSpec:
        """The unit of that name."""
        for unit in self.units:
            if unit.name == name:
                return unit
        raise KeyError(name)
