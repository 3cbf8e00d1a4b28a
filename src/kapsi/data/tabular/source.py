"""From a path to bytes and UTF-8 text: checks of the file, compression, encodings."""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kapsi.data.tabular.types import listed, reject, table_error

TEXT_SUFFIXES = {".csv": ",", ".txt": ",", ".tsv": "\t", ".dat": ",", ".data": ","}
"""Suffixes of text files, and the separator of written ones."""
PARQUET_SUFFIXES = (".parquet", ".pq")
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zip": "zip"}
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins as the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
MAGIC = {b"PAR1": ".parquet", b"PK\x03\x04": ".zip", b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
"""First bytes of files that are no text, and their suffixes."""
FOREIGN = {
    rb"PK\x03\x04(?s:.{0,2000})(xl/|\[Content_Types\].xml)": "an Excel workbook",
    rb"PK\x03\x04(?s:.{0,2000})application/vnd.oasis.opendocument": "an OpenDocument file",
    rb"\xd0\xcf\x11\xe0": "a workbook of an old Excel",
    rb"ARROW1|FEA1": "an Arrow file",
    rb"\x89HDF": "an HDF5 file",
    rb"SQLite format 3": "an SQLite database",
    rb"\x93NUMPY": "a NumPy array",
    rb"\x80[\x02-\x05].{0,12}c|\x80[\x04\x05]\x95": "a pickle of Python",
    rb"%PDF": "a PDF file",
    rb"(\xef\xbb\xbf)?\s*<(?i:!doctype|!--|\?xml|[a-z]+[ >])": "a web page or XML",
    rb"(\xef\xbb\xbf)?\s*[\[{]\s*[\[{]?\s*(\"([^\"\n]|\\.)*\"\s*:|$)": "JSON",
    rb"version https://git-lfs": "a pointer of Git LFS",
    rb"[-+]?\d+(\.\d+)?(?=[^\n]*[ \t]\d+:(?!\d\d\s)[^\s:])([ \t]+\d+:[^\s:,;]+)+[ \t]*(\r?\n|$)": (
        "in the LIBSVM format (label index:value), which sklearn.datasets.load_svmlight_file reads"
    ),
    rb"(?i)\s*(%[^\n]*\n\s*)*@relation\s": "an ARFF file, which scipy.io.arff.loadarff reads",
    rb"<stata_dta>": "a Stata file, which pandas.read_stata reads",
    rb"\$FL[23]": "an SPSS file, which pandas.read_spss reads",
    rb"HEADER RECORD\*{7}|\0{12}\xc2\xea\x81\x60": "a SAS file, which pandas.read_sas reads",
    rb"MATLAB 5\.0 MAT-file": "a MATLAB file, which scipy.io.loadmat reads",
    rb"RD[AX][23]\n|[ABX]\n\0\0\0": "a file of R",
    rb"Obj\x01": "an Avro file",
    rb"BZh[1-9]1AY|\xfd7zXZ|7z\xbc\xaf": "compressed in another way than .gz, .zip and .zst",
    rb"\x89PNG|\xff\xd8\xff|GIF8": "an image",
    rb"(?s:.{257})ustar": "a tar archive",
    rb"ORC[\0-\x08]": "an ORC file",
}
"""Beginnings of files other than tables of text, for messages."""
EBCDIC = "".join(map(chr, (*range(32, 127), 9, 10, 13, 0x85))).encode("cp037")
"""The bytes of printable ASCII, tabs and line ends in EBCDIC."""
CHUNK = 2**20
SAMPLE, LARGEST_SAMPLE, SAMPLE_LINES = 2**18, 2**27, 40


def table_suffix(path: Path) -> tuple[str, str | None]:
    """Return the suffix of a table file in lower case, and the compression (None for plain files)."""
    suffix, compression = path.suffix.lower(), None
    if suffix in COMPRESSED:
        compression = COMPRESSED[suffix]
        suffix = Path(path.stem).suffix.lower() or ".csv"
        suffix = suffix if suffix in TEXT_SUFFIXES or suffix in PARQUET_SUFFIXES else ".csv"
    allowed = (*TEXT_SUFFIXES, *PARQUET_SUFFIXES)
    if suffix in allowed:
        return suffix, compression
    known = f"{', '.join(allowed)}, text also with {', '.join(COMPRESSED)}"
    raise table_error(str(path), f"the suffix {suffix!r} is not known; allowed are {known}")


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a `TableError` with the path."""
    try:
        yield
    except FileNotFoundError:
        raise table_error(str(path), "there is no such file; check the path") from None
    except UnicodeDecodeError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        # ValueError: a NUL in the name; NotImplementedError: a compression that zipfile cannot read
        if type(error).__module__.startswith("kapsi"):
            raise
        reason = getattr(error, "strerror", None) or error
        raise table_error(str(path), _damage(path, error) or f"the file cannot be read ({reason})") from None


def _damage(path: Path, error: Exception) -> str:
    """Return a message about an error of decompression, empty for other errors."""
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED or getattr(error, "errno", None) or not path.is_file():
        return ""
    with open(path, "rb") as file:
        first = file.read(4)
    if not first:
        return "the file is empty; a table has a header line and at least one row"
    if not any(first.startswith(mark) for mark, true in MAGIC.items() if true == suffix):
        return f"the content is not that of a {suffix} file; give the file the suffix of its content, such as .csv"
    if isinstance(error, NotImplementedError):
        return f"the {suffix} file cannot be read ({error}); extract the table, or compress it with deflate"
    return f"the {suffix} file is damaged or cut off ({error}); download or compress it again"


def check_regular(path: Path) -> None:
    """Refuse folders, pipes and devices: reading them may never end."""
    with reading_file(path):
        mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        reject(str(path), "this is a folder; give a CSV or Parquet file")
    for is_kind, name in KINDS:
        if is_kind(mode):
            reject(str(path), f"this is {name}; give a regular file")


def open_table(path: Path, compression: str | None) -> Any:
    """Open a file for reading, decompressed; a zip file has a single table."""
    if compression is None:
        return open(path, "rb", buffering=0)
    if compression == "zip":
        archive = zipfile.ZipFile(path)
        names = [
            n
            for n in archive.namelist()
            if not n.endswith("/") and not n.startswith(("__MACOSX", ".")) and "/." not in n
        ]
        if len(names) != 1:
            reject(str(path), f"the archive has {len(names)} files ({listed(names, 5)}); give an archive of one table")
        if archive.getinfo(names[0]).flag_bits & 1:
            reject(str(path), "the archive has a password; extract the table first")
        return archive.open(names[0])
    import pyarrow as pa

    return pa.CompressedInputStream(pa.OSFile(str(path), "rb"), compression)


def _most_bytes() -> int:
    """Return the largest size of a decompressed text: half of the memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 2**34


class TextStream(io.RawIOBase):
    """The text of a file as UTF-8 bytes, with properties of the bytes read so far.

    Args:
        raw: the bytes of the file.
        where: name of the file, for messages.
        encoding: encoding of the bytes.
        start: number of UTF-8 bytes to leave out at the beginning.
        separator: the byte between values, to find values with leading zeros.
    """

    def __init__(self, raw: BinaryIO, where: str, encoding: str, start: int = 0, separator: str = ",") -> None:
        self.raw, self.where, self.start, self.separator = raw, where, start, separator.encode()
        self.decoder = None if encoding == "utf-8" else codecs.getincrementaldecoder(encoding)()
        self.digest, self.most = hashlib.sha256(), _most_bytes()
        self.zeros = self.plus = self.ended = False
        self.quotes = self.size = self.lines = 0
        self.buffer = b""
        self.tail = b"\n"

    def close(self) -> None:
        """Close the file, too."""
        self.raw.close()
        super().close()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, target: Any) -> int:
        """Read into a buffer, for the classes of `io`."""
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, empty at the end."""
        while (not self.buffer or size < 0) and not self.ended:
            self.buffer += self._next()
        data, self.buffer = (self.buffer, b"") if size < 0 else (self.buffer[:size], self.buffer[size:])
        return data

    def _next(self) -> bytes:
        data = self.raw.read(CHUNK)
        self.ended = not data
        self.digest.update(data)
        self.size += len(data)
        if self.size > self.most:
            reject(self.where, "the text is larger than half of the memory; give fewer rows, or a Parquet file")
        if self.decoder is not None:
            data = self.decoder.decode(data, final=self.ended).encode()
        if self.start:
            cut = min(self.start, len(data))
            self.start -= cut
            data = data[cut:]
        if data:
            self._inspect(data)
        return data

    def _inspect(self, data: bytes) -> None:
        import numpy as np

        check_text(data, self.where)
        self.quotes += data.count(b'"')
        self.plus = self.plus or b"+" in data
        seen = np.frombuffer(self.tail[-2:] + data, np.uint8)
        self.tail = data if len(data) > 1 else self.tail[-1:] + data
        if self.zeros or len(seen) < 3:
            return
        # A zero after a separator, before a digit (007) or an x (0x10): Arrow reads both as numbers.
        zero = np.flatnonzero(seen[1:-1] == ord("0"))  # positions before the zeros
        before, after = seen[zero], seen[zero + 2]
        begins = np.isin(before, np.frombuffer(self.separator + b'\n\r" +-', np.uint8))
        self.zeros = bool((begins & (((after >= 48) & (after <= 57)) | np.isin(after, (88, 120)))).any())


def is_ebcdic(sample: bytes) -> bool:
    """Return whether bytes are text of a mainframe: letters, digits and signs are at other places than in ASCII."""
    part = sample[:4096]
    high = len(part.translate(None, bytes(range(128))))
    return 2 * high > len(part) and not part.translate(None, EBCDIC)


def foreign(sample: bytes) -> str | None:
    """Return the kind of a file by its first bytes; None for tables of text."""
    return next((kind for pattern, kind in FOREIGN.items() if re.match(pattern, sample)), None)


def check_text(data: bytes, where: str) -> None:
    """Refuse binary data, and UTF-16 without a mark."""
    if data.count(b"\0") * 3 > len(data):
        order = "be" if data[:1] == b"\0" else "le"
        reject(where, f"the file has NUL characters, it is no text; for UTF-16 give --encoding utf-16-{order}")


def sample_of(raw: BinaryIO) -> tuple[bytes, bool]:
    """Return the first bytes, of at least 40 lines if possible, and whether the file ends there."""
    data = b""
    size = SAMPLE
    while True:
        part = raw.read(size)
        data += part
        if not part:
            return data, True
        if len(data) >= SAMPLE and (data.count(b"\n") >= SAMPLE_LINES or len(data) >= LARGEST_SAMPLE):
            return data, False
        size = max(SAMPLE, len(data))


def find_encoding(sample: bytes, complete: bool, given: str | None) -> tuple[str, int, str | None]:
    """Return the encoding of a text by the first bytes, the length of the byte order mark, and a note on a guess."""
    for mark, name in MARKS:
        if sample.startswith(mark) and (given is None or codecs.lookup(given).name in (name, "utf-8", name[:6])):
            return name, len(mark), None
    if given is not None:
        return codecs.lookup(given).name, 0, None
    return ("utf-8", 0, None) if is_utf8(sample, complete) else western(sample)


def is_utf8(data: bytes, complete: bool) -> bool:
    """Return whether bytes are UTF-8, cut off anywhere unless complete."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final=complete)
    except UnicodeDecodeError:
        return False
    return True


def western(data: bytes) -> tuple[str, int, str]:
    """Return the encoding of a text with bytes outside of UTF-8: Windows' form of Latin-1, or Latin-1."""
    try:
        data.decode("cp1252")
        name = "cp1252"
    except UnicodeDecodeError:
        name = "latin-1"
    return name, 0, f"the text is not UTF-8; read as {name} (Western European); give --encoding for another"
