"""The workspaces of matrix products: memory that a library takes at a thread's first product, and keeps."""

import torch


def take_workspaces(device: torch.device) -> None:
    """Have cuBLAS take its workspaces on the current stream, for this thread and for autograd's.

    Taken inside of a step they would lie in memory that it frees, which could then not be reused as a whole; and now in
    unused memory, if there were any.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        with torch.enable_grad():
            factor = torch.ones((16, 16), device=device, requires_grad=True)
            torch.mm(factor, factor).sum().backward()  # type: ignore[no-untyped-call]
