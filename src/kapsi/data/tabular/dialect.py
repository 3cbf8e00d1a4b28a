"""How a text file is laid out: separator, header, comments, decimal mark."""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kapsi.data.tabular.numerals import decimal_mark
from kapsi.data.tabular.reading import Reading
from kapsi.data.tabular.types import NUMBER, listed, reject, short
from kapsi.data.tabular.words import MISSING_WORDS, WEAK_WORDS

SEPARATORS = ",;\t|"
COMMENTS = ("#", "%", "//")
MOST_RECORDS = 200
NUMERIC = re.compile(NUMBER.replace(r"\.?", "[.,]?").replace(r"|\.", "|[.,]"))
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$")
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)
NO_UNITS = ("missing", "unknown", "error", "invalid", "undefined", "pending", "tbd", "not available")
"""Words of a first row of values that may not be read yet."""
RULE = re.compile(r"\s*[-+=]*-{2,}\+[-+=]*\s*$|\s*\+[-=+]*-{2,}\+\s*$|\s*\|([ :]*-+[ :]*\|)+\s*$")
COUNT = re.compile(r"\(?\d+ rows?( in set.*| selected.*| affected.*)?\)?\.?", re.IGNORECASE)
"""The line below the names and the last line of a table as databases print it."""
PRINTED = (
    (
        "databases print tables",
        "export it as CSV (psql --csv, mysql --batch), or remove the ruled lines and the number of rows",
    ),
    ("Markdown has tables", "save it as CSV (DataFrame.to_csv), or remove the ruled lines and the outer bars"),
)
"""Where ruled lines without and with | come from, and remedies."""
BLANK_BEFORE_QUOTE = re.compile(r'(?:^|[,;\t|])[ \t]+"', re.MULTILINE)


@dataclass(frozen=True)
class Dialect:
    """The layout of a text file.

    Args:
        separator: character between values; a tab for values separated by blanks.
        names: names of the columns.
        start: number of characters before the first row.
        line: number of lines before the first row.
        width: number of values of a row.
        comment: beginning of comment lines, empty for none.
        blanks: whether values are separated by blanks.
        plain: whether Arrow can read the rows without repairs.
        decimal: decimal mark, None if unknown.
        notes: guesses, for the user.
    """

    separator: str
    names: tuple[str, ...]
    start: int
    line: int
    width: int
    comment: str = ""
    blanks: bool = False
    plain: bool = True
    decimal: str | None = None
    notes: tuple[str, ...] = ()

    def records(self, lines: Iterable[str]) -> Iterator[list[str]]:
        """Yield the values of each row; rows without any character are left out."""
        if self.comment:
            lines = (line for line in lines if not line.lstrip().startswith(self.comment))
        if self.blanks:
            for line in lines:
                if line.strip():
                    yield split_blanks(line)
            return
        for row in csv.reader(
            lines, delimiter=self.separator, skipinitialspace=not self.plain and self.separator != "\t"
        ):
            if row and (len(row) > 1 or row[0].strip() or self.width < 2):
                yield row


def split_blanks(line: str) -> list[str]:
    """Return the values of a line between blanks; blanks in quotes stay."""
    if '"' not in line:
        return line.split()
    return next(csv.reader([re.sub(r"[ \t]+", " ", line.strip())], delimiter=" "))


