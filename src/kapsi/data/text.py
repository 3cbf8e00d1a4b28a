"""IMDB, AG News and SST-2: texts and sparse TF-IDF columns."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.cache import Arrays, cached, digest
from kapsi.data.hub import find, known, read_split
from kapsi.data.progress import terminal_line
from kapsi.errors import DataError
from kapsi.files import one_line


@dataclass(frozen=True, eq=False)
class TextData:
    """Texts and their classes.

    Args:
        train_text: n training texts.
        train_y: class labels from 0, (n,) int64.
        test_text: n test texts.
        test_y: test labels, (n,) int64.
        name: name of the data set.
        classes: names of the classes.
        source: folder or repository of the texts.
        notes: limitations, such as missing rows.
    """

    train_text: tuple[str, ...]
    train_y: npt.NDArray[np.int64]
    test_text: tuple[str, ...]
    test_y: npt.NDArray[np.int64]
    name: str = "text"
    classes: tuple[str, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = field(default=())

    def tfidf(
        self,
        ngrams: tuple[int, int] = (1, 1),
        *,
        min_df: int | float = 5,
        max_df: int | float = 0.5,
        stop_words: str | None = "english",
        sublinear_tf: bool = True,
        fit_rows: npt.NDArray[np.integer[Any]] | None = None,
    ) -> tuple[Any, Any]:
        """Return TF-IDF columns of the training and test texts, two SciPy CSR matrices in float32.

        Vocabulary and document frequencies come from the training texts, by scikit-learn's `TfidfVectorizer`.

        Args:
            ngrams: smallest and largest number of words per column; (1, 2) for unigrams and bigrams.
            min_df: smallest document frequency, a number (int) or a fraction (float) of training texts.
            max_df: largest document frequency, a number (int) or a fraction (float) of training texts.
            stop_words: "english" for scikit-learn's list, None for no list.
            sublinear_tf: replace counts by 1 + log(count).
            fit_rows: indices of the training rows for vocabulary and frequencies; None for all. All training rows are
                transformed.

        Raises:
            DataError: no words are left, or an option is invalid.
        """
        from importlib.metadata import version

        from scipy.sparse import csr_matrix

        options: dict[str, Any] = {
            "ngram_range": ngrams,
            "min_df": min_df,
            "max_df": max_df,
            "stop_words": stop_words,
            "sublinear_tf": sublinear_tf,
        }
        rows = None if fit_rows is None else self._numbers(fit_rows)
        source = {
            "texts": digest(*self.train_text, *self.test_text),
            "training": len(self.train_text),
            "rows": None if rows is None else digest(rows.tobytes()),
            "scikit-learn": version("scikit-learn"),
            **{name: repr(value) for name, value in options.items()},
        }
        name = f"{self.name}-tfidf-{digest(json.dumps(source))}"
        arrays, _ = cached(name, source, lambda: self._columns(options, rows))
        train, test = (
            csr_matrix(
                (arrays[f"{part}_data"], arrays[f"{part}_indices"], arrays[f"{part}_starts"]),
                shape=(len(texts), int(arrays["width"])),
            )
            for part, texts in (("train", self.train_text), ("test", self.test_text))
        )
        return train, test

    def _numbers(self, rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        count = len(self.train_text)
        try:
            array = np.asarray(rows)
        except ValueError:  # lists of different lengths
            array = np.array("")
        fits = array.ndim == 1 and array.dtype.kind in "iu" and array.size > 0
        if not fits or array.min() < 0 or array.max() >= count:
            raise DataError(
                f"{self.name}: fit_rows must be indices of training rows, 0 to {count - 1}, and at least one"
            )
        return array.astype(np.int64)

    def _columns(self, options: dict[str, Any], rows: npt.NDArray[np.int64] | None) -> Arrays:
        from sklearn.feature_extraction.text import TfidfVectorizer

        fitted = self.train_text if rows is None else [self.train_text[row] for row in rows]
        again = () if rows is None else self.train_text
        report = terminal_line(f"TF-IDF of {self.name}")
        total = len(fitted) + len(again) + len(self.test_text)
        texts = _reported(itertools.chain(fitted, again, self.test_text), total, report)
        try:
            vectorizer = TfidfVectorizer(**options, dtype=np.float32)
            train = vectorizer.fit_transform(itertools.islice(texts, len(fitted)))
            if rows is not None:
                train = vectorizer.transform(itertools.islice(texts, len(again)))
            test = vectorizer.transform(texts)
        except (ValueError, TypeError) as error:  # no words are left, or an option is invalid
            raise DataError(
                f"{self.name}: no TF-IDF columns ({one_line(error)}); change ngrams, min_df or max_df"
            ) from None
        arrays: Arrays = {"width": np.array(train.shape[1])}
        for part, matrix in (("train", train), ("test", test)):
            matrix.sort_indices()
            arrays |= {f"{part}_data": matrix.data, f"{part}_indices": matrix.indices, f"{part}_starts": matrix.indptr}
        return arrays


def _reported(texts: Iterable[str], total: int, report: Callable[[int, int], None]) -> Iterator[str]:
    for done, text in enumerate(texts, start=1):
        yield text
        report(done, total)


def load_text(name: str, folder: str | Path | None = None) -> TextData:
    """Load IMDB ("imdb"), AG News ("ag_news") or SST-2 ("sst2") from a folder, else from `KAPSI_DATA`, else from the hub.

    The test rows of SST-2 are the 872 rows of the validation split: the labels of the test split are hidden.

    Args:
        name: name of the data set.
        folder: folder with NAME/train.parquet and NAME/test.parquet (SST-2: validation.parquet), or with the files of the hub.

    Raises:
        DataSetError: the data set is unknown or damaged, or neither folder nor network is available.
    """
    data = known(name, "text")
    source = find(data, folder)
    train, test = (read_split(source, part) for part in (False, True))
    return TextData(
        tuple(train.values.to_pylist()),
        train.labels,
        tuple(test.values.to_pylist()),
        test.labels,
        name=name,
        classes=data.classes,
        source=source.where,
        notes=train.notes + test.notes,
    )
