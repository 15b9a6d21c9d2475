"""Values that are written outside of a step: every copy follows."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.engine.core.core import Core
from shardwise.engine.core.flat import refresh
from shardwise.engine.core.step_events import announce
from shardwise.program.rules.demand import edited, released


@contextmanager
def editing(core: Core) -> Iterator[None]:
    """Let every copy on every rank follow what is written into owned slices in here. Collective."""
    core.wait_gathers()
    announce(core.setting.events.values_read, False)
    yield
    announce(core.setting.events.values_read, True)
    distribute(core)


@torch.no_grad()
def distribute(core: Core) -> None:
    """Owned slices have new values: every copy follows. Collective.

    A backward through an earlier forward is torch's error, as after an update.
    """
    announce(core.setting.events.values_replaced)
    for flat in core.flats:
        flat.master.stage()
    core.cursor.run(edited(core.followed.context))
    replicated = [flat for flat in core.flats if not flat.full.sharded]
    refresh([flat for flat in replicated if not flat.placement.optim.is_sharded])
    torch.autograd.graph.increment_version([p for unit in core.units.values() for p in unit.params()])
    announce(core.setting.events.values_written)


def filled(core: Core) -> None:
    """Masters were filled, and with them replicated parameters: what is gathered is old. Local to this rank."""
    announce(core.setting.events.values_replaced)
    for flat in core.flats:
        flat.master.stage()
    for name, unit in core.units.items():
        if unit.sharded:
            core.cursor.run(released(name))
    announce(core.setting.events.values_written)
