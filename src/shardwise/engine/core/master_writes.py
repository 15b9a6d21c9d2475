"""Whether a master was written since the engine last looked: by an update, or by somebody else."""

import torch
from torch import Tensor


class MasterWrites:
    """The writes to one master since `settled`. torch counts them (`_version`), but for those through `p.data`."""

    def __init__(self, master: Tensor) -> None:
        self._master = master
        self._count = master._version
        self._found = False
        self._lent: Tensor | None = None

    def before_own(self) -> None:
        """The engine is about to write: what was written so far was not by the engine."""
        if self.counted:
            self._found = True

    def after_own(self) -> None:
        """The engine has written."""
        self._count = self._master._version

    def lend(self) -> None:
        """From here on writes may be uncounted: keep a copy to compare with."""
        if self._lent is None:
            self._lent = self._master.clone()

    @property
    def counted(self) -> bool:
        """Whether torch has counted a write that is not known to be the engine's."""
        return self._master._version != self._count

    @property
    def found(self) -> bool:
        """Whether anybody but the engine has written."""
        if self._lent is not None:
            # By bits, because NaN is not equal to itself.
            self._found = self._found or not torch.equal(self._lent.view(torch.uint8), self._master.view(torch.uint8))
            self._lent = None
        return self._found or self.counted

    def settled(self) -> None:
        """Everything written so far has been taken care of."""
        self._found = False
        self._lent = None
        self._count = self._master._version
