"""Texts as sparse TF-IDF columns: classifiers of IMDB, SST-2 and AG News, chosen on held-out training rows.

Steps of a run:

1. Texts become TF-IDF columns, whose vocabulary and document frequencies are those of all training texts. They stay sparse.
2. Training rows are held out in parts, drawn by the seed; candidates are fitted to the other rows, and the one with the best mean
   accuracy on the parts is chosen.
3. The chosen one is fitted to all training rows, and scored once on the test rows.

The training rows of SST-2 are whole sentences and phrases of them. A random part would be known by heart, as the phrases of a
sentence lie on both sides. Held-out rows are whole sentences instead, as the test rows are, and every phrase within one of them is
left out of what is fitted (`unit: sentences`).

Reviews of one film stand near each other in the training rows of IMDB, and no film of the test rows is among them. Held-out rows
drawn one by one are of the same films as those that are fitted: models that know the films by heart look best on them. Blocks of
rows are held out instead (`unit: blocks`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kapsi.data.hub import DATASETS
from kapsi.data.text import TextData, load_text
from kapsi.errors import SpecError
from kapsi.function import Spec, coerce, option
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures import classifiers
from kapsi.paper.procedures.classifiers import Choice, Pair

__all__ = ["Options", "Part", "check", "parts", "run", "sentences"]

COLUMNS = 840
"""Columns of the rows on which options are tried out; how many the texts have is known when they are read."""
BLOCK = 100
"""Rows in a block that is held out as a whole."""
LEAST_WORDS = 8
"""Words of the shortest held-out sentence: shorter texts that are in no other are mostly phrases of one that is not there."""
Rows = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Numbers of training rows: those to fit, and those to judge on."""

    kept: Rows
    held: Rows


