"""Encoders of texts and images as modules: codes of words and pixels in, inputs of the model out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kapsi.data.tabular.encoders import FARTHEST
from kapsi.data.tabular.image_column import ImageColumn
from kapsi.data.tabular.text_column import PAIR, TextColumn

__all__ = ["EMPTY", "MISSING", "UNSEEN", "EncoderPart", "ImagePart", "Standardize", "TextPart"]

MISSING = -1
"""Code of a missing value, and of no word behind the last one of a text."""
UNSEEN = -2
"""Code of an unseen category, and of an unseen word."""
EMPTY = -3
"""Code that stands for the words of a text without any."""


class Standardize(nn.Module):
    """(values − center)/scale within ±10⁶, and 0 for NaN.

    A power of two, which is exact, brings the scale between ½ and 1 first: the difference of two huge values stays finite, and
    onnxruntime does not drop a tiny center. It takes constants below 10⁻⁴⁵ for zero.

    Args:
        center, scale: float64 of equal shape.

    Example:
        >>> part = Standardize(torch.tensor(2e-300, dtype=torch.float64), torch.tensor(1e-300, dtype=torch.float64))
        >>> part(torch.tensor([3e-300, torch.nan], dtype=torch.float64)).round(decimals=9)
        tensor([1., 0.], dtype=torch.float64)
    """

    factor: Tensor
    center: Tensor
    scale: Tensor

    def __init__(self, center: Tensor, scale: Tensor) -> None:
        super().__init__()
        factor = torch.ldexp(torch.ones_like(scale), -torch.frexp(scale).exponent.clamp(-1022, 1023))
        for name, value in {"factor": factor, "center": center * factor, "scale": scale * factor}.items():
            self.register_buffer(name, value)

    def forward(self, values: Tensor) -> Tensor:
        inputs = (values * self.factor - self.center) / self.scale
        return torch.where(inputs.isnan(), 0.0, inputs).clamp(-FARTHEST, FARTHEST)


class EncoderPart(nn.Module):
    """An encoder of one column: inputs beside those of other columns, and a block of inputs behind all.

    Args:
        column: the encoder.
    """

    mean: Tensor

    def __init__(self, column: TextColumn | ImageColumn) -> None:
        super().__init__()
        self.marked = column.missing
        self.register_buffer("mean", torch.tensor(column.mean, dtype=torch.float64))
        self.standardize = Standardize(self.mean, torch.tensor(column.scale, dtype=torch.float64))

    def examples(self, rows: int) -> list[Tensor]:
        """Return arguments for tracing."""
        raise NotImplementedError

    def beside(self, value: Tensor, missing: Tensor) -> Tensor:
        """Return a standardized value and the mark of missing ones, `(rows, names)`, for values `(rows,)`."""
        inputs = [self.standardize(value)]
        return torch.stack([*inputs, missing.double()] if self.marked else inputs, 1)


class TextPart(EncoderPart):
    """TF-IDF of unigrams and bigrams of one column.

    Example:
        >>> import numpy as np
        >>> from kapsi.data.tabular import Column
        >>> texts = Column("text", np.array(["a good day", "not a good day", None], dtype=object))
        >>> column = TextColumn.fit("text", texts)
        >>> codes = torch.tensor([[0, 2, 1, MISSING], [UNSEEN, 0, 2, 1], [MISSING] * 4])  # words: a, day, good
        >>> values = TextPart(column)(codes)[1]
        >>> bool(np.allclose(values.numpy(), column.encode(texts)[1].toarray(), rtol=0, atol=1e-15))
        True
    """

    pairs: Tensor
    idf: Tensor

    def __init__(self, column: TextColumn) -> None:
        super().__init__(column)
        self.words, self.terms = len(column.words), len(column.counts)
        self.register_buffer("pairs", torch.tensor(column.pairs, dtype=torch.int64))
        counts = torch.tensor(column.counts, dtype=torch.float64)
        self.register_buffer("idf", ((1 + column.rows) / (1 + counts)).log() + 1)

    def examples(self, rows: int) -> list[Tensor]:
        """Return arguments for tracing."""
        return [torch.full((rows, 4), MISSING)]

    def forward(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return length with mark, and TF-IDF `(rows, terms)`.

        Args:
            codes: `(rows, words)` int64, at least three words: the position of each word, or `MISSING`, `UNSEEN`, `EMPTY`.
        """
        known = codes >= 0
        first, second = codes[:, :-1], codes[:, 1:]
        keys = torch.where(known[:, :-1] & known[:, 1:], (first + 1) * PAIR + second, -1)
        # All other words count in a column behind the terms, which is left out.
        index = torch.cat([torch.where(known, codes, self.terms), self._position(keys)], 1)
        ones = torch.ones_like(index, dtype=torch.float64)
        counts = ones.new_zeros(index.shape[0], self.terms + 1).scatter_add(1, index, ones)[:, :-1]
        values = torch.where(counts > 0, 1 + counts.clamp(min=1).log(), 0) * self.idf
        norm = values.square().sum(1, keepdim=True).sqrt()
        length = (known | (codes == UNSEEN)).sum(1).double()
        missing = (codes != MISSING).sum(1) == 0
        return self.beside(length.log1p(), missing), values / torch.where(norm > 0, norm, 1)

    def _position(self, keys: Tensor) -> Tensor:
        """Return the position of each bigram among the terms, the number of terms for unknown ones, by binary search."""
        count = len(self.pairs)
        if not count:
            return torch.full_like(keys, self.terms)
        below = torch.zeros_like(keys)  # number of bigrams known to be at most the key
        for power in reversed(range(count.bit_length())):
            more = below + 2**power
            inside = self.pairs[(more - 1).clamp(max=count - 1)] <= keys
            below = torch.where((more <= count) & inside, more, below)
        found = (below > 0) & (self.pairs[(below - 1).clamp(min=0)] == keys)
        return torch.where(found, self.words + below - 1, self.terms)


class ImagePart(EncoderPart):
    """Pixels of one column.

    Example:
        >>> column = ImageColumn("image", 2, 2, 1, rows=9, other=0, mean=50.0, scale=10.0, missing=False)
        >>> ImagePart(column)(torch.tensor([[[70, 70], [70, 70]]], dtype=torch.uint8))
        (tensor([[2.]], dtype=torch.float64), tensor([[70., 70., 70., 70.]], dtype=torch.float64))
    """

    def __init__(self, column: ImageColumn) -> None:
        super().__init__(column)
        self.blank = float(round(column.mean))
        self.shape = (column.height, column.width, *([3] if column.channels == 3 else []))

    def examples(self, rows: int) -> list[Tensor]:
        """Return arguments for tracing."""
        mark = [torch.zeros(rows, 1, dtype=torch.bool)] if self.marked else []
        return [torch.zeros(rows, *self.shape, dtype=torch.uint8), *mark]

    def forward(self, pixels: Tensor, missing: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return brightness with mark, and pixels `(rows, channels · height · width)`.

        Args:
            pixels: `(rows, height, width)`, or `(rows, height, width, 3)` for colored images, uint8.
            missing: `(rows, 1)` bool, true for rows without an image; for columns with a mark.
        """
        values = pixels.double()
        values = values.permute(0, 3, 1, 2).flatten(1) if values.dim() == 4 else values.flatten(1)
        brightness = values.mean(1)
        absent = torch.zeros_like(brightness, dtype=torch.bool) if missing is None else missing.squeeze(1)
        brightness = torch.where(absent, self.mean, brightness)
        return self.beside(brightness, absent), torch.where(absent[:, None], self.blank, values)
