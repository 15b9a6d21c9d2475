"""The speed of host memory as a device uses it: copies over their link, and updates by the CPU. No torch here."""

from dataclasses import asdict, dataclass
from typing import Any

from shardwise.base.files.form import Form
from shardwise.base.files.keys import key, object_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemorySpeed:
    """Measured by one process, which uses the link alone."""

    copy_bytes_per_s: float = key(..., "copies between pinned memory and the device, in one direction", least=1.0)
    both_bytes_per_s: float = key(..., "each direction of copies in both at once", least=1.0)
    updates_per_s: float = key(..., "elements that the CPU updates by AdamW and casts to the compute dtype", least=1.0)

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    def over(self, share: float) -> "HostMemorySpeed":
        """Return the speed over a link that has this share of the bandwidth."""
        return HostMemorySpeed(
            copy_bytes_per_s=share * self.copy_bytes_per_s,
            both_bytes_per_s=share * self.both_bytes_per_s,
            updates_per_s=self.updates_per_s,
        )


HOST_MEMORY_SPEED: Form = object_of(HostMemorySpeed)
"""Its form in a file."""
