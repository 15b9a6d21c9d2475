"""ResNet v1.5 (the 3×3 convolution of a bottleneck has the stride). It has torchvision's names, so its weights load."""

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.own.layers import Linear
from shardwise.models.shapes import ResNetShape


class Conv(nn.Conv2d):
    """A convolution without bias that keeps the size at stride 1; initialised as in He et al. (2015)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


def _shortcut(inputs: int, outputs: int, *, stride: int) -> nn.Sequential | None:
    """Return a projection if the block's input and output differ in shape, else None."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(Conv(inputs, outputs, 1, stride=stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, inner: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv(inputs, inner, 3, stride=stride)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = Conv(inner, inner, 3)
        self.bn2 = nn.BatchNorm2d(inner)
        self.downsample = _shortcut(inputs, inner, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + shortcut)


class Bottleneck(nn.Module):
    """A 1×1 convolution down, 3×3, and 1×1 up to four times the inner width."""

    expansion = 4

    def __init__(self, inputs: int, inner: int, *, stride: int) -> None:
        super().__init__()
        outputs = inner * self.expansion
        self.conv1 = Conv(inputs, inner, 1)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = Conv(inner, inner, 3, stride=stride)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = Conv(inner, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + shortcut)


_BLOCKS: dict[str, type[BasicBlock] | type[Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


class ResNet(nn.Module):
    """Images [batch, channels, height, width] → logits [batch, classes]."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        stem = {"kernel": 3, "stride": 1} if shape.small_images else {"kernel": 7, "stride": 2}
        self.conv1 = Conv(shape.num_channels, width, **stem)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(shape, stage=0)
        self.layer2 = _stage(shape, stage=1)
        self.layer3 = _stage(shape, stage=2)
        self.layer4 = _stage(shape, stage=3)
        self.fc = Linear(width * 8 * shape.expansion, shape.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        if not self.shape.small_images:
            x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def _stage(shape: ResNetShape, *, stage: int) -> nn.Sequential:
    """Return `num_blocks[stage]` blocks; the first block halves the image, except in the first stage."""
    block = _BLOCKS[shape.block]
    inner = shape.width * 2**stage
    outputs = inner * shape.expansion
    before = shape.width if stage == 0 else outputs // 2
    inputs = [before] + [outputs] * (shape.num_blocks[stage] - 1)
    strides = [1 if stage == 0 else 2] + [1] * (shape.num_blocks[stage] - 1)
    return nn.Sequential(*(block(i, inner, stride=s) for i, s in zip(inputs, strides, strict=True)))
