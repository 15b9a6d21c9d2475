"""A board on which ranks write their progress for each other: keys in the job's store, on a separate connection.

The connection is separate because a blocked call of the main thread would block every other user of it. A store in a
process that has stopped does not answer at all, so only a thread that may hang can use this.
"""

import json
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from shardwise.base.torch_internals.torch_private import PrefixStore, Store
from shardwise.comm.groups.rank_progress import Standing
from shardwise.comm.watch.stall import Stall

# The collectives that a rank has issued, in order: comparison of ranks → group → names.
History = dict[str, dict[str, list[str]]]


class Noticeboard:
    """One rank's access to the board."""

    def __init__(self, store: Store) -> None:
        # Older torch cannot open a second connection.
        own: Store = store.clone() if hasattr(store, "clone") else store
        self._store = PrefixStore("shardwise/watch", own)
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._num_written = 0

    def write_standing(self, standing: Standing) -> None:
        self._num_written += 1
        self._store.set(f"standing/{self._rank}", json.dumps([self._num_written, asdict(standing)]))

    def read_standings(self) -> dict[int, tuple[int, Standing]]:
        """Return rank → (how often it has written, its last standing), for the other ranks that have written."""
        return {rank: (number, Standing(**fields)) for rank, (number, fields) in self._read("standing").items()}

    def write_history(self, history: History) -> None:
        self._store.set(f"history/{self._rank}", json.dumps(history))

    def read_histories(self) -> dict[int, History]:
        return self._read("history")

    def write_verdict(self, stall: Stall) -> None:
        """Write a verdict, unless there is one already."""
        if self.read_verdict() is None:
            self._store.set("verdict", json.dumps(asdict(stall)))

    def read_verdict(self) -> Stall | None:
        return Stall(**json.loads(self._store.get("verdict"))) if self._store.check(["verdict"]) else None

    def _read(self, topic: str) -> dict[int, Any]:
        keys = {rank: f"{topic}/{rank}" for rank in range(self._num_ranks) if rank != self._rank}
        extended = self._store.has_extended_api()  # type: ignore[attr-defined]
        if extended and self._store.check(list(keys.values())):
            # One request instead of one per rank.
            return dict(zip(keys, map(json.loads, self._store.multi_get(list(keys.values()))), strict=True))
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
