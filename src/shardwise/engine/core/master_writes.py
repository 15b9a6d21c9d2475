"""Writes to a master since the engine last looked: by an update, or by other code."""

import torch
from torch import Tensor


class MasterWrites:
    """The writes to one master since `settled`. torch counts them (`_version`), but for those through `p.data`.

    touched   somebody got hold of the module's parameters, where these are copies of it, and may have written into them
    """

    def __init__(self, master: Tensor) -> None:
        self._master = master
        self._count = master._version
        self._found = False
        self._lent: Tensor | None = None
        self.touched = False

    def touch(self) -> None:
        """Note that somebody got hold of the module's parameters."""
        self.touched = True

    def before_own(self) -> None:
        """Note, before the engine writes, whether other code has written."""
        if self.counted:
            self._found = True

    def after_own(self) -> None:
        """Count the engine's own write."""
        self._count = self._master._version

    def lend(self) -> None:
        """Keep a copy to compare with, since writes from here on may be uncounted."""
        if self._lent is None:
            self._lent = self._master.clone()

    @property
    def counted(self) -> bool:
        """Return whether torch has counted a write that is not known to be the engine's."""
        return self._master._version != self._count

    @property
    def found(self) -> bool:
        """Return whether other code than the engine's has written."""
        if self._lent is not None:
            # By bits, because NaN is not equal to itself.
            self._found = self._found or not torch.equal(self._lent.view(torch.uint8), self._master.view(torch.uint8))
            self._lent = None
        return self._found or self.counted

    def settled(self) -> None:
        """Everything written so far has been taken care of."""
        self._found = self.touched = False
        self._lent = None
        self._count = self._master._version
