"""The distinct strings of a column, and which of them are missing values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.types import BLANKS, Column, Floats, short

MANY = 20
DASH, CATEGORY = "a dash or dot", "a category"
MISSING_WORDS = (
    *("", "?", "na", "n/a", "#n/a", "n.a.", "<na>", "nan", "-nan", "nat", "null", "(null)", "none", r"\n"),
    *("#div/0!", "#value!", "#ref!", "#num!", "#name?", "#null!", "1.#ind", "1.#qnan"),
)
"""Spellings of missing values, compared in lower case."""
WEAK_WORDS = ("-", "--", "–", "—", ".", "..", "...")
"""Missing beside numbers, dates and words; an ordinary category beside other signs such as +."""
TO_ASCII = {
    **{zero + digit: str(digit) for zero in (0x660, 0x6F0, 0x966, 0x9E6, 0xFF10) for digit in range(10)},
    **dict(
        zip((0x66B, 0xFF0E, 0x66C, 0xFF0C, 0x66A, 0xFF05, 0xFF0D, 0xFF0B, 0xFF1A, 0xFF0F), "..,,%%-+:/", strict=True)
    ),
}
"""Arabic-Indic, Persian, Devanagari, Bengali and full-width digits, and the marks beside them."""
SUMMARIES: Mapping[str, Callable[..., Any] | None] = {
    **dict.fromkeys(("total", "totals", "grand total", "sum", "summe", "gesamt", "somme"), np.nansum),
    **dict.fromkeys(("mean", "average", "avg", "mittelwert", "durchschnitt", "moyenne", "promedio"), np.nanmean),
    **dict.fromkeys(("median", "std", "sd", "stdev", "min", "max", "minimum", "maximum", "count", "25%", "50%", "75%")),
}
"""Names of rows that summarize the other rows, in lower case, and their statistics; the last ones only stand beside others.

