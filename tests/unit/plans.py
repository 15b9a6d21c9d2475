"""Plans for property tests: all that can be, and files that are wrong in one place."""

from typing import Any

from hypothesis import strategies as st

from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh

patterns = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
placements = st.one_of(st.sampled_from(list(STRATEGIES)), st.sampled_from(list(STRATEGIES.values())))

_plans = st.builds(
    Plan,
    strategy=st.sampled_from(list(STRATEGIES)),
    overrides=st.dictionaries(patterns, placements, max_size=4),
    units=st.sampled_from(["auto", "leaf", "none", "class:Block", "min-params:1000", "auto + head"]),
    mesh=st.none() | st.builds(Mesh, replicate=st.integers(1, 64), shard=st.integers(1, 64)),
    micro_batch=st.none() | st.integers(1, 4096),
    accumulate=st.integers(1, 64),
    accumulate_reduced=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    keep_fp32=st.lists(patterns, max_size=3),
    reduce_dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    recompute=st.sampled_from(["none", "full", "selective"]),
    recompute_overrides=st.dictionaries(patterns, st.sampled_from(["none", "full", "selective"]), max_size=3),
    prefetch=st.integers(0, 8),
    reduces_in_flight=st.integers(1, 8),
    bucket_bytes=st.integers(1, 2**40),
    piece_bytes=st.none() | st.integers(0, 2**40),
    compile=st.sampled_from(["none", "inductor", "aot_eager", "auto"]),
    capture=st.sampled_from(["auto", "off", False]),
    uncaptured=st.lists(patterns, max_size=2),
    tile=st.dictionaries(patterns, st.integers(1, 2**20), max_size=2),
    engine=st.sampled_from(["shardwise", "torch"]),
    collectives=st.just("backend"),
)

_fp8_plans = st.builds(
    Plan,
    precision=st.just("fp8"),
    fp8_recipe=st.sampled_from(["tensorwise", "rowwise"]),
    fp8_min_features=st.integers(1, 4096),
    keep_bf16=st.lists(patterns, max_size=3),
)

_native_plans = st.builds(
    Plan,
    precision=st.just("native"),
    offload_activations=st.booleans(),
    offload_states=st.booleans(),
    dynamic=st.booleans(),
)
plans = _plans | _native_plans | _fp8_plans

_MISTAKES: list[tuple[str, str]] = [
    ("strategy", '"fsdp3"'),
    ("strategy", "3"),
    ("micro_batch", "0"),
    ("micro_batch", "-8"),
    ("micro_batch", '"8"'),
    ("micro_batch", "8.0"),
    ("micro_batch", "true"),
    ("micro_batch", "99999999999999999999999"),
    ("accumulate", "0"),
    ("accumulate", "[1]"),
    ("precision", '"fp4"'),
    ("precision", '"fp8"\nreduce_dtype = "fp16"'),
    ("keep_bf16", '["head"]'),
    ("fp8_recipe", '"blockwise"'),
    ("fp8_min_features", "0"),
    ("precision", "32"),
    ("reduce_dtype", '"native"'),
    ("recompute", "true"),
    ("recompute", '"all"'),
    ("prefetch", "-1"),
    ("prefetch", "1979-05-27"),
    ("reduces_in_flight", "0"),
    ("bucket_bytes", "0"),
    ("bucket_bytes", "nan"),
    ("piece_bytes", "-1"),
    ("capture", '"yes"'),
    ("compile", "true"),
    ("compile", '"cudagraphs"'),
    ("accumulate_reduced", "1"),
    ("offload_states", '"cpu"'),
    ("keep_fp32", '"head"'),
    ("keep_fp32", "[1]"),
    ("keep_fp32", '[""]'),
    ("recompute_overrides", '"full"'),
    ("recompute_overrides", '{"blocks.0" = "some"}'),
    ("recompute_overrides", '{"" = "full"}'),
    ("capture", "1"),
    ("tile", "8192"),
    ("tile", '{"*.mlp" = 0}'),
    ("tile", '{"*.mlp" = "8192"}'),
    ("uncaptured", '"blocks.0"'),
    ("capture", '"on"'),
    ("engine", '"deepspeed"'),
    ("engine", "{}"),
    ("collectives", '"tree"'),
    ("units", '"block"'),
    ("units", '"min-params:0"'),
    ("units", "7"),
    ("mesh", "8"),
    ("mesh", "[2, 4]"),
    ("mesh", "{replicate = 0}"),
    ("mesh", "{shard = 2.5}"),
    ("mesh", "{rows = 2}"),
    ("overrides", '"ddp"'),
    ("overrides", '{"blocks.0" = "zero4"}'),
    ("overrides", '{"blocks.0" = 1}'),
    ("overrides", '{"" = "ddp"}'),
    ("overrides", '{"a\\nb" = "ddp"}'),
    ("overrides", '{"a" = {params = "sharded"}}'),
    ("overrides", '{"a" = {params = "sharded", grads = "replicated", optim = "sharded"}}'),
    ("overrides", '{"a" = {params = "replicated", grads = "sharded", optim = "replicated"}}'),
    ("overrides", '{"a" = {params = "split", grads = "sharded", optim = "sharded"}}'),
    (
        "overrides",
        '{"a" = {params = "sharded", grads = "sharded", optim = "sharded", reshard_after_forward = 1}}',
    ),
    (
        "overrides",
        '{"a" = {params = "replicated", grads = "sharded", optim = "sharded", reshard_after_forward = true}}',
    ),
    ("overrides", '{"a" = {params = "sharded", grads = "sharded", optim = "sharded", free = true}}'),
    ("stratgy", '"fsdp"'),
    ("world_size", "8"),
    ('"two words"', "1"),
    ('"line\\nbreak"', "1"),
    ("offload_states", 'true\nengine = "torch"'),
    ("dynamic", 'true\nengine = "torch"'),
    ("offload_activations", 'true\nengine = "torch"'),
    ("keep_fp32", '["head"]\nprecision = "native"'),
    ("collectives", '"ring"\nengine = "torch"'),
    # Not TOML at all.
    ("precision", ""),
    ("precision", "bf16"),
    ("precision", '"bf16'),
    ("precision", '"bf16" "fp16"'),
    ("precision", '"bf16"\nprecision = "bf16"'),
    ("prefetch", "0x"),
    ("[mesh", "2"),
    ("mesh", "[" * 3000),
]


def bad_plan_files(count: int) -> list[tuple[str, bytes]]:
    """(what is wrong, the file): every mistake alone, then each among right keys, then bytes cut or spoiled."""
    right: list[dict[str, Any]] = [
        {"reduce_dtype": '"fp32"'},
        {"prefetch": "2", "recompute": '"full"'},
        {"strategy": '"zero2"', "micro_batch": "4"},
        {"engine": '"shardwise"', "bucket_bytes": "1024", "accumulate": "2"},
    ]
    files: list[tuple[str, bytes]] = [
        ("not utf-8", b'strategy = "fs\xff\xfe"'),
        ("binary", bytes(range(256))),
        ("a NUL", b'strategy = "fsdp"\0'),
    ]
    for lines in [{}, *right]:
        for key, value in _MISTAKES:
            head = "".join(f"{name} = {text}\n" for name, text in lines.items() if name != key and name not in value)
            files.append((f"{key} = {value[:40]}", f"{head}{key} = {value}\n".encode()))
    assert len(files) >= count
    return files[:count]
