"""Random changes of training images, drawn for each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["Augmentation", "augmented", "flipped", "mixed", "moved", "shifted"]

Augmentation: TypeAlias = Callable[[Tensor], Tensor]
"""From the rows of a batch to changed ones, drawn by the global generator."""


def flipped(images: Tensor) -> Tensor:
    """Return images, each flipped horizontally with probability ½.

    Args:
        images: (b, channels, height, width).
    """
    selected = torch.rand(len(images)) < 0.5
    return torch.where(selected.reshape(-1, 1, 1, 1), images.flip(-1), images)


def mixed(images: Tensor, share: float) -> Tensor:
    """Return (1 − s) a + s b for each image a, with b another image of the batch and s uniform from 0 to `share`.

    Args:
        images: (b, channels, height, width).
        share: largest s, 0 to 0.5.

    Source: Zhang et al. (2018), mixup; without mixed targets, the larger share decides.
    """
    shares = share * torch.rand(len(images), dtype=images.dtype).reshape(-1, 1, 1, 1)
    return torch.lerp(images, images[torch.randperm(len(images))], shares)


def moved(images: Tensor, down: int, right: int) -> Tensor:
    """Return images shifted by some pixels, fewer than a side; new pixels get the value of the corner.

    Example:
        >>> moved(torch.tensor([[[[0, 1], [2, 3]]]]), 1, 0).tolist()
        [[[[0, 0], [0, 1]]]]
    """
    height, width = images.shape[-2:]
    out = images[:, :, :1, :1].expand_as(images).clone()
    source = images[:, :, max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
    out[:, :, max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)] = source
    return out


def shifted(images: Tensor, pixels: int) -> Tensor:
    """Return images, each shifted by up to `pixels` along each axis; new pixels get the value of the corner.

    Args:
        images: (b, channels, height, width).
        pixels: largest shift, at least 1 and less than a side.
    """
    steps = 2 * pixels + 1
    shifts = torch.randint(steps * steps, (len(images),))
    out = torch.empty_like(images)
    for number in range(steps * steps):
        rows = (shifts == number).nonzero().squeeze(1)
        out[rows] = moved(images[rows], number // steps - pixels, number % steps - pixels)
    return out


class _AugmentedRows(Dataset[Any]):
    """Rows in memory, tensors of equal length with the inputs first, and random changes of the inputs."""

    def __init__(self, parts: tuple[Tensor, ...], augment: Augmentation) -> None:
        self.parts, self.augment = parts, augment

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[0] for part in self.__getitems__([index]))

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        batch = torch.tensor(indices)
        x, *others = self.parts
        return self.augment(x[batch]), *(part[batch] for part in others)


def augmented(
    parts: tuple[Tensor, ...], size: int, augment: Augmentation, *, drop_last: bool = False
) -> DataLoader[Any]:
    """Return a loader of shuffled batches for `kapsi.train`, whose inputs are changed at random.

    Args:
        parts: inputs and targets, and weights of the rows if any.
        size: rows of a batch.
        augment: the changes.
        drop_last: leave the rows of a last, smaller batch out.
    """
    rows = _AugmentedRows(parts, augment)
    # Rows arrive as whole batches. Order and changes come from the generator seeded by the engine for each step.
    return DataLoader(rows, batch_size=size, shuffle=True, collate_fn=_whole_batch, drop_last=drop_last)


def _whole_batch(batch: Any) -> Any:
    return batch
