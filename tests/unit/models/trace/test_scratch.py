"""What kernels allocate for themselves, as it was seen on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from shardwise.models.trace.gpu_kernels import SCRATCH

MIB = 2**20


def scratch(image: tuple[int, ...], weight: tuple[int, ...], *, stride: int = 1, channels_last: bool = False) -> int:
    """Of a convolution in bf16."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(image, device="meta", dtype=torch.bfloat16).to(memory_format=layout)
    w = torch.empty(weight, device="meta", dtype=torch.bfloat16)
    padding = weight[-1] // 2
    out = F.conv2d(x, w, stride=stride, padding=padding)
    args = (x, w, None, [stride, stride], [padding, padding], [1, 1], False, [0, 0], 1)
    forward = SCRATCH["cuda"]["convolution"](args, out)
    mask = (True, True, False)
    backward = SCRATCH["cuda"]["convolution_backward"]((out, x, w, [0], *args[3:], mask), (x, w, None))
    assert forward == backward
    return forward


@pytest.mark.parametrize(
    ("image", "weight", "stride", "mib"),
    [
        ((32, 3, 224, 224), (64, 3, 7, 7), 2, 73.5479),
        ((32, 64, 56, 56), (64, 64, 3, 3), 1, 24.5705),
        ((32, 128, 56, 56), (128, 128, 3, 3), 2, 30.9063),
        ((32, 256, 56, 56), (512, 256, 1, 1), 2, 73.5001),
        ((32, 2048, 7, 7), (512, 2048, 1, 1), 1, 7.6563),
        ((32, 256, 56, 56), (64, 256, 1, 1), 1, 0.0),
        ((32, 1024, 14, 14), (256, 1024, 1, 1), 1, 0.0),
    ],
)
def test_a_convolution_takes_what_cudnn_took_in_resnet_50_on_an_h200(
    image: tuple[int, ...], weight: tuple[int, ...], stride: int, mib: float
) -> None:
    assert scratch(image, weight, stride=stride) / MIB == pytest.approx(mib, abs=2e-4)


def test_a_convolution_of_images_with_channels_last_copies_nothing() -> None:
    assert scratch((32, 64, 56, 56), (64, 64, 3, 3), channels_last=True) == 0
