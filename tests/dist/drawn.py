"""Modules that nobody thought of, each with placements and a schedule: as hypothesis draws them."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

import hypothesis
from generated import Layer, make
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.program.units import unit_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A module, and all of a plan but its strategy."""

    layers: tuple[Layer, ...]
    overrides: dict[str, str]
    units: str
    prefetch: int
    reduces_in_flight: int
    bucket_bytes: int
    piece_bytes: int | None
    recompute: str

    def plan(self, strategy: str, *, precision: str = "fp32") -> Plan:
        """The plan; overrides that match no unit of the module are left out, since they would be refused."""
        names = list(unit_modules(make(self.layers)[0], policy=self.units))
        return Plan(
            strategy=strategy,
            precision=precision,
            overrides={p: s for p, s in self.overrides.items() if any(fnmatchcase(name, p) for name in names)},
            units=self.units,
            prefetch=self.prefetch,
            reduces_in_flight=self.reduces_in_flight,
            bucket_bytes=self.bucket_bytes,
            piece_bytes=self.piece_bytes,
            recompute=self.recompute,
            # The same block may be called more often than in the first step, by one rank alone.
            dynamic=any(layer.branch for layer in self.layers),
        )


_leaves = st.builds(
    Layer,
    hidden=st.sampled_from([1, 2, 3, 7, 33]),
    norm=st.booleans(),
    residual=st.booleans(),
    again=st.booleans(),
)
_layers = st.builds(
    Layer,
    hidden=st.sampled_from([1, 3, 40]),
    norm=st.booleans(),
    residual=st.booleans(),
    inside=st.lists(_leaves, max_size=2).map(tuple),
    again=st.booleans(),
    branch=st.booleans(),
    skip=st.booleans(),
    frozen=st.sampled_from(["", "", "up", "down", "up down"]),
)
modules = st.builds(
    Drawn,
    layers=st.lists(_layers, min_size=1, max_size=4).map(tuple),
    overrides=st.dictionaries(
        st.sampled_from(["(root)", "blocks.0*", "*.inside.*", "blocks.?"]), st.sampled_from(list(STRATEGIES))
    ),
    units=st.sampled_from(["auto", "class:Block", "leaf", "none", "min-params:20"]),
    prefetch=st.integers(0, 3),
    reduces_in_flight=st.integers(1, 2),
    bucket_bytes=st.sampled_from([1, 500, 10**6]),
    piece_bytes=st.sampled_from([None, 100, 1000]),
    recompute=st.sampled_from(["none", "none", "full", "selective"]),
)


def drawn_modules(count: int, *, seed: int) -> list[Drawn]:
    """So many modules; the same seed draws the same."""
    found: list[Drawn] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(modules)
    def collect(module: Drawn) -> None:
        found.append(module)

    collect()
    return found
