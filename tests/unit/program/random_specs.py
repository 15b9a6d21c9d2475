"""Random models and plans: what a program can be built from."""

from hypothesis import strategies as st

from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, STRATEGIES, Mesh
from shardwise.program.spec import ANNOUNCED, NONE, ROOT, UNANNOUNCED, ModelSpec, TensorSpec, UnitSpec

NAMES = ("a", "b", "c", "a.x", "a.y", "b.x", "a.x.deep", "d", "e")
UNITS = {
    "trainable": ((10, True), (7, True)),
    "large": ((100, True),),
    "frozen": ((10, False),),
    "partly frozen": ((10, False), (3, True)),
    "without parameters": (),
    "with an empty parameter": ((0, True),),
}
"""(number of elements, trainable) of each parameter."""


def make_unit(name: str, kind: str, *, buffered: bool, backward: str) -> UnitSpec:
    params = tuple(
        TensorSpec(name=f"{name}.{index}", shape=(size,), trainable=trainable)
        for index, (size, trainable) in enumerate(UNITS[kind])
    )
    buffer = TensorSpec(name=f"{name}.buffer", shape=(5,), trainable=False)
    buffers = (buffer,) if buffered else ()
    return UnitSpec(name=name, class_name="Block", params=params, buffers=buffers, backward=backward)


@st.composite
def specs(
    draw: st.DrawFn,
    *,
    names: tuple[str, ...] = NAMES,
    repeats: bool = True,
    repeated_root: bool = False,
) -> ModelSpec:
    """Some of the names are units, and some of the units are called, in any order, again and again.

    A root that is called again stands for two forwards before one backward.
    """
    chosen = draw(st.lists(st.sampled_from(names), unique=True, min_size=len(names) // 2))
    callable_units = [*chosen, ROOT] if repeated_root else chosen
    calls = draw(st.lists(st.sampled_from(callable_units), unique=not repeats, max_size=10))
    kinds = st.sampled_from(["trainable", *UNITS])
    return ModelSpec(
        name="random",
        units=tuple(
            make_unit(
                name,
                draw(kinds),
                buffered=draw(st.booleans()),
                backward=ANNOUNCED if name == ROOT else draw(st.sampled_from([ANNOUNCED, UNANNOUNCED, NONE])),
            )
            for name in (ROOT, *chosen)
        ),
        call_order=(ROOT, *calls),
    )


@st.composite
def plans(draw: st.DrawFn, *, spec: ModelSpec) -> Plan:
    """Plans of every strategy; most often of one that shards everything, where most can go wrong."""
    sharded = [name for name, placement in STRATEGIES.items() if placement.params is SHARDED]
    strategies = st.sampled_from([*STRATEGIES, *sharded])
    names = st.sampled_from([unit.name for unit in spec.units])
    return Plan(
        strategy=draw(strategies),
        overrides=draw(st.dictionaries(names, strategies, max_size=4)),
        prefetch=draw(st.sampled_from([1, 2, 0, 3, 4])),
        reduces_in_flight=draw(st.integers(1, 3)),
        bucket_bytes=draw(st.sampled_from([1, 100, 400, 25 * 2**20])),
        piece_bytes=draw(st.sampled_from([None, 0, 11, 100])),
        precision=draw(st.sampled_from(["fp32", "bf16", "native"])),
        recompute_overrides=draw(st.dictionaries(names, st.just("full"), max_size=2)),
        mesh=draw(st.sampled_from([None, Mesh(shard=2), Mesh(replicate=2, shard=2), Mesh(replicate=3)])),
    )


def cases(source: st.SearchStrategy[ModelSpec]) -> st.SearchStrategy[tuple[ModelSpec, Plan]]:
    return source.flatmap(lambda spec: st.tuples(st.just(spec), plans(spec=spec)))
