"""Columns of texts: unigrams and bigrams as sparse TF-IDF inputs."""

from __future__ import annotations

import functools
import html
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.encoders import Unseen, center_and_scale, clipped, fields, positive, standardized, strings
from kapsi.data.tabular.types import Column, Floats, Ints, as_text, reject, short

__all__ = ["TextColumn", "reads_as_text", "tokens"]

MOST_TERMS = 2**19
"""Most unigrams and bigrams of a column: 524,288."""

MOST_WEIGHTS = 2**24
"""Most terms times outputs of a model: 128 MiB of weights."""

LEAST_ROWS = 2
"""Rows that a unigram or bigram is in at least, unless none is in so many."""

COUNTED = 2**27
"""Characters of the rows that choose the terms: 134 million."""

MOST_COUNTED = 2**23
"""Different terms counted at a time; beyond, those of a single row are forgotten."""

MOST_WORDS = 2**22
"""Different words that are counted."""

CHUNK = 2**23
"""Characters of the rows that are converted at once."""

WORDS_OF_TEXT = 3.0
"""Mean number of words from which a column of mostly distinct strings is text."""

DISTINCT = 0.5
"""Part of the values of such a column that are distinct, at least."""

PAIR = 2**31
"""Key of a bigram is (first word + 1) · 2³¹ + second word, that of a unigram the word."""

_SINGLE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Scripts without blanks between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese; each sign is a word."""
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u0dff"
"""Signs within words that are no letters: accents, vowels of Hebrew, Arabic and of the languages of India."""
TOKEN = re.compile(rf"[{_SINGLE}]|(?:[^\W{_SINGLE}]|[{_MARKS}]){{1,40}}|[\u203c-\u2bff\U0001f000-\U0001faff]")
_SIGN = re.compile(rf"[{_SINGLE}]")
TAG = re.compile(r"</?[A-Za-z!][^<>]{0,2000}>")


def tokens(text: str) -> list[str]:
    """Return the words and emojis of a text in lower case, without punctuation and tags of HTML.

    Example:
        >>> tokens("Not <b>good</b> &amp; cheap!")
        ['not', 'good', 'cheap']
        >>> tokens("好的 👍")
        ['好', '的', '👍']
    """
    if "<" in text:
        text = TAG.sub(" ", text)
    if "&" in text:
        text = html.unescape(text)
    return TOKEN.findall(text.lower())


def reads_as_text(codes: npt.NDArray[Any], words: Sequence[str]) -> bool:
    """Return whether a column of strings is text: mostly distinct values of several words.

    Args:
        codes: index of each value in the distinct strings, -1 for missing.
        words: the distinct strings.

    Example:
        >>> reads_as_text(np.array([0, 1]), ["a fine day for it", "not so bad"]), reads_as_text(np.array([0, 1]), ["X1", "X2"])
        (True, False)
    """
    known = int((codes >= 0).sum())
    if len(words) < 2 or len(words) < DISTINCT * known:
        return False
    step = max(1, len(words) // 1_000)
    counts = [_words_in(word[:10_000]) for word in words[::step]]
    return sum(counts) >= WORDS_OF_TEXT * len(counts)


def _words_in(text: str) -> int:
    """Return the number of words with a letter between blanks, and of signs of scripts without blanks."""
    return sum(any(map(str.isalpha, word)) for word in text.split()) + len(_SIGN.findall(text))


# ------------------------------------------------------------------------------------------------ terms


class _Tokens(NamedTuple):
    """The words of some texts.

    Attributes:
        codes: code of each word, -1 for an unknown one, all texts one after the other.
        lengths: number of words of each text.
    """

    codes: Ints
    lengths: Ints

    def terms(self) -> tuple[Ints, Ints]:
        """Return the key of each unigram and bigram of known words, and its text."""
        text = np.repeat(np.arange(len(self.lengths)), self.lengths)
        known = self.codes >= 0
        pair = (text[1:] == text[:-1]) & known[1:] & known[:-1]
        keys = (self.codes[:-1][pair] + 1) * PAIR + self.codes[1:][pair]
        return np.concatenate([self.codes[known], keys]), np.concatenate([text[known], text[:-1][pair]])


def _chunks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield texts of `CHUNK` characters together."""
    ends = np.cumsum([len(text) for text in texts]) // CHUNK
    for _, group in itertools.groupby(range(len(texts)), key=ends.__getitem__):
        numbers = list(group)
        yield texts[numbers[0] : numbers[-1] + 1]


def _read(texts: Sequence[str], words: dict[str, int], *, grow: bool) -> _Tokens:
    """Return the words of texts; unknown ones get a code if the dictionary may grow."""
    codes: list[int] = []
    lengths = np.empty(len(texts), dtype=np.int64)
    for i, text in enumerate(texts):
        found = tokens(text)
        lengths[i] = len(found)
        if grow:
            codes += [words.setdefault(word, len(words)) for word in found]
        else:
            codes += [words.get(word, -1) for word in found]
    return _Tokens(np.array(codes, dtype=np.int64), lengths)


