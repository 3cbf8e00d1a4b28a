"""Dates and times in strings."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular.types import Floats, to_floats

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTH_NAME = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
GAP = "[ \u00a0\u202f]?"
HALF = r"[AaPp](?:[Mm]|\. ?[Mm]\.)"
"""am or a.m., in any case."""
HOUR = r"(?P<hour>\d{1,2})"
MINUTES = rf":(?P<minute>\d{{2}})(?::(?P<second>\d{{2}})(?:[.,](?P<fraction>\d+))?)?{GAP}(?P<half>{HALF})?"
CLOCK = HOUR + MINUTES
TIME = rf"(?:[T ]+{HOUR}(?:{MINUTES})?(?P<zone> ?(?:Z|(?:UTC|GMT)?[+-]\d{{2}}(?::?\d{{2}})?|UTC|GMT))?)?$"
"""A time behind a date; the minutes may be left out, as in 2024-12-31 14."""
YEAR, MONTH, DAY = r"(?P<year>\d{4})", r"(?P<month>\d{1,2})", r"(?P<day>\d{1,2})"
NAME = r"(?P<month>[A-Za-z]{3})[a-z]*"
WEEKDAY = r"(?:(?i:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*),? )?"
SHORT = r"(?P<year>\d{2})"  # 1969 to 2068
# The order of day and month in the last four is decided by a day above 12.
FORMATS = {
    "year-month-day": rf"^{YEAR}-{MONTH}-{DAY}{TIME}",
    "year-month": rf"^(?P<year>1[89]\d\d|2[01]\d\d)-(?P<month>\d{{2}})(?P<day>){TIME}",
    "yearmonthday": rf"^{YEAR}(?P<month>\d{{2}})(?P<day>\d{{2}}){TIME}",
    "year/month/day": rf"^{YEAR}/{MONTH}/{DAY}{TIME}",
    "year.month.day": rf"^{YEAR}\.{MONTH}\.{DAY}{TIME}",
    "day.month.year": rf"^{DAY}\.{MONTH}\.{YEAR}{TIME}",
    "day.month.short year": rf"^(?P<day>\d\d)\.(?P<month>\d\d)\.{SHORT}{TIME}",
    "name year": rf"^{NAME}\.?[- ]{YEAR}(?P<day>){TIME}",
    "day-name-year": rf"^{WEEKDAY}{DAY}[- ]{NAME}[- ,]+{YEAR}{TIME}",
    "name day, year": rf"^{WEEKDAY}{NAME}[- ]{DAY},? {YEAR}{TIME}",
    "day/month/year": rf"^{DAY}[/-]{MONTH}[/-]{YEAR}{TIME}",
    "month/day/year": rf"^{MONTH}[/-]{DAY}[/-]{YEAR}{TIME}",
    "day/month/short year": rf"^{DAY}/{MONTH}/{SHORT}{TIME}",
    "month/day/short year": rf"^{MONTH}/{DAY}/{SHORT}{TIME}",
    "name day time year": rf"^{WEEKDAY}{NAME} +{DAY} {CLOCK}(?P<zone> (?:UTC|GMT))? {YEAR}$",  # as ctime and date write it
}
ZONE_NAME = r"(?:[A-Z]{3,5}|[CEMP]T|\[?[A-Z][A-Za-z]+/[A-Za-z_/]+\]?)"
NAMED_ZONE = rf"(:\d\d[0-9:.,]*(?:{GAP}{HALF})?(?:[+-]\d\d(?::?\d\d)?)?) ?{ZONE_NAME}( \d{{4}})?$"
"""A time with the name of a zone behind, such as EST or Europe/Berlin: EST is a zone in America and in Australia."""


SECONDS_OF = {"weeks": 604_800.0, "days": 86_400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
_SIGN, _BACK = r"(?P<sign>[+-])?", r"(?P<back>[+-])?"
_AMOUNTS = {name: rf"(?:(?P<{name}>\d+(?:[.,]\d+)?){name[0].upper()})?" for name in SECONDS_OF}
_CLOCK = r"(?P<hours>\d+):(?P<minutes>[0-5]?\d):(?P<seconds>[0-5]?\d(?:[.,]\d+)?)"
DURATIONS = (
    rf"^{_SIGN}{_CLOCK}$",
    rf"^{_SIGN}(?P<days>\d+) days?(?:,? {_BACK}{_CLOCK})?$",
    rf"^{_SIGN}P{_AMOUNTS['weeks']}{_AMOUNTS['days']}(?:T{_AMOUNTS['hours']}{_AMOUNTS['minutes']}{_AMOUNTS['seconds']})?$",
)


def read_times(strings: Any) -> Floats:
    """Return times of the day, such as 14:30, 2:30 pm or 2 pm, in trimmed Arrow strings as seconds, NaN where a string is none.

    Example:
        >>> import pyarrow as pa
        >>> read_times(pa.array(["14:30", "2:30 pm", "14:30 pm"])).tolist()
        [52200.0, 52200.0, nan]
    """
    import pyarrow.compute as pc

    strings = pc.replace_substring_regex(strings, rf"^(\d{{1,2}})({GAP}{HALF})$", r"\1:00\2")
    strings = pc.replace_substring_regex(strings, r"^(\d{1,2})[.:](\d\d) Uhr$", r"\1:\2")
    seconds, good = _clock(pc.extract_regex(strings, f"^{CLOCK}$"))
    return np.where(good, seconds, np.nan)


def read_durations(strings: Any) -> Floats:
    """Return durations in trimmed Arrow strings as seconds, NaN where a string is none.

    Forms: 36:10:05, 5 days 03:00:00 (pandas; -1 days +23:59:50 is -10 seconds), 2 days, 1:00:00 (Python), P1DT1H30M (ISO 8601
    without years and months, whose length varies).

    Example:
        >>> import pyarrow as pa
        >>> read_durations(pa.array(["36:10:05", "5 days 03:00:00", "-1 days +23:59:50", "PT1H30M", "14:30"])).tolist()
        [130205.0, 442800.0, -10.0, 5400.0, nan]
    """
    import pyarrow.compute as pc

    seconds = np.full(len(strings), np.nan)
    for pattern in DURATIONS:
        parts = pc.extract_regex(strings, pattern)
        sizes = {name: _amount(parts, name) * factor for name, factor in SECONDS_OF.items()}
        sign, back = _signs(parts, "sign"), _signs(parts, "back")
        # The sign before days is that of the days alone.
        clock = back if pattern == DURATIONS[1] else sign
        signs = {"weeks": sign, "days": sign, "hours": clock, "minutes": clock, "seconds": clock}
        terms = np.stack([signs[name] * size for name, size in sizes.items()])
        known = ~np.isnan(terms).all(0)
        seconds = np.where(known, np.nansum(terms, axis=0), seconds)
    return seconds


def _signs(parts: Any, name: str) -> Floats:
    """Return the signs of a component, 1 where absent."""
    import pyarrow.compute as pc

    if name not in {field.name for field in parts.type}:
        return np.ones(len(parts))
    minus = pc.equal(pc.fill_null(pc.struct_field(parts, name), ""), "-")
    return np.where(minus.to_numpy(zero_copy_only=False), -1.0, 1.0)


def _amount(parts: Any, name: str) -> Floats:
    """Return a component as real numbers, NaN where absent."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if name not in {field.name for field in parts.type}:
        return np.full(len(parts), np.nan)
    text = pc.replace_substring(pc.fill_null(pc.struct_field(parts, name), ""), ",", ".")
    return to_floats(pc.if_else(pc.equal(text, ""), pa.scalar(None, text.type), text))