def find_dialect(text: str, complete: bool, reading: Reading, where: str, default: str = ",") -> Dialect:
    """Return the layout of a text by the first lines.

    Args:
        text: the beginning of the text.
        complete: whether the text is whole; otherwise the last line is left out.
        reading: options of the user, instead of guesses.
        where: name of the file, for messages.
        default: separator of a file with a single column.

    Raises:
        TableError: there is no header, or lines before it.
    """
    lines = LINE.findall(text)
    mark = SEPARATOR_LINE.fullmatch(lines[0]) if lines and not reading.skip else None
    if mark:  # as Excel writes it
        reading = replace(reading, skip=1, separator=reading.separator or mark[1])
    lines = lines if complete or len(lines) < 2 else lines[:-1]
    first, commented, comment, notes = _first_line(lines, reading)
    if first >= len(lines) and commented is None:
        if reading.skip >= len(lines) > 0 and complete:
            reject(where, f"--skip {reading.skip} leaves out all {len(lines)} lines; give a smaller number")
        reject(where, "the file is empty; a table has a header line and at least one row")
    body = lines[first:]
    for number, line in enumerate(body[:3], first + 1):
        if RULE.match(line) and len(body) > 1:
            source, remedy = PRINTED["|" in line]
            reject(where, f"line {number} is a ruled line, as {source}; {remedy}")
    separator, blanks = _separator(body, reading, default)
    # Lines of wide tables have megabytes.
    plain = '"' not in text or not BLANK_BEFORE_QUOTE.search("".join(body))
    draft = Dialect(separator, (), 0, first, 2, comment, blanks, plain=plain)
    counted = _counted(draft, body)
    names = _fields(draft, commented) if commented else []
    if (
        counted
        and len(names) == len(counted[0][0]) > 1
        and not _looks_like_values(names)
        and _is_a_row(*[row for row, _ in counted])
    ):
        counted.insert(0, (names, 0))
        notes = ()
    if not counted:
        reject(where, "the file is empty; a table has a header line and at least one row")
    if (
        not comment
        and reading.comment is None
        and (marked := [row for row, _ in counted[1:] if row[0].startswith("#")])
        and all(len(row) != len(counted[0][0]) for row in marked)
    ):
        draft, notes = (
            replace(draft, comment="#", plain=False),
            (*notes, "lines that begin with # are left out; give --comment for another sign"),
        )
        counted = _counted(draft, body)
    return _with_header(draft, counted, lines, reading, where, notes)


def _first_line(lines: Sequence[str], reading: Reading) -> tuple[int, str | None, str, tuple[str, ...]]:
    """Return the number of the first line without a comment sign, the last comment, the sign of comments, and notes."""
    first = min(reading.skip, len(lines))
    signs = COMMENTS if reading.comment is None else (reading.comment,)
    commented, count = None, 0
    while first < len(lines):
        line = lines[first].strip()
        sign = next((sign for sign in signs if line.startswith(sign)), None)
        if line and sign is None:
            break
        if line and sign is not None:
            commented, count = line.removeprefix(sign).strip(), count + 1
        first += 1
    if reading.comment is not None:
        return first, None, reading.comment, ()
    notes = (f"left out {count} comment line{'s' * (count > 1)} at the beginning",) if count else ()
    return first, commented, "", notes


def _fields(dialect: Dialect, line: str) -> list[str]:
    return next(dialect.records([line]), [])


def _counted(dialect: Dialect, lines: Sequence[str]) -> list[tuple[list[str], int]]:
    """Return the first rows, each with the number of lines up to its end."""
    found: list[tuple[list[str], int]] = []
    position = 0

    def watched() -> Iterator[str]:
        nonlocal position
        for line in lines:
            position += 1
            yield line

    try:
        for row in dialect.records(watched()):
            found.append((row, position))
            if len(found) >= MOST_RECORDS:
                break
    except csv.Error:
        if not found:
            raise
    return found