def _rows_with(keys: Ints, text: Ints, texts: int) -> tuple[Ints, Ints]:
    """Return the different keys, and the number of texts with each."""
    found, places = np.unique(keys, return_inverse=True)
    once = np.unique(places.astype(np.int64) * texts + text)
    return found, np.bincount(once // max(texts, 1), minlength=len(found)).astype(np.int64)


def _merged(keys: Ints, counts: Ints, more: Ints, others: Ints) -> tuple[Ints, Ints]:
    """Return the sum of two counts by key."""
    order = np.argsort(both := np.concatenate([keys, more]), kind="stable")
    both, total = both[order], np.concatenate([counts, others])[order]
    first = np.flatnonzero(np.append(True, both[1:] != both[:-1])) if len(both) else order
    return both[first], np.add.reduceat(total, first) if len(first) else total


class _Counted(NamedTuple):
    """The terms of some texts.

    Attributes:
        words: all words, by code.
        keys: the keys of the most frequent terms, ascending.
        counts: number of texts with each of these.
        lengths: number of words of each text.
    """

    words: list[str]
    keys: Ints
    counts: Ints
    lengths: Ints

    @classmethod
    def of(cls, texts: Sequence[str], most: int) -> Self:
        """Count the terms of some texts, and keep the most frequent ones."""
        words: dict[str, int] = {}
        keys = counts = np.empty(0, dtype=np.int64)
        lengths = [keys]
        for part in _chunks(texts):
            found = _read(part, words, grow=len(words) < MOST_WORDS)
            lengths.append(found.lengths)
            keys, counts = _merged(keys, counts, *_rows_with(*found.terms(), len(part)))
            if len(keys) > MOST_COUNTED:
                keys, counts = keys[counts > 1], counts[counts > 1]
        frequent = counts >= LEAST_ROWS
        if frequent.any():
            keys, counts = keys[frequent], counts[frequent]
        # Among equal counts, words come before pairs, so each pair has both of its words.
        chosen = np.sort(np.argsort(-counts, kind="stable")[:most])
        return cls(list(words), keys[chosen], counts[chosen], np.concatenate(lengths))


def _spelled(words: Sequence[str], keys: Ints) -> tuple[tuple[str, ...], npt.NDArray[np.int64], Ints]:
    """Return the kept words in sorted order, the bigrams of these (`PAIR`), and the order of the keys then."""
    kept = keys[keys < PAIR]
    spelled = [words[key] for key in kept.tolist()]
    order = sorted(range(len(kept)), key=spelled.__getitem__)
    place = np.full(len(words), -1, dtype=np.int64)
    place[kept[order]] = np.arange(len(kept))
    pairs = keys[keys >= PAIR]
    pairs = (place[pairs // PAIR - 1] + 1) * PAIR + place[pairs % PAIR]
    ascending = np.argsort(pairs, kind="stable")
    return (
        tuple(spelled[i] for i in order),
        pairs[ascending],
        np.concatenate([np.array(order, dtype=np.int64), len(kept) + ascending]),
    )


# ------------------------------------------------------------------------------------------------ encoder


@dataclass(frozen=True)
class TextColumn:
    """TF-IDF of the unigrams and bigrams of a text column: (1 + log count) · idf, rows of length 1; sparse.

    idf is log((1 + rows)/(1 + rows with the term)) + 1. Terms are those in two fitted rows and more, the most frequent ones up to a
    limit. The logarithm of the number of words is an input beside the others, and so is a mark of missing texts.

    Args:
        name: name of the column.
        words: the words, sorted.
        pairs: the bigrams, ascending: (index of the first word + 1) · 2³¹ + index of the second.
        counts: number of fitted rows with each word, then with each bigram.
        rows: number of fitted rows.
        mean, scale: mean and population standard deviation of log(1 + words of a row).
        missing: add a 0/1 input that marks missing texts.

    Example:
        >>> texts = Column("text", np.array(["a good day", "not a good day", None], dtype=object))
        >>> column = TextColumn.fit("text", texts)
        >>> column.terms()
        ['text: a', 'text: day', 'text: good', 'text: a good', 'text: good day']
        >>> column.encode(texts)[1].toarray().round(2).tolist()[0]
        [0.45, 0.45, 0.45, 0.45, 0.45]
    """

    name: str
    words: tuple[str, ...]
    pairs: tuple[int, ...]
    counts: tuple[int, ...]
    rows: int
    mean: float
    scale: float
    missing: bool
    wanted: ClassVar[str] = "text"

    @classmethod
    def fit(cls, name: str, column: Column, outputs: int = 2, weight: Floats | None = None) -> Self:
        """Choose the terms by the rows of a column.

        Args:
            name: name of the column.
            column: the texts.
            outputs: number of outputs of the model: many of them allow fewer terms.
            weight: weights of the rows; those with 0 do not count.
        """
        codes, texts = column.coded()
        if weight is not None:
            texts = [texts[i] for i in np.unique(codes[(weight > 0) & (codes >= 0)])]
        sample = texts[:: max(1, -(-sum(map(len, texts)) // COUNTED))]
        found = _Counted.of(sample, min(MOST_TERMS, MOST_WEIGHTS // max(2, outputs)))
        words, pairs, order = _spelled(found.words, found.keys)
        mean, scale = center_and_scale(np.log1p(found.lengths.astype(np.float64)))
        counts, missing = tuple(found.counts[order].tolist()), bool((codes < 0).any())
        return cls(name, words, tuple(pairs.tolist()), counts, len(sample), mean, scale, missing)

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    @functools.cached_property
    def _keys(self) -> Ints:
        return np.array([*range(len(self.words)), *self.pairs], dtype=np.int64)

    @functools.cached_property
    def _idf(self) -> Floats:
        return np.log((1 + self.rows) / (1 + np.array(self.counts, dtype=np.float64))) + 1

    @property
    def count(self) -> int:
        """Return the number of inputs of terms."""
        return len(self.counts)

    def names(self) -> list[str]:
        """Return the names of the inputs other than those of terms."""
        return [f"{self.name}: length", *([f"{self.name} is missing"] if self.missing else [])]

    def terms(self) -> list[str]:
        """Return the names of the inputs of terms."""
        pairs = [f"{self.words[key // PAIR - 1]} {self.words[key % PAIR]}" for key in self.pairs]
        return [f"{self.name}: {term}" for term in (*self.words, *pairs)]

    def accept(self, column: Column, where: str) -> Column:
        """Return the column as text."""
        return as_text(column, ())

    def encode(self, column: Column) -> tuple[Floats, Any]:
        """Return the inputs other than those of terms, (rows, inputs), and those of terms, (rows, terms) CSR in float64."""
        from scipy.sparse import csr_matrix, vstack

        codes, texts = column.coded()
        empty = csr_matrix((1, len(self.counts)), dtype=np.float64)
        parts, lengths = [], [np.empty(0, dtype=np.int64)]
        for part in _chunks(texts):
            found = _read(part, self._places, grow=False)
            lengths.append(found.lengths)
            parts.append(self._rows(found))
        every = vstack([*parts, empty], format="csr")
        words = np.append(np.concatenate(lengths), 0)[codes]
        inputs = [clipped(standardized(np.log1p(words.astype(np.float64)), self.mean, self.scale))]
        inputs += [(codes < 0).astype(np.float64)] if self.missing else []
        return np.stack(inputs, axis=1), every[np.where(codes < 0, len(texts), codes)]

    def _rows(self, found: _Tokens) -> Any:
        """Return the inputs of terms for some texts, CSR."""
        from scipy.sparse import csr_matrix

        keys, text = found.terms()
        if not len(self._keys):
            return csr_matrix((len(found.lengths), 0), dtype=np.float64)
        at = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        known = self._keys[at] == keys
        entries = np.ones(int(known.sum())), (text[known], at[known])
        rows = csr_matrix(entries, shape=(len(found.lengths), len(self._keys)))
        rows.sum_duplicates()
        rows.data = (1 + np.log(rows.data)) * self._idf[rows.indices]
        number = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
        norm = np.sqrt(np.bincount(number, rows.data**2, minlength=rows.shape[0]))
        rows.data /= norm[number]
        return rows

    def unseen(self, column: Column) -> Unseen:
        """Return the number of values without an effect."""
        return Unseen(empty=0 if self.missing else int(column.missing.sum()))

    def note(self) -> str:
        """Return a note for the user: the numbers of texts and terms."""
        return f"column {short(self.name)}: {self.rows:,} texts, {len(self.counts):,} unigrams and bigrams"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        names = ("name", "words", "pairs", "counts", "rows", "mean", "scale", "missing")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> Self:
        """Return the encoder of plain data."""
        kinds = {"kind": str, "name": str, "words": list, "pairs": list, "counts": list, "rows": int}
        read = fields(data, where, {**kinds, "mean": float, "scale": float, "missing": bool})
        words, rows = strings(read["words"], where), read["rows"]
        pairs, counts = (whole(read[key], where, key) for key in ("pairs", "counts"))
        most = (len(words) + 1) * PAIR
        ascending = all(a < b for a, b in itertools.pairwise(pairs))
        if not ascending or any(not PAIR <= key < most or key % PAIR >= len(words) for key in pairs):
            reject(where, "pairs must be ascending pairs of words")
        if len(counts) != len(words) + len(pairs) or any(not 1 <= count <= rows for count in counts):
            reject(where, f"counts must be {len(words) + len(pairs)} numbers of rows, 1 to {rows}")
        scale = positive(read["scale"], where)
        return cls(read["name"], words, pairs, counts, rows, read["mean"], scale, read["missing"])


def whole(values: list[Any], where: str, name: str) -> tuple[int, ...]:
    """Return a list of whole numbers of at most 62 bits."""
    if not all(type(value) is int and 0 <= value < 2**62 for value in values):
        reject(where, f"{name} must be whole numbers")
    return tuple(values)