def date_text(seconds: float) -> str:
    """Return seconds since 1970 as a date, with the time if it is not midnight.

    Example:
        >>> date_text(86400.0), date_text(90.0)
        ('1970-01-02', '1970-01-01T00:01:30')
    """
    return str(np.datetime64(math.floor(seconds), "s")).removesuffix("T00:00:00")


def read_dates(strings: Any, before: str = "") -> tuple[Floats, str, bool]:
    """Return the dates in trimmed, non-missing Arrow strings.

    Args:
        strings: the strings.
        before: the format of earlier rows, which decides between formats that fit equally well.

    Returns:
        Seconds since 1970 (UTC; without a zone, of the written time), NaN where a string is no date; the format; whether
        another format reads the same strings as other dates.
    """
    import pyarrow.compute as pc

    parsed = {}
    for name, pattern in FORMATS.items():
        if len(strings) and pc.any(pc.match_substring_regex(strings, pattern)).as_py():
            parsed[name] = _seconds(pc.extract_regex(strings, pattern))
    if not parsed:
        return np.full(len(strings), np.nan), "", False
    counts = {name: int((~np.isnan(values)).sum()) for name, values in parsed.items()}
    best = max(counts, key=lambda name: counts[name])
    if counts.get(before) == counts[best]:
        return parsed[before], before, False
    ways = [parsed[name] for name, count in counts.items() if count == counts[best] and count]
    doubt = not all(np.array_equal(ways[0], way, equal_nan=True) for way in ways)
    return parsed[best], best, doubt or (best == "day/month/short year" and _year_may_be_first(strings))