def _separator(lines: Sequence[str], reading: Reading, default: str) -> tuple[str, bool]:
    """Return the separator, and whether values are separated by blanks."""
    if reading.separator is not None:
        return ("\t", True) if reading.separator == "whitespace" else (reading.separator, False)
    best: tuple[tuple[bool, int, int], str] = ((False, 0, 0), default)
    for mark in SEPARATORS:
        counts = []
        with contextlib.suppress(csv.Error):
            counts = [len(row) for row, _ in _counted(Dialect(mark, (), 0, 0, 2), lines)]
        if not counts:
            continue
        mode, share = _mode(counts)
        score = (mode > 1 and share >= 0.8, counts[0], int(mark == default))
        best = max(best, (score, mark), key=lambda pair: pair[0])
    if best[0][1] < 2:  # the separator is not in the header
        rows = [split_blanks(line) for line in lines[:MOST_RECORDS] if line.strip()] if _splits(lines) else []
        mode, share = _mode([len(row) for row in rows]) if len(rows) > 1 else (1, 0.0)
        # Commas between the values may be decimal commas, if the header has as many names.
        header = not best[0][0] or (best[1] == "," and len(rows[0]) == mode)
        values = [value for row in rows[1:] for value in row]
        if mode > 1 and share >= 0.8 and header and sum(_is_value(value) for value in values) * 2 >= len(values):
            return "\t", True
    return best[1], False


def _splits(lines: Sequence[str]) -> bool:
    return all(line.count('"') % 2 == 0 for line in lines[:MOST_RECORDS])


def _mode(counts: Sequence[int]) -> tuple[int, float]:
    """Return the most frequent number (the first of equals) and the share."""
    number, rows = Counter(counts).most_common(1)[0]
    return number, rows / len(counts)


def _is_number(word: str) -> bool:
    return bool(NUMERIC.match(word.strip()))


def _is_missing(word: str) -> bool:
    return word.strip().lower() in MISSING_WORDS or word.strip() in WEAK_WORDS


def _is_value(word: str) -> bool:
    return _is_number(word) or _is_missing(word)


def _is_a_row(first: Sequence[str], *others: Sequence[str]) -> bool:
    """Return whether the first line below a comment is a row: it looks like values, or has a number in a column of numbers."""
    return _looks_like_values(first) or any(_is_number(word) and _numeric(others, i) for i, word in enumerate(first))


def _looks_like_values(row: Sequence[str]) -> bool:
    """Return whether at least half of the names of a header are numbers, other than column numbers or years in order."""
    numbers = [name.strip() for name in row if _is_number(name)]
    if 2 * len(numbers) < len(row) or not numbers:
        return False
    if all(number.isdigit() for number in numbers):
        values = [int(number) for number in numbers]
        return any(b <= a for a, b in itertools.pairwise(values))
    return True


def _with_header(
    draft: Dialect,
    counted: list[tuple[list[str], int]],
    lines: Sequence[str],
    reading: Reading,
    where: str,
    notes: tuple[str, ...],
) -> Dialect:
    """Return the dialect with the names of the columns and the position of the first row."""
    header, used = counted[0]
    rows = [row for row, _ in counted[1:]]
    _check_preamble(header, counted, reading, draft.line, where)
    plain = draft.plain and not draft.blanks and not draft.comment
    if reading.header is None and _looks_like_values(header):
        reject(
            where,
            f"the first line looks like a row, not like names: {listed(header, 5)}; add a line of names, or give --no-header for "
            "names 'column 1', 'column 2', …, or --header to take the line as names",
        )
    if reading.header is False:
        names, used = [""] * len(header), 0
        rows = [header, *rows]
    else:
        names = [name.strip() for name in header]
    width = _mode([len(row) for row in rows])[0] if rows else len(names)
    trailing = all(len(row) < width or not row[-1].strip() for row in rows)
    if width == len(names) + 1 and len(names) > 1 and (trailing or _name_rows([row[0].strip() for row in rows])):
        # Separators at the ends of rows, or names of rows as R writes them, without a name of their own.
        if not trailing:
            notes = (*notes, f"the header has {width - 1} names, the rows {width} values: the first one names the rows")
        names = [*names, ""] if trailing else ["", *names]
        plain = plain and trailing
    unit_row = _units(names, rows) if reading.header is not False else None
    if unit_row is not None:
        used = counted[1][1]
        units = f"it has units ({listed(unit_row, 5)}) instead of values"
        reason = "it repeats the names" if [*map(str.strip, rows[0])] == names else units
        reason = reason if any(any(map(str.isalnum, word)) for word in unit_row) else "it is a ruled line"
        notes = (*notes, f"left out the first row: {reason}")
        rows = rows[1:]
    taken = lines[: draft.line + used]
    return replace(
        draft,
        names=tuple(names),
        start=sum(map(len, taken)),
        line=len(taken),
        width=len(names),
        plain=plain,
        decimal=reading.decimal or decimal_mark(itertools.chain.from_iterable(rows)),
        notes=notes,
    )