@dataclass(frozen=True, kw_only=True)
class Options(Spec):
    """The options beside those of the choice and of the kind of classifier.

    Args:
        data: which texts; by default those that the row is called after.
        classifier: a kind, a key of `classifiers.KINDS`, of which `kan` is `SparseKAN` here.
        ngrams: the smallest and the largest number of words that make a column.
        min_df: words in fewer training texts are left out; a share where it is a float.
        stop_words: whether those of the English list are left out.
        folds: number of parts that are held out one after another.
        held_out: number or share, at most half, of the training rows in each part.
        unit: what is held out: `rows`, whole `sentences` with all phrases of them, or `blocks` of 100 rows that stand together.
        most_rows: to which the training rows are cut, drawn by the seed, for methods that do not take more.
        limit_train, limit_test: only the first rows.
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


def _options(run: Run) -> tuple[Options, Choice]:
    run.expects("accuracy", "validation")
    given, others = classifiers.divided(run.options, Options)
    own: Options = coerce(Options, {"data": run.row, **given}, run.where)
    choice = classifiers.read(own.classifier, others, run.where, [each.name for each in fields(Options)])
    if (choice.early_stopping or not choice.refit) and own.folds > 1:
        raise SpecError(
            f"{run.where}.folds: early_stopping, and refit: false, need one part of held-out rows; set folds to 1"
        )
    try:
        choice.rehearse(COLUMNS, len(DATASETS[own.data].classes), sparse=True)
    except SpecError as error:
        if str(COLUMNS) not in str(error):  # what does not fit to so many columns may fit to those of the texts
            raise
    return own, choice


def check(run: Run) -> None:
    """Raise a `SpecError` where the options of a run do not fit; reads no data."""
    _options(run)


def run(run: Run) -> Outcome:
    """Fit one classifier to the texts of a row, and score it once on the test rows.

    Options: those of `Options`, of the choice, and of the kind (`procedures.classifiers.read`).

    Raises:
        SpecError: an option that there is not, or one that does not fit.
    """
    started = time.process_time()
    own, choice = _options(run)
    texts = limited(load_text(own.data, run.folder), own)
    x, test_x = texts.tfidf(own.ngrams, min_df=own.min_df, stop_words=own.stop_words)
    y, classes = np.asarray(texts.train_y), int(max(texts.train_y.max(), texts.test_y.max())) + 1
    prepared = time.process_time() - started
    generator = np.random.default_rng(run.seed)
    pool = generator.permutation(len(y))[: own.most_rows or len(y)]
    held = parts(texts, pool, own, generator, choice.where, shuffled=choice.tune_rows is not None)
    pairs = [functools.partial(_rows_of, x, y, part) for part in held]
    fitted = choice.fit((x[pool], y[pool]), pairs, classes=classes, seed=run.seed)
    chosen_at = time.process_time()
    score = float((fitted.predict(test_x) == texts.test_y).mean())
    extra: dict[str, Any] = {
        "chosen": dict(fitted.chosen),
        "candidates": [[dict(chosen), accuracy] for chosen, accuracy in fitted.candidates],
        "columns": int(x.shape[1]),
        "train_rows": len(pool),
        "held_out_rows": [len(part.held) for part in held],
        "test_rows": len(texts.test_y),
        "standard_error": round(float(np.sqrt(score * (1 - score) / len(texts.test_y))), 5),
        "cpu_seconds": {
            "columns": round(prepared, 2),
            "choice_and_fit": round(fitted.seconds, 2),
            "test": round(time.process_time() - chosen_at, 2),
        },
        **fitted.details,
    }
    if texts.notes:
        extra["notes"] = list(texts.notes)
    return Outcome(score, fitted.validation, fitted.parameters, fitted.seconds, extra)


# ------------------------------------------------------------------------------------------------ held-out rows


def _rows_of(x: Any, y: Rows, part: Part) -> tuple[Pair, Pair]:
    return (x[part.kept], y[part.kept]), (x[part.held], y[part.held])


def limited(texts: TextData, own: Options) -> TextData:
    """Return the first rows of a data set."""
    train, test = own.limit_train, own.limit_test
    if train is None and test is None:
        return texts
    return TextData(
        texts.train_text[:train],
        texts.train_y[:train],
        texts.test_text[:test],
        texts.test_y[:test],
        texts.name,
        texts.classes,
        texts.source,
        texts.notes,
    )


def parts(
    texts: TextData,
    pool: Rows,
    own: Options,
    generator: np.random.Generator,
    where: str = "parts",
    *,
    shuffled: bool = False,
) -> list[Part]:
    """Return rows to fit and rows to judge on.

    Args:
        texts: of which the training rows count.
        pool: numbers of the rows that there are, in a random order.
        own: of which `folds`, `held_out` and `unit` count.
        generator: draws the sentences or blocks.
        where: begins the messages of errors.
        shuffled: whether rows to fit stand in the random order of the pool, so that the first ones are any ones.
    """
    folds, share, unit = own.folds, own.held_out, own.unit

    if len(pool) < max(2, folds):
        raise SpecError(f"{where}.folds: {len(pool)} rows are too few for {folds} parts and rows to fit")

    def size(count: int) -> int:
        wanted = int(count * share) if isinstance(share, float) else share
        return max(1, min(wanted, count // max(2, folds)))

    if unit == "rows":
        some = size(len(pool))
        parts_held = [pool[i * some : (i + 1) * some] for i in range(folds)]
        return [Part(pool[~np.isin(pool, held)] if shuffled else np.setdiff1d(pool, held), held) for held in parts_held]
    if unit == "blocks":
        blocks = generator.permutation(np.unique(pool // BLOCK))
        if len(blocks) < max(2, folds):
            raise SpecError(
                f"{where}.unit: {len(pool)} rows are too few for blocks of {BLOCK} in {max(2, folds)} parts"
            )
        # Of a pool that is a part of all rows each block has some rows only: the share is that of the blocks.
        share_of_blocks = size(len(pool)) / len(pool)
        some = max(1, min(round(len(blocks) * share_of_blocks), len(blocks) // max(2, folds)))
        chosen = [np.isin(pool // BLOCK, blocks[i * some : (i + 1) * some]) for i in range(folds)]
        return [Part(pool[~held], pool[held]) for held in chosen]
    words = [text.split() for text in texts.train_text]
    whole = generator.permutation(np.intersect1d(sentences(words), pool))
    if len(whole) < folds:
        raise SpecError(f"{where}.unit: {len(whole)} whole sentences are too few for {folds} parts")
    some = size(len(whole))
    made = []
    for i in range(folds):
        part = whole[i * some : (i + 1) * some]
        inside = {phrase for row in part for phrase in _phrases(words[row])}
        made.append(Part(np.array([row for row in pool if " ".join(words[row]) not in inside]), part))
    return made


def sentences(words: Sequence[Sequence[str]]) -> Rows:
    """Return the numbers of the texts that are whole sentences: at least 8 words, and no phrase of another text.

    Example:
        >>> whole = "it is a good film after all ,".split()
        >>> sentences([["good", "film"], whole, whole[2:], "a film".split()])
        array([1])
    """
    seen: set[str] = set()
    found = []
    for row in sorted(range(len(words)), key=lambda row: -len(words[row])):
        if len(words[row]) < LEAST_WORDS:
            break
        if " ".join(words[row]) not in seen:
            found.append(row)
            seen.update(_phrases(words[row]))
    return np.array(sorted(found), dtype=np.int64)


def _phrases(words: Sequence[str]) -> set[str]:
    """Return all runs of words of a text."""
    return {" ".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
