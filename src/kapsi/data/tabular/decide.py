"""Decide the type of each column, with the reason, notes for the user, and problems."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kapsi.data.tabular.dates import GAP, HALF, MONTH_NAME, NAMED_ZONE, read_dates, read_durations, read_times
from kapsi.data.tabular.numerals import (
    ADDRESS,
    CLOCK_WORD,
    LEAST_WITH_UNIT,
    MULTIPLES,
    SIGN,
    SUFFIXED,
    TELEPHONE,
    UNITS,
    Numbers,
    Numerals,
    is_number,
    read_numbers,
    units_of,
)
from kapsi.data.tabular.pictures import may_be_images, read_images
from kapsi.data.tabular.reading import Reading
from kapsi.data.tabular.types import (
    REQUESTED,
    Column,
    Floats,
    Kind,
    is_truth,
    listed,
    parse_numbers,
    short,
    to_floats,
)
from kapsi.data.tabular.units import CLOCK, DURATION, PAIRS, TIME_OF_DAY, problem_of_stated, zone_of
from kapsi.data.tabular.words import CATEGORY, DASH, MANY, Words

INTEGER = r"^[+-]?\d+$"
IN_UTC, ZONE = r":\d\d.*(Z|UTC|GMT)( \d{4})?$", r":\d\d.*[+-]\d\d(:?\d\d)?$"
NO_ZONE = rf"[T ]\d\d?:\d\d(:\d\d([.,]\d+)?)?({GAP}{HALF})?( \d{{4}})?$"
"""Times in UTC, with an offset from UTC, and without a zone."""
SIGN_TRAIT = "the sign"
TRUE, FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")
"""Spellings of flags; a column of numbers alone is none."""
ZERO_FIRST = r"^[+-]?0\d+$"
SIDES = r"(?i)(\d) ?(cr|dr)\.?$"
"""A credit or a debit: which of them is positive depends on the account."""
MOSTLY, NEARLY = 0.5, 0.9
SEVERAL_WORDS = 3
DATES = (19000101, 21001231)
"""Limits of whole numbers that may be dates."""


@dataclass(frozen=True, eq=False)
class Decider:
    """Decisions about the columns of a table.

    Args:
        reading: options of the user.
        kinds: kind of some columns by name: "numeric", "categorical", "text", "image" or "date"; behind "date " may stand the
            form of the dates of a fit, which decides between forms that fit equally well.
        decimal: the decimal mark of the file, None if unknown.
        typed: whether the file has types, as Parquet: texts stay texts, except for dates and numbers with a decimal mark.
        grouped: whether points may stand between thousands without other evidence in the file.
        options: whether the user can give options of reading; not for data frames.
        categories: categories of a fit by column; they are not missing, missing words and dashes that are none of them are.
        forms: how the values of earlier rows are written, by column; None for a table that is decided at once.
        folder: the folder of the table, for paths of images; None without.
    """

    reading: Reading
    kinds: Mapping[str, str] = field(default_factory=dict)
    decimal: str | None = None
    typed: bool = False
    grouped: bool = False
    options: bool = True
    categories: Mapping[str, Collection[str]] = field(default_factory=dict)
    forms: dict[str, dict[str, str]] | None = None
    folder: Path | None = None

    @property
    def settled(self) -> str | None:
        """The decimal mark of all numbers: given, implied by the thousands separator, or of the file."""
        return self.reading.decimal or {".": ",", ",": "."}.get(self.reading.thousands or "", self.decimal)

    @property
    def numbers(self) -> str:
        """The reason of a column of real numbers."""
        return str(Numerals(",")) if self.settled == "," and not self.typed else "numbers"

    @property
    def sentinels(self) -> Floats:
        """The numbers declared missing by the user."""
        import pyarrow as pa

        numbers = parse_numbers(pa.array([word.strip() for word in self.reading.missing], pa.large_string()))
        return numbers[~np.isnan(numbers)]

    def column(self, name: str, column: Any) -> Column:
        """Return an Arrow column as a typed column."""
        return self.as_before(name, self.stated(name, self._decided(name, column)))

    def stated(self, name: str, column: Column) -> Column:
        """Return a column with the unit stated by the user, if any."""
        unit = self.reading.units().get(name)
        if unit is None:
            return column
        problem = problem_of_stated(column, unit)
        if problem:
            return unusable(len(column), problem)
        column.unit = unit
        column.form = {trait: form for trait, form in column.form.items() if trait != SIGN_TRAIT}
        return column

    def as_before(self, name: str, column: Column) -> Column:
        """Return a column, as unusable if its values are written in another way than those of earlier rows."""
        if self.forms is None:
            return column
        before = self.forms.setdefault(name, {})
        for trait, form in column.form.items():
            if before.setdefault(trait, form) != form:
                earlier = f"{trait} is {form} here, and {before[trait]} in earlier rows"
                return unusable(len(column), f": {earlier}; write all values in one way")
        return column

    def _before(self, name: str, trait: str) -> str:
        """Return how the values of earlier rows are written, empty if unknown."""
        return (self.forms or {}).get(name, {}).get(trait, "")

    def _decided(self, name: str, column: Any) -> Column:
        import pyarrow as pa
        import pyarrow.compute as pc

        kind, wanted = column.type, self.kinds.get(name, "").partition(" ")[0]
        if wanted == "image" or may_be_images(kind):
            images = self.images(name, [column])
            if images is not None:
                return images
        if pa.types.is_dictionary(kind) and not _is_string(kind.value_type):
            return self._decided(name, pc.cast(column, kind.value_type))
        if pa.types.is_dictionary(kind) or _is_string(kind):
            return self._strings(name, column, wanted)
        typed = self._typed(column)
        if typed.problem:
            typed.problem += f" with --drop {short(name)}" if self.options else ""
            return typed
        if wanted in ("categorical", "text"):
            strings = pc.cast(pc.cast(column, pa.string()), pa.large_string())
            return self._strings(name, strings, wanted)
        compact = typed.kind == "integer" and _are_compact_dates(typed.numbers)
        if wanted == "date" and compact:
            return self._strings(name, pc.cast(pc.cast(column, pa.string()), pa.large_string()), wanted)
        if wanted == "date" and typed.kind != "date" and not typed.missing.all():
            return unusable(len(typed), f" is to be a date, and has {typed.reason}; give a column of dates")
        if wanted == "numeric" and typed.kind == "date":
            if name not in self.reading.numeric:
                return unusable(len(typed), f" has {typed.reason}, and the model needs numbers; give numbers")
            return Column("real", typed.values, reason="seconds since 1970")
        if pa.types.is_integer(kind) and not wanted and _are_huge(pc.min_max(column).as_py().values()):
            return self._codes(self._words(name, pc.cast(pc.cast(column, pa.string()), pa.large_string())))
        found = self._without_sentinels(typed)
        if typed.unit == DURATION:
            found.notes = (f"column {short(name)} has durations; read as seconds",)
        if compact and not wanted:
            example = f"{np.nanmin(typed.numbers):.0f}"
            advice = f"--date {short(name)} reads dates" if self.options else "pd.to_datetime makes them dates"
            found.notes = (f"column {short(name)} has whole numbers such as {example}; {advice}",)
        return found

    def _typed(self, column: Any) -> Column:
        """Return a column of numbers, booleans, dates or times."""
        import pyarrow as pa
        import pyarrow.compute as pc

        kind = column.type
        if column.null_count == len(column):
            return Column("real", np.full(len(column), np.nan), reason="no values")
        if pa.types.is_boolean(kind):
            return Column("boolean", to_floats(column), reason="true and false")
        if pa.types.is_integer(kind):
            fits = kind != pa.uint64() or pc.max(column).as_py() < 2**63
            return Column("integer" if fits else "real", to_floats(column), reason="whole numbers")
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return Column("real", to_floats(column), reason=self.numbers)
        if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            seconds, zoned = _seconds(column), getattr(kind, "tz", None) is not None
            clocks = bool((np.nan_to_num(seconds) % 86_400).any())
            return Column("date", seconds, reason="dates", unit=zone_of(zoned=zoned, unzoned=clocks and not zoned))
        if pa.types.is_time(kind):
            whole = pc.cast(column, pa.int32() if kind.bit_width == 32 else pa.int64())
            values = to_floats(whole) / _ticks(kind.unit)
            return Column("real", values, reason="times of the day, in seconds", unit=TIME_OF_DAY)
        if pa.types.is_duration(kind):
            values = to_floats(pc.cast(column, pa.int64())) / _ticks(kind.unit)
            return Column("real", values, reason="durations, in seconds", unit=DURATION)
        allowed = "numbers, booleans, text, dates and times"
        return unusable(len(column), f" has the type {kind}; allowed are {allowed}; convert it, or leave it out")

    def images(self, name: str, parts: Iterable[Any]) -> Column | None:
        """Return Arrow arrays as a column of images, see `read_images`."""
        drop = f", or leave the column out with --drop {short(name)}" if self.options else ""
        return read_images(name, parts, self.folder, drop, requested=self.kinds.get(name) == "image")

    def _codes(self, words: Words) -> Column:
        """Return whole numbers of more digits than float64 as text."""
        column = words.text("whole numbers above 2**53")
        advice = "--numeric rounds them" if self.options else "convert them to float to use them as numbers"
        column.notes = (f"whole numbers above 2**53, such as {short(words.list[0])}, are codes; {advice}",)
        return column

    def _without_sentinels(self, column: Column) -> Column:
        """Return a column of numbers with missing values in place of the numbers declared missing by the user."""
        if not self.reading.missing or column.kind not in ("integer", "real"):
            return column
        return column.with_values(np.where(np.isin(column.numbers, self.sentinels), np.nan, column.numbers))

    # -------------------------------------------------------------------------------------------- strings

    def _words(self, name: str, column: Any) -> Words:
        """Return the distinct strings of a column."""
        given, fitted = self.reading.missing, self.categories.get(name)
        free, signed = self.kinds.get(name) == "text", self._before(name, DASH) == CATEGORY
        return Words.of(column, name, given, fitted, typed=self.typed, free=free, signed=signed)

    def _strings(self, name: str, column: Any, wanted: str) -> Column:
        """Return a column of strings; each distinct string is judged once."""
        untyped = replace(self, typed=False)
        words = (untyped if wanted in ("numeric", "date") else self)._words(name, column)
        if words.count == 0 and wanted not in ("categorical", "text"):
            return Column("real", np.full(len(column), np.nan), reason="no values")
        if wanted in ("categorical", "text"):
            return words.text(REQUESTED, free=wanted == "text")
        read = words.with_ascii_digits()
        if wanted == "date":
            return self._dates(read) or self._other(name, "dates", read, read_dates(read.known)[0])
        if wanted == "numeric":
            found = self._flags(read) or self._seconds_of(read) or self._numbers(read, True)
            if found is None and name in self.reading.numeric and (dates := self._dates(read)):
                return dates if dates.problem else Column("real", dates.values, reason="seconds since 1970")
            return found or self._other(name, "numbers", read)
        if self.typed:
            found = self._dates(read) or self._seconds_of(read) or untyped._written_numbers(name, column)
            return found or words.text("text")
        return self._guess(name, words)

    @staticmethod
    def _flags(words: Words) -> Column | None:
        """Return the column as booleans if all strings are true or false, or 1 and 0 beside them; otherwise None."""
        import pyarrow as pa
        import pyarrow.compute as pc

        lower = pc.utf8_lower(words.known)
        known = pc.is_in(lower, value_set=pa.array([*TRUE, *FALSE], lower.type))
        if not pc.all(known).as_py() or not words.any_match("(?i)^(true|false)$"):
            return None
        flags = pc.is_in(lower, value_set=pa.array(TRUE, lower.type)).to_numpy(zero_copy_only=False)
        form = {"the form": "true and false"}
        return Column("boolean", words.spread(flags.astype(np.float64)), reason="true and false", form=form)

    def _written_numbers(self, name: str, column: Any) -> Column | None:
        """Return texts of a typed file as numbers if some have a decimal mark; None for other texts, such as codes."""
        words = self._words(name, column)
        if not words.with_ascii_digits().any_match(rf"^\W?({SIGN})? ?[\d.,]*[.,]\d"):
            return None
        guess = self._guess(name, words)
        if guess.kind not in ("integer", "real"):
            return guess if guess.problem else None
        advice = f"; --categorical {short(name)} keeps the text" if self.options else ", read as numbers"
        guess.notes = (f"column {short(name)} has numbers written as text{advice}",)
        return guess

    def _other(self, name: str, kind: str, words: Words, values: Floats | None = None) -> Column:
        """Return an unusable column with a message about the strings of another kind: NaN among the values."""
        return unusable(
            words.rows, self._problem(name, kind, words, self._read(words).values if values is None else values), words
        )

    def _problem(self, name: str, kind: str, words: Words, values: Floats) -> str:
        """Return a message about the strings of another kind: NaN among the values."""
        odd = [word for word, value in zip(words.list, values, strict=True) if value != value]
        signed = self._read(words, units=True, partly=".+") if kind == "numbers" else Numbers(values)
        if signed.bare and not np.isnan(signed.values).any():
            stated = f", or --unit {short(name)}={signed.signs} takes 12 as 12{signed.signs}" if self.options else ""
            return words.other("numbers without a unit", values, f"write the unit behind all of them{stated}")
        units = units_of(odd) if kind == "numbers" else {}
        if len(units) > 1:
            return words.other(kind, values, f"the units are {listed(units)}; convert all values to one unit")
        if kind == "numbers" and odd and not any(map(is_truth, odd)) and all(map(is_number, odd)):
            return words.other(kind, values, "write decimal marks and separators of thousands alike in all of them")
        if kind == "numbers" and np.isnan(times := _times(words.known)).sum() < len(odd):
            kind, values = "times", times
        if [word.lower() for word in odd] == [name.lower()]:
            return words.other(kind, values, "remove the lines that repeat the header")
        if words.share(flags := _flags_among(words)) >= max(MOSTLY, words.share(values)):
            kind, values = "true or false", flags
        return words.other(kind, values, "" if self.options else "correct or empty them")

    def _guess(self, name: str, written: Words) -> Column:
        words = written.with_ascii_digits()
        guess = self._flags(words) or self._numbers(words) or self._seconds_of(words) or self._dates(words)
        if guess is not None:
            return guess
        other = self._otherwise(words)
        if other:
            return unusable(words.rows, other, words)
        numbers = self._read(words).values
        signed = self._read(words, partly=".+" if np.isnan(numbers).sum() > LEAST_WITH_UNIT else "[%‰]")
        if signed.bare and not np.isnan(signed.values).any():
            return self._other(name, "numbers", words, numbers)
        numbers = max(signed.values, numbers, key=words.share)
        flags = words.share(_flags_among(words))
        share = max(words.share(numbers), flags if flags >= NEARLY else 0.0)
        odd = [word for word, number in zip(words.list, numbers, strict=True) if number != number]
        wordy = any(not any(letter.isdigit() for letter in word) for word in odd)
        many = int((~np.isnan(numbers)).sum()) > MANY
        if (share >= MOSTLY and many) or (share >= NEARLY and wordy and len(words.known) > SEVERAL_WORDS):
            return self._other(name, "numbers", words, numbers)
        mixed = (_dates_without_year(words) or _mixed_units(words)) if len(words.known) > MANY else ""
        if mixed:
            keep = f", or keep the texts with --categorical {short(name)}" if self.options else ""
            return unusable(words.rows, mixed + keep, words)
        for kind, read in (("dates of one form", lambda known: read_dates(known)[0]), ("times", _times)):
            values = read(words.known) if words.has_digits else np.empty(0)
            if len(values) and words.share(values) >= MOSTLY and (~np.isnan(values)).sum() > 1:
                return self._other(name, kind, words, values)
        text = written.text(f"{len(words.known)} different texts")
        if share >= MOSTLY:
            problem = self._problem(name, "numbers", words, numbers)
            text.notes = (f"column {short(name)}{problem}; its values are categories now",)
            text.doubt = problem if share >= NEARLY else ""
        return text

    def _otherwise(self, words: Words) -> str:
        """Return a message about credits and debits, and numbers with other marks than the given marks; empty for other strings."""
        found = [re.search(SIDES, word) for word in words.list] if words.any_match(SIDES) else []
        sides = {part[2].lower() if part else "": word for word, part in zip(words.list, found, strict=False)}
        if len(sides) > 1 and all(is_number(re.sub(SIDES, r"\1", word)) for word in words.list):
            remedy = "write them with the sign of their effect, such as -50.00, without CR and DR"
            return f": {listed(sides.values())} are credits, debits or plain amounts; {remedy}"
        given = {name: getattr(self.reading, name) for name in ("decimal", "thousands")}
        options = " ".join(f"--{name} {mark}" for name, mark in given.items() if mark)
        if not options or not words.has_digits:
            return ""
        values = read_numbers(words.known, replace(self.reading, decimal=None, thousands=None)).values
        odd = np.flatnonzero(np.isnan(self._read(words).values))
        if np.isnan(values).any() or not len(odd):
            return ""
        return f" has {short(words.list[odd[0]])}, which is no number with {options}; correct the value or the option"

    def _read(self, words: Words, *, units: bool = False, partly: str = "") -> Numbers:
        """Return the known strings as numbers; a part of them may have the stated unit, or a sign that matches `partly`."""
        stated = self.reading.units().get(words.name, "")
        units, partly = units or bool(stated), partly or re.escape(stated)
        return read_numbers(words.known, self.reading, self.decimal, self.grouped, units=units, partly=partly)

    def _numbers(self, words: Words, forced: bool = False) -> Column | None:
        """Return the column as numbers, None if some strings are none; codes with leading zeros are text unless forced."""
        if not words.has_digits and not words.any_match("(?i)inf"):
            return None
        found = self._read(words, units=forced)
        if np.isnan(found.values).any():
            return None
        if not forced and words.all_match(INTEGER) and words.any_match(ZERO_FIRST):
            return self._zeros(words)
        if not forced and (words.all_match(ADDRESS) or words.all_match(TELEPHONE)):
            return words.text("addresses or telephone numbers")
        if found.doubt:
            word, first, second = found.doubt
            marks = "--decimal ',' or --thousands ','" if "," in word else "--decimal . or --thousands ."
            marks = f"give {marks}" if self.options else "write it otherwise"
            return unusable(words.rows, f": {short(word)} may be {first} or {second}; {marks}", words)
        if found.unclear:
            example, remedy = short(words.list[0]), "write thousands, millions and billions as K, M and B"
            text = f": the suffixes of {example} and other values are unclear, {found.unclear}; {remedy}"
            keep = f", or keep the texts with --categorical {short(words.name)}" if self.options else ""
            return unusable(words.rows, text + keep, words)
        if not forced and words.all_match(INTEGER) and words.any_match(r"\d{16}") and _are_huge(map(int, words.list)):
            return self._codes(words)
        whole = _are_integers(words.known, found.way.thousands)
        kind: Kind = "integer" if whole else "real"
        reason = found.reason if not words.all_match(INTEGER) else ""
        reason = reason or ("whole numbers" if whole else "numbers")
        seen = [mark if words.has(mark) else "" for mark in (found.way.decimal, found.way.thousands)]
        # A later part may have other suffixes, or no currency.
        sign = "" if found.signs in MULTIPLES or re.fullmatch(SIGN, found.signs) else found.signs
        form = number_form(seen[0], seen[1], sign, flags=words.all_match("^[01]$"))
        unit = found.signs or (SUFFIXED if found.suffixes else "")
        column = Column(kind, words.spread(found.values), reason=reason, unit=unit, form=form)
        if found.signs in MULTIPLES and not forced:
            text = f"column {short(words.name)} has {found.signs} behind all numbers: {short(words.list[0])}"
            column.notes = (f"{text} is read as {found.values[0]:,.15g} with the unit {found.signs!r}",)
        if found.bare and self.reading.units().get(words.name) != found.signs:
            text = f"column {short(words.name)} has {found.signs} beside a part of its numbers"
            column.notes = (f"{text}; others, such as {short(found.bare)}, are read in {found.signs}, too",)
        if found.suffixes:
            largest = short(words.list[int(np.argmax(np.abs(found.values)))])
            text = f"column {short(words.name)} has numbers with {', '.join(found.suffixes)} for thousands, millions, …: {largest}"
            column.notes = (f"{text} is read as {np.abs(found.values).max():,.15g}",)
        return self._without_sentinels(column)

    def _zeros(self, words: Words) -> Column:
        """Return whole numbers, some with leading zeros, as text; with a note if they have different lengths, as numbers have."""
        column = words.text("codes with leading zeros")
        if len({len(word) for word in words.list}) > 1:
            example = short(words.first(ZERO_FIRST))
            advice = (
                f"--numeric {short(words.name)} reads numbers"
                if self.options
                else "convert them to use them as numbers"
            )
            column.notes = (
                f"column {short(words.name)} has numbers with leading zeros, such as {example}, read as codes; {advice}",
            )
        return column

    @staticmethod
    def _seconds_of(words: Words) -> Column | None:
        """Return times of the day or durations as seconds, None if some strings are neither."""
        import pyarrow.compute as pc

        if not words.any_match(rf":|^[+-]?P|^-?\d+ day|^\d{{1,2}}{GAP}{HALF}$|{CLOCK_WORD}$"):
            return None
        times, example = read_times(words.known), short(words.list[0])
        paired = [word for word in words.list if re.fullmatch(r"\d+:\d\d", word)]
        # 19:30 may be minutes and seconds beside 1:20:30, but not beside 2:30 pm.
        full, half = words.any_match(r"^\d+:\d+:\d[^ ]*$"), words.any_match(f"{HALF}$")
        clock = not np.isnan(times).any()
        seconds = times if clock else read_durations(pc.replace_substring_regex(words.known, r"^(\d+:\d\d)$", r"\1:00"))
        if np.isnan(seconds).any():
            return None
        if 0 < len(paired) < words.count and not (clock and half):
            long = max(paired, key=lambda word: int(word.partition(":")[0]))
            text = f": {short(long)} may be hours and minutes or minutes and seconds; write {long}:00 or 0:{long}"
            return unusable(words.rows, text, words)
        if clock:
            reason, unit = "times of the day", TIME_OF_DAY if half else CLOCK if full else PAIRS
        else:
            reason, unit = ("hours and minutes", PAIRS) if paired else ("durations", DURATION)
        column = Column("real", words.spread(seconds), reason=f"{reason}, in seconds", unit=unit, example=example)
        if full or not clock:
            more = "; the model of minutes and seconds is the same" if paired else ""
            has = "times" if clock else reason
            column.notes = (f"column {short(words.name)} has {has} such as {example}; read as seconds{more}",)
        column.form = {"the form": "times"}
        if (paired or full) and not half:
            column.form["the form of times"] = "without seconds" if paired else "with seconds"
        return column

    def _dates(self, words: Words) -> Column | None:
        """Return the column as dates, None if some strings are none."""
        if not words.has_digits:
            return None
        fitted = self.kinds.get(words.name, "").partition(" ")[2]
        before = self._before(words.name, "the form").removeprefix("dates as ")
        seconds, form, doubt = read_dates(words.known, before or fitted)
        if not len(seconds) or np.isnan(seconds).any():
            return _with_named_zones(words)
        if doubt:
            text = (
                f": {short(words.list[0])} and all other dates may be day/month or month/day; write them as 2024-12-31"
            )
            return unusable(words.rows, text, words)
        zone, without = words.first(ZONE), words.first(NO_ZONE)
        if zone and without:
            text = (
                f": {short(zone)} has a time zone, and {short(without)} has none; write all times with a zone, or none"
            )
            return unusable(words.rows, text, words)
        reason = f"dates as {form}"
        unit = zone_of(zoned=bool(zone) or words.any_match(IN_UTC), unzoned=bool(without))
        written = {"the form": reason} | ({"the time zone": "given" if zone else "missing"} if zone or without else {})
        return Column("date", words.spread(seconds), reason=reason, unit=unit, form=written)


def _with_named_zones(words: Words) -> Column | None:
    """Return times with letters behind, such as EST, as an unusable column, None for other strings."""
    import pyarrow.compute as pc

    if not words.any_match(NAMED_ZONE):
        return None
    zoned = pc.match_substring_regex(words.known, NAMED_ZONE).to_numpy(zero_copy_only=False)
    without = pc.replace_substring_regex(words.known, NAMED_ZONE, r"\1\2")
    times = max(read_dates(without)[0], _times(without), key=words.share)
    if words.share(times) < MOSTLY or np.isnan(times[zoned]).all():
        return None
    example = short(words.known.filter(zoned & ~np.isnan(times))[0].as_py())
    remedy = "write a zone as its offset from UTC, such as -05:00, or leave it out if all times have the same"
    return unusable(
        words.rows, f": {example} has letters behind the time, whose meaning is not certain; {remedy}", words
    )


def number_form(decimal: str = "", thousands: str = "", sign: str = "", *, flags: bool = False) -> dict[str, str]:
    """Return how numbers are written, from the marks that occur: what two parts of a column must have in common.

    Flags, 0 and 1, may stand beside true and false.
    """
    form = {SIGN_TRAIT: repr(sign) if sign else "none", **({} if flags else {"the form": "numbers"})}
    if decimal:
        form |= {"the decimal mark": repr(decimal), repr(decimal): "the decimal mark"}
    if thousands:
        form |= {"the mark of thousands": repr(thousands), repr(thousands): "the mark of thousands"}
    return form


def unusable(rows: int, problem: str, words: Words | None = None) -> Column:
    """Return an unusable column, with the strings for a model with these categories."""
    if words is None:
        return Column("unusable", codes=np.broadcast_to(np.int64(-1), rows), problem=problem)
    text = words.text("")
    codes, known = text.coded()
    return Column("unusable", codes=codes, words=known, problem=problem)


def _flags_among(words: Words) -> Floats:
    """Return 1 for the spellings of true and false, NaN for other strings; NaN alone without `true` and `false`."""
    spelled = [is_truth(word) or word.lower() in (*TRUE, *FALSE) for word in words.list]
    return np.where(spelled, 1.0, np.nan) if any(map(is_truth, words.list)) else np.full(words.count, np.nan)


def _are_huge(numbers: Iterable[int | None]) -> bool:
    """Return whether whole numbers have more digits than float64."""
    return any(number is not None and abs(number) > 2**53 for number in numbers)


def _are_compact_dates(numbers: Floats) -> bool:
    """Return whether different whole numbers are all dates of this or the last century written as 20241231."""
    import pyarrow as pa

    known = np.unique(numbers[~np.isnan(numbers)])
    if len(known) < 2 or not DATES[0] <= known[0] <= known[-1] <= DATES[1]:
        return False
    return not np.isnan(read_dates(pa.array([f"{number:.0f}" for number in known], pa.large_string()))[0]).any()


def _are_integers(strings: Any, thousands: str) -> bool:
    """Return whether all strings are integers within 64 bits."""
    import pyarrow as pa
    import pyarrow.compute as pc

    digits = pc.replace_substring(strings, thousands, "") if thousands else strings
    if not pc.all(pc.match_substring_regex(digits, INTEGER)).as_py():
        return False
    try:
        pc.cast(pc.replace_substring_regex(digits, r"^\+", ""), pa.int64())
    except pa.ArrowInvalid:  # too large for int64
        return False
    return True


def _is_string(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _ticks(unit: str) -> float:
    return {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit]


def _mixed_units(words: Words) -> str:
    """Return a message about numbers with several units, such as GB and MB; empty for other strings and for codes such as 12A."""
    units = units_of(words.list) if words.has_digits else {}
    letters = all(len(unit) == 1 and unit.isalpha() for unit in units)  # as of seats, 12A and 12B
    if len(units) < 2 or letters or not all(unit in UNITS or re.fullmatch(SIGN, unit) for unit in units):
        return ""
    return f": {listed(units.values())} have different units; convert all values to one unit"


def _dates_without_year(words: Words) -> str:
    """Return a message about dates such as 3-Mar or Mar 24, empty for other strings."""
    if not words.has_digits or not words.all_match(rf"(?i)^(\d{{1,2}}[- .]*{MONTH_NAME}|{MONTH_NAME}[- .]*\d{{1,2}})$"):
        return ""
    return (
        f": {short(words.list[0])} may be a day of the year or a month of a year; write dates as 2024-12-31 or 2024-12"
    )


def _times(strings: Any) -> Floats:
    """Return times of the day or durations, whichever are more, in seconds, NaN for other strings."""
    return min(read_times(strings), read_durations(strings), key=lambda seconds: int(np.isnan(seconds).sum()))


def _seconds(column: Any) -> Floats:
    """Return dates or timestamps as seconds since 1970."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_date(column.type):
        column = pc.cast(column, pa.timestamp("s" if column.type == pa.date32() else "ms"))
    return to_floats(pc.cast(column, pa.int64())) / _ticks(column.type.unit)
