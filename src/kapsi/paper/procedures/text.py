"""Documents as sparse TF-IDF columns: classifiers of IMDB, SST-2 and AG News, selected on held-out training rows.

Steps of a run:

1. Convert documents to sparse TF-IDF columns with the vocabulary and document frequencies of all training documents.
2. Hold out training rows in folds, drawn by the seed; fit candidates to the other rows, and select the best mean accuracy.
3. Fit the selected candidate to all training rows, with a single evaluation of the test rows.

The training rows of SST-2 are whole sentences and their phrases. A random fold would share phrases of a sentence with the fitted
rows. Held-out rows are therefore whole sentences, like the test rows, and their phrases are removed from the fitted rows
(`unit: sentences`).

Reviews of a film are close to each other in the training rows of IMDB, and films of the test rows do not occur there. Random
held-out rows share films with the fitted rows and favor models memorizing films. Blocks of rows are held out instead
(`unit: blocks`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kapsi.data.hub import DATASETS
from kapsi.data.text import TextData, load_text
from kapsi.errors import DataError, SpecError
from kapsi.function import Spec, coerce, option
from kapsi.paper.experiment import Budget, Outcome, Run
from kapsi.paper.procedures import classifiers
from kapsi.paper.procedures.classifier_kinds import LabeledRows
from kapsi.paper.procedures.classifiers import ClassifierSearch

COLUMNS = 840
"""Columns in the dry run of the options; the real number is known after reading the documents."""
BLOCK = 100
"""Rows of a held-out block."""
MIN_WORDS = 8
"""Words of the shortest held-out sentence: most shorter ones are phrases of a sentence outside of the data."""
Indices = npt.NDArray[np.int64]


class Fold(NamedTuple):
    """Indices of fitted and of held-out training rows."""

    fitted: Indices
    held_out: Indices


@dataclass(frozen=True, kw_only=True)
class TextOptions(Spec):
    """Options of the procedure `text`, in addition to the options of the selection and of the kind of classifier.

    Args:
        data: data set, by default the name of the row.
        classifier: key of `classifiers.KINDS`; `kan` is `SparseKAN` here.
        ngrams: smallest and largest number of words of a column.
        min_df: smallest number (integer) or share (float) of training documents with a word; rarer words are dropped.
        stop_words: `english` drops the words of the English list; null keeps all words.
        folds: number of folds held out in turn.
        held_out: number or share, at most half, of the training rows in each fold.
        unit: held out as `rows`, whole `sentences` with all their phrases, or `blocks` of 100 consecutive rows.
        most_rows: largest number of training rows, drawn by the seed, for methods of limited size.
        limit_train, limit_test: numbers of leading rows to use; null for all.
    """

    data: Literal["imdb", "sst2", "ag_news"]
    classifier: str = "model"
    ngrams: tuple[int, int] = (1, 1)
    min_df: int | float = option(5, minimum=0.0)
    stop_words: Literal["english"] | None = "english"
    folds: int = option(1, minimum=1, maximum=100)
    held_out: int | float = option(0.25, minimum=0)
    unit: Literal["rows", "sentences", "blocks"] = "rows"
    most_rows: int | None = option(None, minimum=1)
    limit_train: int | None = option(None, minimum=1)
    limit_test: int | None = option(None, minimum=1)

    def check(self) -> None:
        if not 1 <= self.ngrams[0] <= self.ngrams[1]:
            raise SpecError(f"ngrams: expected two numbers of words such as [1, 2], got {list(self.ngrams)}")
        if self.min_df == 0 or (isinstance(self.min_df, float) and self.min_df > 1):
            raise SpecError(f"min_df: expected a whole number, or a share above 0 and up to 1, got {self.min_df}")
        if self.held_out == 0 or (isinstance(self.held_out, float) and self.held_out > 0.5):
            raise SpecError(
                f"held_out: expected a number of rows, or a share above 0 and up to 0.5, got {self.held_out}"
            )


def read_options(run: Run) -> tuple[TextOptions, ClassifierSearch]:
    """Return the options of the data, and the candidates."""
    run.expects("accuracy", "validation")
    known, others = classifiers.divided(run.options, TextOptions)
    options: TextOptions = coerce(TextOptions, {"data": run.row, **known}, run.where)
    search = classifiers.read(options.classifier, others, run.where, classifiers.names_of(TextOptions))
    if search.options.fits_once and options.folds > 1:
        raise SpecError(
            f"{run.where}.folds: early_stopping, and refit: false, need one fold of held-out rows; set folds to 1"
        )
    try:
        search.dry_run(COLUMNS, len(DATASETS[options.data].classes), sparse=True)
    except (SpecError, DataError) as error:
        if str(COLUMNS) not in str(error):  # the columns of the documents may fit
            raise
    return options, search


def budget(run: Run) -> Budget:
    """Return the search of a run."""
    options, search = read_options(run)
    return search.budget(options.folds)


def run(run: Run) -> Outcome:
    """Fit a classifier to the documents of a row, and evaluate it once on the test rows.

    Options: `TextOptions`, the selection, and the kind (`procedures.classifiers.read`).

    Raises:
        SpecError: unknown option, or invalid value.
    """
    started = time.process_time()
    options, search = read_options(run)
    texts = limited(load_text(options.data, run.folder), options)
    x, test_x = texts.tfidf(options.ngrams, min_df=options.min_df, stop_words=options.stop_words)
    y, classes = np.asarray(texts.train_y), int(max(texts.train_y.max(), texts.test_y.max())) + 1
    prepared = time.process_time() - started
    generator = np.random.default_rng(run.seed)
    pool = generator.permutation(len(y))[: options.most_rows or len(y)]
    folds = hold_out(texts, pool, options, generator, search.where, shuffled=search.options.tune_rows is not None)
    splits = [functools.partial(_rows_of, x, y, fold) for fold in folds]
    fitted = search.fit((x[pool], y[pool]), splits, classes=classes, seed=run.seed)
    test_started = time.process_time()
    score = float((fitted.predict(test_x) == texts.test_y).mean())
    extra: dict[str, Any] = {
        "chosen": dict(fitted.chosen),
        "candidates": [[dict(chosen), accuracy] for chosen, accuracy in fitted.candidates],
        "columns": int(x.shape[1]),
        "train_rows": len(pool),
        "held_out_rows": [len(fold.held_out) for fold in folds],
        "test_rows": len(texts.test_y),
        "standard_error": round(float(np.sqrt(score * (1 - score) / len(texts.test_y))), 5),
        "cpu_seconds": {
            "columns": round(prepared, 2),
            "choice_and_fit": round(fitted.seconds, 2),
            "test": round(time.process_time() - test_started, 2),
        },
        **fitted.details,
    }
    if texts.notes:
        extra["notes"] = list(texts.notes)
    return Outcome(score, fitted.validation, fitted.parameters, fitted.seconds, extra)


# ------------------------------------------------------------------------------------------------ held-out rows


def _rows_of(x: Any, y: Indices, fold: Fold) -> tuple[LabeledRows, LabeledRows]:
    return (x[fold.fitted], y[fold.fitted]), (x[fold.held_out], y[fold.held_out])


def limited(texts: TextData, options: TextOptions) -> TextData:
    """Return the first rows of a data set."""
    train, test = options.limit_train, options.limit_test
    return replace(
        texts,
        train_text=texts.train_text[:train],
        train_y=texts.train_y[:train],
        test_text=texts.test_text[:test],
        test_y=texts.test_y[:test],
    )


def hold_out(
    texts: TextData,
    pool: Indices,
    options: TextOptions,
    generator: np.random.Generator,
    where: str = "hold_out",
    *,
    shuffled: bool = False,
) -> list[Fold]:
    """Return the fitted and the held-out rows of each fold.

    Args:
        texts: documents and labels, including the training rows.
        pool: indices of available rows, in random order.
        options: `folds`, `held_out` and `unit`.
        generator: draws sentences or blocks.
        where: prefix of error messages.
        shuffled: keep the random order of the pool for fitted rows, as the first ones must be a random sample.
    """
    folds, share = options.folds, options.held_out

    def size(count: int) -> int:
        wanted = int(count * share) if isinstance(share, float) else share
        return max(1, min(wanted, count // max(2, folds)))

    def require(count: int, needed: int, problem: str) -> None:
        if count < needed:
            raise SpecError(f"{where}.{problem}")

    require(len(pool), max(2, folds), f"folds: {len(pool)} rows are too few for {folds} folds and fitted rows")
    if options.unit == "rows":
        width = size(len(pool))
        held_out = [pool[i * width : (i + 1) * width] for i in range(folds)]
        return [Fold(pool[~np.isin(pool, part)] if shuffled else np.setdiff1d(pool, part), part) for part in held_out]
    if options.unit == "blocks":
        blocks = generator.permutation(np.unique(pool // BLOCK))
        needed = max(2, folds)
        require(len(blocks), needed, f"unit: {len(pool)} rows are too few for blocks of {BLOCK} in {needed} folds")
        # A pool smaller than the data has only some rows of each block: the share is a share of the blocks.
        share_of_blocks = size(len(pool)) / len(pool)
        width = max(1, min(round(len(blocks) * share_of_blocks), len(blocks) // needed))
        masks = [np.isin(pool // BLOCK, blocks[i * width : (i + 1) * width]) for i in range(folds)]
        return [Fold(pool[~mask], pool[mask]) for mask in masks]
    words = [text.split() for text in texts.train_text]
    whole = generator.permutation(np.intersect1d(sentences(words), pool))
    require(len(whole), folds, f"unit: {len(whole)} whole sentences are too few for {folds} folds")
    width = size(len(whole))
    result = []
    for i in range(folds):
        part = whole[i * width : (i + 1) * width]
        phrases = {phrase for row in part for phrase in _phrases(words[row])}
        result.append(Fold(np.array([row for row in pool if " ".join(words[row]) not in phrases]), part))
    return result


def sentences(words: Sequence[Sequence[str]]) -> Indices:
    """Return the indices of whole sentences: documents of at least 8 words not contained in any other.

    Example:
        >>> whole = "it is a good film after all ,".split()
        >>> sentences([["good", "film"], whole, whole[2:], "a film".split()])
        array([1])
    """
    seen: set[str] = set()
    whole = []
    for row in sorted(range(len(words)), key=lambda row: -len(words[row])):
        if len(words[row]) < MIN_WORDS:
            break
        if " ".join(words[row]) not in seen:
            whole.append(row)
            seen.update(_phrases(words[row]))
    return np.array(sorted(whole), dtype=np.int64)


def _phrases(words: Sequence[str]) -> set[str]:
    """Return all sequences of consecutive words of a document."""
    return {" ".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
