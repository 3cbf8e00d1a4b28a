"""Numbers as people write them: decimal commas, thousands separators, currencies, percent signs, Fortran exponents."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kapsi.data.tabular.reading import Reading
from kapsi.data.tabular.types import Floats, parse_numbers

CURRENCIES = "$€£¥₹₽₩"
CODES = "USD|EUR|GBP|CHF|JPY|CNY|INR|CAD|AUD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|BRL|RUB|KRW|ZAR|MXN"
SIGN = rf"[{re.escape(CURRENCIES)}]|[A-Z]{{1,2}}\$|Fr\.|{CODES}"
SYMBOLS = re.escape(f"{CURRENCIES}%‰°/²³")
BLANK = " \u00a0\u202f\u2009"
EXPONENT = r"([eEdD][+-]?\d+)?"
FIRST = 1000
"""Numbers with a mark among which nearly always one shows the decimal mark."""
LEAST_WITH_UNIT = 20
"""Fewer strings with the same letters behind a number are names of categories as likely as quantities."""
MULTIPLES = {"K": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
"""Suffixes of thousands, millions, …; the same letter behind all numbers may be a unit (kelvin) instead."""
WORDS = {"thousand": 1e3, "million": 1e6, "mn": 1e6, "billion": 1e9, "bn": 1e9, "trillion": 1e12, "tn": 1e12}
AMOUNTS = {"m": 1e6, "b": 1e9, "t": 1e12}
"""Suffixes of amounts of money; without a currency, m may be meters."""
SUFFIXED = "K, M, B"
"""The unit of numbers that had different suffixes."""
CLOCK_WORD = "Uhr"
"""Behind a German time, such as 14.30 Uhr."""
ADDRESS = r"^((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)$"
TELEPHONE = r"^\+\d{1,3}( \d+){2,}$"
_UNITS = (
    "g kg mg µg ug t lb lbs oz m cm mm km µm um nm in ft yd mi l ml cl dl L mL gal s sec min h hr hrs d ms µs us ns B KB MB GB "
    "TB kB KiB MiB GiB TiB V mV kV A mA µA W kW MW Wh kWh MWh Hz kHz MHz GHz Pa hPa kPa MPa bar mbar psi °C °F K J kJ MJ cal "
    "kcal N kN Nm mol mmol ppm ppb pct % ‰ ° m² km² cm² m³ cm³ m/s km/h mph kn rpm kbps Mbps Gbps second seconds minute minutes "
    "hour hours day days week weeks month months year years yr yrs"
)
UNITS = frozenset(_UNITS.split())
"""Units that are certain: other letters behind numbers may be parts of codes, such as 101CS."""
TRAILING_MINUS = r"^([0-9.,' ]*[.,][0-9]+)-$"
"""An amount as SAP writes it; without decimals, 3- is a school grade as well."""
MINUS = r"−|^([^0-9]?)[–－﹣]"
"""A minus sign of typography, an en dash before a number, and full-width signs."""
GROUPED = r"^[+-]?[1-9]\d{0,2}\.\d{3}$"
"""A decimal point, or a point between thousands."""
# Numbers that have one reading only: 0,5 and 1.234,5 and 1.234.567 have a decimal comma.
EVIDENCE = {
    mark: re.compile(
        rf"[+-]?(\d{{4,}}{m}\d+|\d*{m}(\d{{1,2}}|\d{{4,}})|0*{m}\d+|\d*{m}\d+[eE][+-]?\d+"
        rf"|\d{{1,3}}({o}\d{{3}})+{m}\d+|\d{{1,3}}({o}\d{{3}}){{2,}})"
    )
    for mark, m, o in ((",", ",", r"\."), (".", r"\.", ","))
}


@dataclass(frozen=True)
class Numerals:
    """A way to write numbers.

    Args:
        decimal: the decimal mark.
        thousands: the thousands separator, empty for none; a blank stands for all kinds of blanks.
    """

    decimal: str = "."
    thousands: str = ""

    def pattern(self) -> str:
        """Return the regular expression of a whole number, without currency or percent sign."""
        mark = re.escape(self.decimal)
        whole = r"\d+"
        if self.thousands:
            separator = {" ": f"[{BLANK}]", "'": "['’]"}.get(self.thousands, re.escape(self.thousands))
            lakhs = r"|[1-9]\d?(,\d{2})+,\d{3}" * (self.thousands == ",")  # as in India: 12,34,567
            whole = rf"([1-9]\d{{0,2}}({separator}\d{{3}})+{lakhs}|\d+)"
        return rf"^[+-]?(({whole}({mark}\d*)?|{mark}\d+){EXPONENT}|(?i:inf|infinity))$"

    def parse(self, strings: Any) -> Floats:
        """Return trimmed Arrow strings as numbers, NaN where a string is no number written in this way."""
        import pyarrow as pa
        import pyarrow.compute as pc

        matched = pc.match_substring_regex(strings, self.pattern())
        text = pc.if_else(matched, strings, pa.scalar(None, strings.type))
        for mark in {" ": BLANK, "'": "'’", "": ""}.get(self.thousands, self.thousands):
            text = pc.replace_substring(text, mark, "")
        if self.decimal != ".":
            text = pc.replace_substring(text, self.decimal, ".")
        return parse_numbers(pc.replace_substring_regex(text, "[dD]", "e"))

    def __str__(self) -> str:
        parts = ["a decimal comma"] * (self.decimal == ",")
        if self.thousands:
            parts.append("blanks between thousands" if self.thousands == " " else f"{self.thousands} between thousands")
        return " and ".join(parts)


SEPARATORS = ("", ".", ",", " ", "'", "_")
WAYS = tuple(Numerals(decimal, mark) for decimal in ".," for mark in SEPARATORS if mark != decimal)


@dataclass(frozen=True)
class Numbers:
    """Strings as numbers.

    Args:
        values: NaN where a string is no number.
        way: how the numbers are written.
        signs: currency, percent sign or unit that the numbers have; empty for none.
        doubt: two readings of the first string with two; empty if there is one reading.
        suffixes: suffixes of thousands, millions, … behind some numbers, multiplied.
        unclear: why suffixes have no single reading; empty if clear.
        bare: a string without the sign of the others; empty if all have it.
    """

    values: Floats
    way: Numerals = WAYS[0]
    signs: str = ""
    doubt: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    unclear: str = ""
    bare: str = ""

    @property
    def reason(self) -> str:
        """How the numbers are written, empty for plain numbers."""
        suffixes = f"with {', '.join(self.suffixes)}" if self.suffixes else ""
        return ", ".join(part for part in (str(self.way), f"in {self.signs}" if self.signs else "", suffixes) if part)


def is_number(word: str) -> bool:
    """Return whether a word is a number with some decimal mark and separator of thousands."""
    return any(re.match(way.pattern(), word) for way in WAYS)


def units_of(words: Iterable[str]) -> dict[str, str]:
    """Return the different signs before or behind the numbers of some words, each with its first word.

    Empty unless all words are numbers with a sign.

    Example:
        >>> units_of(["12 kg", "3 lb", "4.5kg"]), units_of(["12 kg", "many"])
        ({'kg': '12 kg', 'lb': '3 lb'}, {})
    """
    before, number, after = rf"(?:{SIGN})[{BLANK}]?", r"[+-]?[0-9.,]*[0-9]", rf"[{BLANK}]?([^\W\d_]|[{SYMBOLS}]){{1,8}}"
    pattern = re.compile(rf"(?P<before>{before})?{number}(?P<after>{after})?")
    found: dict[str, str] = {}
    for word in words:
        part = pattern.fullmatch(word)
        unit = ((part["before"] or "") + (part["after"] or "")).strip() if part else ""
        if not unit:
            return {}
        found.setdefault(unit, word)
    return found


def is_plural(first: str, second: str) -> bool:
    """Return whether one of two units is the plural of the other.

    Example:
        >>> is_plural("year", "years"), is_plural("m", "ms")
        (True, False)
    """  # 5 mAs is no plural of 5 mA
    one, many = sorted((first, second), key=len)
    return len(one) > 1 and one.islower() and many == f"{one}s"


def decimal_mark(words: Iterable[str]) -> str | None:
    """Return the decimal mark of the numbers among some words, None without evidence or with evidence for both.

    Example:
        >>> decimal_mark(["2.784", "0,13"]), decimal_mark(["2.784", "1,234"]), decimal_mark(["2,5", "2.5"])
        (',', None, None)
    """
    import pyarrow as pa

    marks = decimal_marks(pa.array(list(words), pa.large_string()))
    return marks.pop() if len(marks) == 1 else None


def decimal_marks(strings: Any) -> set[str]:
    """Return the decimal marks of the numbers among Arrow strings that have one reading only."""
    import pyarrow.compute as pc

    found = set()
    for mark, pattern in EVIDENCE.items():
        # 1.234.567 has a decimal comma. Regular expressions take ten times as long as the search for a mark.
        several = pc.greater(pc.count_substring(strings, {",": ".", ".": ","}[mark]), 1)
        marked = pc.utf8_trim_whitespace(strings.filter(pc.or_(pc.match_substring(strings, mark), several)))
        parts = marked.slice(0, FIRST), marked.slice(FIRST)
        if any(pc.any(pc.match_substring_regex(part, f"^(?:{pattern.pattern})$")).as_py() for part in parts):
            found.add(mark)
    return found


def read_numbers(
    strings: Any,
    reading: Reading,
    decimal: str | None = None,
    grouped: bool = False,
    *,
    units: bool = False,
    partly: str = "",
) -> Numbers:
    """Return the numbers in trimmed, non-missing Arrow strings, in the one way that reads all of them, or the most.

    Args:
        strings: large strings.
        reading: a given decimal mark or thousands separator excludes other ways.
        decimal: the decimal mark of other columns of the file, None if unknown.
        grouped: whether points may stand between thousands although nothing in the file says so.
        units: whether a few strings with the same letters behind a number are numbers with a unit.
        partly: regular expression of signs that a part of the numbers may have, beside currencies.
    """
    import pyarrow.compute as pc

    plain = parse_numbers(strings)
    settled = reading.decimal or {".": ",", ",": "."}.get(reading.thousands or "", decimal)
    doubtful = settled is None and grouped and _are_grouped(strings)
    if settled != "," and not np.isnan(plain).any() and not doubtful:
        return Numbers(plain)
    known, units = units, units or len(strings) > LEAST_WITH_UNIT
    minus = pc.replace_substring_regex(pc.replace_substring_regex(strings, MINUS, r"\1-"), TRAILING_MINUS, r"-\1")
    core, signs, bare = _without_signs(minus, units, f"{SIGN}|{partly or SIGN}", brackets=known)
    core, factors, suffixes, unclear = _without_suffixes(core, money=bool(re.fullmatch(SIGN, signs)))
    ways = [
        way
        for way in WAYS
        if reading.decimal in (None, way.decimal)
        and way.decimal != reading.thousands
        and (reading.thousands in (None, way.thousands) or not way.thousands)
    ]
    parsed = [(way, way.parse(core) * factors) for way in ways]
    count = max(int((~np.isnan(values)).sum()) for _, values in parsed)
    best = [(way, values) for way, values in parsed if int((~np.isnan(values)).sum()) == count]
    first, values = next(((w, v) for w, v in best if w.decimal == settled), best[0])
    other = next((v for _, v in best if not np.array_equal(v, values, equal_nan=True)), None)
    if other is None or first.decimal == settled or reading.thousands:
        return Numbers(values, first, signs, (), suffixes, unclear, bare)
    differs = int(np.flatnonzero((values != other) & ~np.isnan(values))[0])
    doubt = (strings[differs].as_py(), f"{values[differs]:.15g}", f"{other[differs]:.15g}")
    return Numbers(values, first, signs, doubt, suffixes, unclear, bare)


def _are_grouped(strings: Any) -> bool:
    """Return whether all points of numbers may stand between thousands, and there are some."""
    import pyarrow.compute as pc

    pointed = strings.filter(pc.match_substring(strings, "."))
    return len(pointed) > 0 and bool(pc.all(pc.match_substring_regex(pointed, GROUPED)).as_py())


def _without_signs(strings: Any, units: bool, partly: str, *, brackets: bool) -> tuple[Any, str, str]:
    """Return strings without the common sign, the sign, and a string without sign.

    Signs are currencies, the percent sign and, with `units`, other units; strings without sign may stand beside signs that match
    `partly`. With `brackets`, numbers are negative in parentheses also if all are: without, (1) and (2) may be marks.
    """
    import pyarrow.compute as pc

    sign, suffix = SIGN, "|".join((*MULTIPLES, *AMOUNTS, *WORDS))
    before = (rf"^(\(?[+-]?)(?:{sign})[{BLANK}]?", rf"^\(?[+-]?(?P<sign>{sign})[{BLANK}]?[0-9+-]")
    after = (
        rf"[{BLANK}]?(?:{sign}|[%‰])(\)?)$",
        rf"[0-9.,](?:[{BLANK}]?(?:{suffix}))?[{BLANK}]?(?P<sign>{sign}|[%‰])\)?$",
    )
    # 10² is no number with a unit.
    letter = r"\pLΩ°%‰/"
    unit = (rf"[{BLANK}]?[{letter}²³]+$", rf"[0-9.,][{BLANK}]?(?P<sign>[{letter}][{letter}²³]{{0,7}})$")
    for removed, pattern in (before, after, *[unit] * units):
        signs = pc.struct_field(pc.extract_regex(strings, pattern), "sign")
        found = sorted((text for text in pc.unique(signs).to_pylist() if text is not None), key=len, reverse=True)
        if len(found) == 2 and is_plural(*found):
            del found[1]
        if len(found) != 1 or found[0] in WORDS or found[0] == CLOCK_WORD:
            continue
        if not signs.null_count or re.fullmatch(partly, found[0]):
            # Accountants write negative amounts in parentheses.
            core = pc.replace_substring_regex(strings, removed, r"\1" if "(" in removed[5:] else "")
            core = pc.replace_substring_regex(core, rf"^\(([0-9.,' ]+(?:{suffix})?)\)$", r"-\1")
            return (
                core,
                found[0],
                strings[int(pc.index(signs.is_null(), True).as_py())].as_py() if signs.null_count else "",
            )
    if brackets or not pc.all(pc.match_substring(strings, "(")).as_py():
        strings = pc.replace_substring_regex(strings, r"^\(([0-9][0-9.,' ]*)\)$", r"-\1")
    return strings, "", ""


def _without_suffixes(strings: Any, *, money: bool) -> tuple[Any, Floats, tuple[str, ...], str]:
    """Return strings without suffixes of thousands, millions, …; their factors; the suffixes; and why these are unclear.

    A single letter behind all numbers is left: a unit, unless the numbers are amounts of money.
    """
    import pyarrow.compute as pc

    sizes = {**MULTIPLES, **WORDS, **AMOUNTS}
    ending = rf"[{BLANK}]?(?P<suffix>{'|'.join(sorted((*sizes, 'g'), key=len, reverse=True))})$"
    found = pc.struct_field(pc.extract_regex(strings, rf"^[+-]?[0-9.,][0-9.,' ]*{ending}"), "suffix")
    suffixes = [text for text in pc.unique(found).to_pylist() if text is not None]
    alone = len({sizes.get(text) for text in suffixes}) + min(1, found.null_count) < 2 and not set(suffixes) & set(
        WORDS
    )
    if not suffixes or (alone and not money):
        return strings, np.ones(len(strings)), (), ""
    small = sorted({*AMOUNTS, "g"} & set(suffixes)) if not money else []
    unclear = f"{small[0]!r} may be a unit" if small else ""
    unclear = unclear or ("B may be billions or bytes" if {"B", "G"} <= set(suffixes) else "")
    factors = np.array([sizes.get(text, 1.0) for text in found.to_pylist()])
    core = pc.if_else(found.is_null(), strings, pc.replace_substring_regex(strings, ending, ""))
    return core, factors, tuple(sorted(suffixes)), unclear