def _year_may_be_first(strings: Any) -> bool:
    """Return whether all of 24/01/15, 24/01/16, … have a day at the end, and the numbers in front vary less, as years do."""
    import pyarrow.compute as pc

    parts = pc.extract_regex(strings, rf"^{SHORT}/{MONTH}/{DAY}{TIME}")
    first, last = (pc.count_distinct(pc.struct_field(parts, name)).as_py() for name in ("year", "day"))
    return first < last and not np.isnan(_seconds(parts)).any()


def _seconds(parts: Any) -> Floats:
    """Return seconds since 1970 of the components of dates, NaN for no date."""
    import pyarrow.compute as pc

    time, good = _clock(parts)
    month_text = pc.fill_null(pc.struct_field(parts, "month"), "0")
    if pc.any(pc.utf8_is_alpha(month_text)).as_py():
        names = [str(text)[:3].lower() for text in month_text.to_pylist()]
        month = np.array([MONTHS.index(name) + 1 if name in MONTHS else 0 for name in names], dtype=np.int64)
    else:
        month = _number(parts, "month")
    year, day = _number(parts, "year"), _number(parts, "day")
    month_alone = pc.equal(pc.fill_null(pc.struct_field(parts, "day"), "0"), "")
    day = np.where(month_alone.to_numpy(zero_copy_only=False), 1, day)
    digits = np.asarray(pc.utf8_length(pc.fill_null(pc.struct_field(parts, "year"), "")).to_numpy(zero_copy_only=False))
    year = np.where(digits == 2, year + np.where(year < 69, 2000, 1900), year)
    good &= (month >= 1) & (month <= 12) & (day >= 1) & (year > 0)
    start = (np.where(good, year, 1970) - 1970) * 12 + np.where(good, month, 1) - 1
    days = start.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) + day - 1
    next_month = (start + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    good &= days < next_month
    zone = [_zone(str(text or "")) for text in pc.struct_field(parts, "zone").to_pylist()]
    seconds = days * 86400.0 + time - np.array(zone, dtype=np.float64)
    return np.asarray(np.where(good, seconds, np.nan), dtype=np.float64)


def _number(parts: Any, name: str) -> npt.NDArray[np.int64]:
    """Return a component as whole numbers, 0 where it is absent."""
    import pyarrow.compute as pc

    text = pc.fill_null(pc.struct_field(parts, name), "")
    digits = pc.if_else(pc.equal(text, ""), "0", text)
    return np.asarray(pc.cast(digits, "int64").to_numpy(zero_copy_only=False))


def _clock(parts: Any) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the seconds of the day of the components of times, and the mask of valid times."""
    import pyarrow.compute as pc

    hour, minute, second = (_number(parts, name) for name in ("hour", "minute", "second"))
    half = [str(text).lower().replace(".", "").replace(" ", "") for text in pc.struct_field(parts, "half").to_pylist()]
    afternoon, morning = ([word == name for word in half] for name in ("pm", "am"))
    last = np.where(np.logical_or(afternoon, morning), 12, 23)
    good = ~np.asarray(parts.is_null().to_numpy(zero_copy_only=False)) & (hour <= last) & (minute < 60) & (second < 60)
    hour = np.where(afternoon, hour % 12 + 12, np.where(morning, hour % 12, hour))
    fraction = np.array([float(f"0.{text or 0}") for text in pc.struct_field(parts, "fraction").to_pylist()])
    return hour * 3600 + minute * 60 + second + fraction, good


def _zone(text: str) -> int:
    """Return the offset of a time zone in seconds."""
    digits = re.sub("UTC|GMT|[: ]", "", text)
    if digits[:1] not in ("+", "-"):
        return 0
    return int(digits[0] + "1") * (int(digits[1:3]) * 3600 + int(digits[3:] or 0) * 60)


def calendar(seconds: Floats) -> dict[str, Floats]:
    """Return the parts of times: year, month, day of the year, weekday (Monday is 0) and hour, NaN for NaN.

    Example:
        >>> calendar(np.array([951_782_400.0]))["day of year"]  # 29 February 2000
        array([60.])
    """
    missing = np.isnan(seconds)
    times = np.where(missing, 0, np.floor(seconds)).astype("datetime64[s]")
    days, months, years = (times.astype(f"datetime64[{unit}]") for unit in "DMY")
    parts = {
        "year": years.astype(np.int64) + 1970,
        "month": months.astype(np.int64) % 12 + 1,
        "day of year": (days - years.astype("datetime64[D]")).astype(np.int64) + 1,
        "weekday": (days.astype(np.int64) + 3) % 7,
        "hour": (times - days.astype("datetime64[s]")).astype(np.int64) / 3600,
    }
    return {name: np.where(missing, np.nan, values) for name, values in parts.items()}