An ordinary row often has the median of whole numbers."""


@dataclass(frozen=True, eq=False)
class Words:
    """The distinct strings of a column.

    Args:
        codes: index of each value in the distinct strings, (rows,).
        all: distinct strings, an Arrow array.
        missing: mask of the missing strings.
        weak: mask of dashes and dots.
        known: the other strings without blanks around, an Arrow array.
        name: name of the column.
        form: how the strings are written, for a comparison with further rows.
    """

    codes: npt.NDArray[Any]
    all: Any
    missing: npt.NDArray[np.bool_]
    weak: npt.NDArray[np.bool_]
    known: Any
    name: str
    form: Mapping[str, str]

    @classmethod
    def of(
        cls,
        column: Any,
        name: str,
        declared: Sequence[str] = (),
        fitted: Collection[str] | None = None,
        *,
        typed: bool = False,
        free: bool = False,
        signed: bool = False,
    ) -> Words:
        """Find the distinct strings and the missing strings.

        Args:
            column: an Arrow column of strings.
            name: the name of the column.
            declared: missing values stated by the user.
            fitted: categories of a fit, none of them is missing; None without.
            typed: whether the file has types, as Parquet: without a fit, only the declared strings are missing.
            free: whether the text is read word by word.
            signed: whether dashes of earlier rows were categories.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if isinstance(column, pa.ChunkedArray):
            column = column.unify_dictionaries() if pa.types.is_dictionary(column.type) else column
            column = column.combine_chunks()
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        every = pc.cast(column.dictionary, pa.large_string())
        codes = pc.fill_null(column.indices, len(every)).to_numpy(zero_copy_only=False)
        trimmed = pc.utf8_trim(every, characters=BLANKS + "\u00a0")
        trimmed = pc.replace_substring_regex(trimmed, r'^="([^"]*)"$', r"\1")  # a formula of Excel
        given = pc.is_in(trimmed, value_set=pa.array([word.strip(BLANKS) for word in declared], trimmed.type))
        weak = pc.is_in(trimmed, value_set=pa.array(WEAK_WORDS, trimmed.type))
        as_written, missing = typed and fitted is None, given
        if not as_written:
            missing = pc.or_(given, pc.is_in(pc.utf8_lower(trimmed), value_set=pa.array(MISSING_WORDS, trimmed.type)))
        if fitted is not None:
            seen = pc.is_in(trimmed, value_set=pa.array([word.strip(BLANKS) for word in fitted], trimmed.type))
            missing = pc.and_(missing, pc.or_(pc.invert(seen), given))
            weak = pc.and_(weak, pc.invert(seen))
        masks = [np.array(mask.to_numpy(zero_copy_only=False), dtype=np.bool_) for mask in (missing, weak)]
        masks[1] &= ~masks[0]
        # A dash beside + is a category, unless the user or a fit states otherwise; in a text of many words it is missing.
        signs = pc.invert(pc.match_substring_regex(trimmed, r"[\pL\pN]")).to_numpy(zero_copy_only=False)
        signed = signed or bool((np.asarray(signs, dtype=np.bool_) & ~masks[0] & ~masks[1]).any())
        form = {}
        if fitted is None and not typed and not free:
            form = {DASH: CATEGORY if signed else "missing"} if signed or masks[1].any() else {}
        if as_written or form.get(DASH) == CATEGORY:
            masks[1][:] = False
        known = trimmed.filter(pa.array(~(masks[0] | masks[1])))
        return cls(codes, every, masks[0], masks[1], known, name, form)

    def with_ascii_digits(self) -> Words:
        """Return the strings with the digits and marks of other scripts, such as full-width ones, as ASCII."""
        import pyarrow as pa

        if not self.any_match(f"[{''.join(map(chr, TO_ASCII))}]"):
            return self
        return replace(self, known=pa.array([word.translate(TO_ASCII) for word in self.list], self.known.type))

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def count(self) -> int:
        """Number of distinct strings without missing ones."""
        return len(self.known)

    @property
    def list(self) -> list[str]:
        """The known strings."""
        return list(self.known.to_pylist())

    @property
    def has_digits(self) -> bool:
        """Whether a known string has a digit."""
        return self.any_match("[0-9]")

    def has(self, part: str) -> bool:
        """Return whether a known string has a part; an empty part is in none."""
        import pyarrow.compute as pc

        return bool(part) and bool(pc.any(pc.match_substring(self.known, part)).as_py())

    def first(self, pattern: str) -> str:
        """Return the first known string that matches a regular expression, empty without one."""
        import pyarrow.compute as pc

        found = self.known.filter(pc.match_substring_regex(self.known, pattern))
        return found[0].as_py() if len(found) else ""

    def any_match(self, pattern: str) -> bool:
        """Return whether a known string matches a regular expression."""
        import pyarrow.compute as pc

        return bool(pc.any(pc.match_substring_regex(self.known, pattern)).as_py())

    def all_match(self, pattern: str) -> bool:
        """Return whether all known strings match a regular expression."""
        import pyarrow.compute as pc

        return bool(pc.all(pc.match_substring_regex(self.known, pattern)).as_py())

    def spread(self, values: Floats) -> Floats:
        """Return values of the known strings for all rows, missing as NaN."""
        every = np.full(len(self.all) + 1, np.nan)
        every[:-1][~(self.missing | self.weak)] = values
        return np.asarray(every[self.codes])

    def counts(self) -> npt.NDArray[np.int64]:
        """Return the number of rows of each distinct string."""
        return np.bincount(self.codes, minlength=len(self.all) + 1)[: len(self.all)]

    def share(self, values: Floats) -> float:
        """Return the fraction of rows with a value other than NaN, without missing rows."""
        counts = self.counts()[~(self.missing | self.weak)]
        return float(counts[~np.isnan(values)].sum() / max(1, counts.sum()))

    def other(self, kind: str, values: Floats, remedy: str = "") -> str:
        """Return a message about the strings of another kind, NaN among the values; the default remedy declares missing values."""
        counts, known = self.counts(), ~(self.missing | self.weak)
        good = np.zeros(len(self.all), dtype=np.bool_)
        good[known] = ~np.isnan(values)
        odd = np.flatnonzero(~good & ~self.missing)
        first = np.full(len(self.all) + 1, self.rows)
        np.minimum.at(first, self.codes, np.arange(self.rows))
        odd = odd[np.argsort(first[odd], kind="stable")]
        found = [short(self.all[int(i)].as_py()) for i in odd[:10]]
        words = [f"{word} (row {first[i] + 1})" for word, i in zip(found, odd, strict=False)]
        more = f" and {len(odd) - 10} more" if len(odd) > 10 else ""
        total = int(counts[~self.missing].sum())
        options = " ".join(f"--missing {word}" for word in found)
        if not remedy and all(summary(self.all[int(i)].as_py()) for i in odd):
            remedy = "remove the rows that summarize others"
        if not remedy and len(odd) == 1 and first[odd[0]] == self.rows - 1 > MANY:
            options = f"remove the last row if it is a sum or a comment; {options}"
        remedy = remedy or f"{options if len(odd) <= 3 else '--missing WORD for each'} treats them as missing"
        return f": {int(counts[good].sum())} of {total} values are {kind}; not: {', '.join(words)}{more}; {remedy}"

    def text(self, reason: str, *, free: bool = False) -> Column:
        """Return the column as text, without blanks around the strings."""
        strings: list[str] = self.list
        words = sorted(set(strings))
        place = {word: i for i, word in enumerate(words)}
        position = np.full(len(self.all) + 1, -1, dtype=np.int64)
        position[:-1][~(self.missing | self.weak)] = [place[word] for word in strings]
        return Column("text", codes=position[self.codes], words=words, reason=reason, free=free, form=self.form)


def summary(word: str) -> str:
    """Return the key of `SUMMARIES` of a name of a row, empty for other names.

    Example:
        >>> summary(" Grand Total:"), summary("Mean Green")
        ('grand total', '')
    """
    name = word.strip(BLANKS + ":*").lower()
    return name if name in SUMMARIES else ""