def _name_rows(words: Sequence[str]) -> bool:
    """Return whether words are names of rows: distinct texts, or numbers from 1."""
    counted = list(words) == [str(i) for i in range(1, len(words) + 1)]
    return len(words) > 2 and (counted or (len(set(words)) == len(words) and not any(map(_is_number, words))))


def _check_preamble(
    header: Sequence[str], counted: Sequence[tuple[list[str], int]], reading: Reading, before: int, where: str
) -> None:
    """Refuse lines before the header, with advice."""
    mode, share = _mode([len(row) for row, _ in counted])
    if len(header) > 2 and len(counted) > 2 and not any(word.strip() for word in header[1:]):
        first = next((i for i, (row, _) in enumerate(counted) if sum(1 for word in row if word.strip()) > 1), 0)
        if first:
            skip = before + counted[first - 1][1]
            advice = f"--skip {skip} leaves out the lines before the header"
            reject(where, f"line {before + 1} has one name ({listed(header[:1])}) and empty ones; {advice}")
    if (len(header) in (mode, mode - 1) and (len(header) > 1 or mode < 2)) or mode < 2 or share < 0.6:
        return
    index = next(i for i, (row, _) in enumerate(counted) if len(row) == mode)
    skip = before + (counted[index - 1][1] if index else 0)
    if index and len(header) < mode:
        values = "1 value" if len(header) == 1 else f"{len(header)} values"
        reject(
            where,
            f"line {before + 1} has {values} ({listed(header, 3)}), and most lines have {mode}; "
            f"--skip {skip} leaves out the lines before the header",
        )


def _units(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str] | None:
    """Return the first row if at least two columns have a word there and only numbers below."""
    if len(rows) < 4 or len(rows[0]) != len(names):
        return None
    words = {i: word.strip() for i, word in enumerate(rows[0]) if word.strip() and not _is_value(word)}
    if all(word.lower() in NO_UNITS for word in words.values()):
        return None
    units = [word for i, word in words.items() if _numeric(rows[1:], i)]
    if len(units) < 2:
        return None
    # The unit of a number without dimension is 1.
    numbers = [i for i, word in enumerate(rows[0]) if _is_number(word) and word.strip() != "1"]
    if any(_numeric(rows[1:], i) for i in numbers):
        return None
    return units


def _numeric(rows: Sequence[Sequence[str]], index: int) -> bool:
    """Return whether a column has numbers and missing values only."""
    values = [row[index] for row in rows if len(row) > index]
    return any(map(_is_number, values)) and all(map(_is_value, values))


def ragged(row: Sequence[str], line: int, dialect: Dialect) -> str:
    """Return a message about a row with too few or too many values."""
    mark = "blanks" if dialect.blanks else repr(dialect.separator)
    hint = f"; --comment {row[0].strip()[:1]} leaves out such lines" if row[0].strip()[:1] in ("#", "%", "/") else ""
    values = "1 value" if len(row) == 1 else f"{len(row)} values"
    if len(row) == 1 and COUNT.fullmatch(row[0].strip()):
        return f"line {line} is {short(row[0].strip())}, no row; remove the line"
    if len(row) == 1 and not hint:
        hint = ", or remove the line if it is no row"
    return f"line {line} has {values}, the header has {dialect.width}; quote values that hold {mark}{hint}"
