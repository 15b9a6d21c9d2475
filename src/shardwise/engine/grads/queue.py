"""The buckets of a program, reduced in its order on every rank, however early or late each is ready."""

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from shardwise.engine.grads.bucket import ReduceBucket
from shardwise.engine.params.unit import Unit
from shardwise.program import Bucket


class ReduceQueue:
    """As program/rules/ours.py has it: at most `in_flight` reductions of sharded gradients are under way at once."""

    def __init__(self, buckets: Iterable[Bucket], *, make: Callable[[Bucket], ReduceBucket], in_flight: int) -> None:
        self.buckets = [make(bucket) for bucket in buckets]
        self.in_flight = in_flight
        self._bucket_of = {unit.name: bucket for bucket in self.buckets for unit in bucket.units}
        self._next = 0
        self._reducing: list[ReduceBucket] = []
        # The one whose slice is on its way over a second axis of the mesh.
        self._crossing: ReduceBucket | None = None

    def begin(self) -> None:
        """A new backward."""
        self._next = 0

    def take(self, unit: Unit, *, reduces: bool) -> None:
        """A unit's gradients are all there; with them perhaps a bucket is complete whose turn it is."""
        bucket = self._bucket_of.get(unit.name)
        if bucket is not None and not unit.closed:
            bucket.take_grads(unit)
        while reduces and self._next < len(self.buckets) and self.buckets[self._next].complete:
            self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self.buckets[self._next]
        bounded = [other for other in self._reducing if other.sharded]
        if bucket.sharded and len(bounded) >= self.in_flight:
            self._finish(bounded[0])
            self._reducing.remove(bounded[0])
        bucket.start()
        self._reducing.append(bucket)
        self._next += 1

    def flush(self) -> None:
        """Backward is over: what is left is reduced, with zeros for what did not come."""
        while self._next < len(self.buckets):
            self._reduce_next()

    def finish(self) -> None:
        """Wait for all that is under way, and hand out the gradients."""
        for bucket in self._reducing:
            self._finish(bucket)
        self._reducing.clear()
        self._finish_slice()

    def _finish(self, bucket: ReduceBucket) -> None:
        """Its slice is sent on before that of the last one is waited for, so that no wire stands idle between."""
        bucket.finish()
        if bucket.crosses:
            bucket.start_slice()
        self._finish_slice()
        self._crossing = bucket if bucket.crosses else None

    def _finish_slice(self) -> None:
        if self._crossing is not None:
            self._crossing.finish_slice()
            self._crossing = None

    def keep(self) -> None:
        """Backward is over: what it gave stays on this rank, for a later one to reduce."""
        for bucket in self.buckets:
            bucket.keep()

    @property
    def holds_grads(self) -> bool:
        """Whether gradients are summed on this rank alone, for a later backward to reduce."""
        return any(bucket.holds for bucket in self.buckets)

    def forget(self, names: AbstractSet[str]) -> None:
        """Clear what is held for the parameters of these names."""
        for bucket in self.buckets:
            bucket.forget(names)

    def drop(self) -> None:
        """Forget what a backward that raised has left under way."""
        for bucket in self.buckets:
            bucket.drop()
        self._reducing.clear()
        self._crossing = None
