"""Texts as sparse TF-IDF columns: classifiers of IMDB, SST-2 and AG News, chosen on held-out training rows.

Steps of a run:

1. Texts become TF-IDF columns, whose vocabulary and document frequencies are those of all training texts. They stay sparse.
2. Training rows are held out in parts, drawn by the seed; candidates are fitted to the other rows, and the one with the best mean
   accuracy on the parts is chosen.
3. The chosen one is fitted to all training rows, and scored once on the test rows.

The training rows of SST-2 are whole sentences and phrases of them. A random part would be known by heart, as the phrases of a
sentence lie on both sides. Held-out rows are whole sentences instead, as the test rows are, and every phrase within one of them is
left out of what is fitted (`unit: sentences`).
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kapsi.data.text import TextData, load_text
from kapsi.errors import SpecError
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures import classifiers
from kapsi.paper.procedures.choice import Pair, choose
from kapsi.paper.procedures.choice import Part as Held

__all__ = ["Part", "parts", "run", "sentences"]

DATA = ("imdb", "sst2", "ag_news")
OWN = (
    "data",
    "classifier",
    "ngrams",
    "min_df",
    "stop_words",
    "folds",
    "held_out",
    "unit",
    "limit_train",
    "limit_test",
    "most_rows",
)
LEAST_WORDS = 8
"""Words of the shortest held-out sentence: shorter texts that are in no other are mostly phrases of one that is not there."""
Rows = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Numbers of training rows: those to fit, and those to judge on."""

    kept: Rows
    held: Rows


def run(run: Run) -> Outcome:
    """Fit one classifier to the texts of a row, and score it once on the test rows.

    Options, beside those of the choice and of the kind (`procedures.classifiers.fit`): `data`, one of imdb, sst2, ag_news, by
    default the name of the row; `classifier`, a kind, of which `kan` is `SparseKAN` here; `ngrams`, [1, 1] or [1, 2]; `min_df`
    and `stop_words` of the columns; `held_out`, the number or the share of training rows in each of `folds` parts, at most half
    of them; `unit`, `rows` or `sentences`; `most_rows`, to which the training rows are cut, drawn by the seed, for methods that
    do not take more; `limit_train` and `limit_test`, which take the first rows.

    Raises:
        SpecError: an option that there is not, or one that does not fit.
    """
    where = f"{run.experiment}, {run.row}, {run.method}"
    started = time.process_time()
    options = copy.deepcopy(dict(run.options))
    own = {name: options.pop(name) for name in OWN if name in options}
    name = own.get("data", run.row)
    if name not in DATA:
        raise SpecError(f"{where}.data: expected one of {', '.join(DATA)}, got {name!r}")
    texts = limited(load_text(name, run.folder), own, where)
    ngrams = own.get("ngrams", [1, 1])
    if not isinstance(ngrams, list) or len(ngrams) != 2 or not all(isinstance(n, int) for n in ngrams):
        raise SpecError(f"{where}.ngrams: expected two whole numbers such as [1, 2], got {ngrams!r}")
    x, test_x = texts.tfidf(
        (ngrams[0], ngrams[1]), min_df=own.get("min_df", 5), stop_words=own.get("stop_words", "english")
    )
    y, classes = np.asarray(texts.train_y), int(max(texts.train_y.max(), texts.test_y.max())) + 1
    prepared = time.process_time() - started
    generator = np.random.default_rng(run.seed)
    pool = generator.permutation(len(y))[: own.get("most_rows") or len(y)]
    held = parts(texts, pool, own, generator, where)
    kind = classifiers.kind_of(own.get("classifier", "model"), tuple(classifiers.KINDS), where)
    pairs = [functools.partial(_rows_of, x, y, part) for part in held]
    fitted = best_of(kind, (x[pool], y[pool]), pairs, options, run.seed, classes=classes, where=where)
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


def best_of(
    kind: str, rows: Pair, parts: Sequence[Held], options: dict[str, Any], seed: int, *, classes: int, where: str
) -> classifiers.Fitted:
    """Return what is best on the parts of several variants, of equal ones the first, or the only one."""
    variants = options.pop("variants", None)
    if variants is None:
        return choose(kind, rows, parts, options, seed, classes=classes, where=where)
    if (
        not isinstance(variants, Mapping)
        or not variants
        or not all(isinstance(each, Mapping) for each in variants.values())
    ):
        raise SpecError(f"{where}.variants: expected {{name: {{options}}}}, got {str(variants)[:60]!r}")
    tried: list[tuple[Mapping[str, Any], float]] = []
    best: classifiers.Fitted | None = None
    seconds = 0.0
    for name, own in variants.items():
        made = choose(kind, rows, parts, {**options, **own}, seed, classes=classes, where=f"{where}.variants.{name}")
        if made.validation is None:
            raise SpecError(
                f"{where}.variants.{name}: give a grid, of one value at least, so that variants can be compared"
            )
        tried += [({"variant": name, **chosen}, accuracy) for chosen, accuracy in made.candidates]
        seconds += made.seconds
        if best is None or best.validation is None or made.validation > best.validation:
            best = replace(made, chosen={"variant": name, **made.chosen})
    return replace(cast(classifiers.Fitted, best), candidates=tuple(tried), seconds=seconds)


def _rows_of(x: Any, y: Rows, part: Part) -> tuple[Pair, Pair]:
    return (x[part.kept], y[part.kept]), (x[part.held], y[part.held])


def limited(texts: TextData, own: Mapping[str, Any], where: str) -> TextData:
    """Return the first rows of a data set."""
    train, test = own.get("limit_train"), own.get("limit_test")
    for name, value in (("limit_train", train), ("limit_test", test)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SpecError(f"{where}.{name}: expected a whole number of at least 1, got {value!r}")
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
    texts: TextData, pool: Rows, own: Mapping[str, Any], generator: np.random.Generator, where: str = "parts"
) -> list[Part]:
    """Return rows to fit and rows to judge on.

    Args:
        texts: of which the training rows count.
        pool: numbers of the rows that there are, in a random order.
        own: `folds` (1), `held_out` (0.25), `unit` (`rows`).
        generator: draws the sentences.
        where: begins the messages of errors.
    """
    folds, share, unit = own.get("folds", 1), own.get("held_out", 0.25), own.get("unit", "rows")
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 1:
        raise SpecError(f"{where}.folds: expected a whole number of at least 1, got {folds!r}")
    if isinstance(share, bool) or not (
        (isinstance(share, int) and share >= 1) or (isinstance(share, float) and 0 < share <= 0.5)
    ):
        raise SpecError(f"{where}.held_out: expected a number of rows, or a share above 0 and up to 0.5, got {share!r}")
    if unit not in ("rows", "sentences"):
        raise SpecError(f"{where}.unit: expected rows or sentences, got {unit!r}")

    def size(count: int) -> int:
        wanted = int(count * share) if isinstance(share, float) else share
        return max(1, min(wanted, count // max(2, folds)))

    if unit == "rows":
        some = size(len(pool))
        return [
            Part(np.setdiff1d(pool, held), held) for held in (pool[i * some : (i + 1) * some] for i in range(folds))
        ]
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
