"""Tables of a page: columns that know how to write a row, and sort by numbers where they show numbers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar

from traceaudit.report.formats import bandwidth, duration, milliseconds, percent, quantity

Row = TypeVar("Row")
Kind = Literal["number", "text", "name", "graph"]


@dataclass(frozen=True)
class Cell:
    """What a cell shows, what it sorts by (None: its text), and the whole of a text that was shortened."""

    text: str
    key: float | None = None
    full: str = ""

    @property
    def written_key(self) -> str:
        """What it sorts by, as an attribute; whole numbers are exact."""
        return str(self.key) if isinstance(self.key, int) else f"{self.key:.9g}"


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column and how it writes a row; a graph is a bar, as long as its cell's key from 0 to 1 says."""

    title: str
    cell: Callable[[Row], Cell | str]
    kind: Kind = "number"
    hint: str = ""  # what the title leaves unsaid


Columns: TypeAlias = Sequence[Column[Row]]


@dataclass(frozen=True)
class Heading:
    """The head of a column."""

    title: str
    kind: Kind
    hint: str


@dataclass(frozen=True)
class Table:
    """A table ready to be drawn; `left_out` says which rows are not in it, empty if none."""

    label: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: str = ""
    totals: tuple[Cell, ...] = field(default=())

    def __bool__(self) -> bool:
        """Return whether there is a row."""
        return bool(self.rows)


def table(
    label: str,
    columns: Columns[Row],
    rows: Iterable[Row],
    left_out: str = "",
    total: Row | None = None,
) -> Table:
    """Return the table of rows; a column without any text in it is left out, the first one never."""
    written = [[_cell(column.cell(row)) for column in columns] for row in rows]
    kept = [place for place in range(len(columns)) if place == 0 or any(cells[place].text for cells in written)]
    headings = tuple(Heading(columns[place].title, columns[place].kind, columns[place].hint) for place in kept)
    totals = () if total is None else tuple(_cell(columns[place].cell(total)) for place in kept)
    body = tuple(tuple(cells[place] for place in kept) for cells in written)
    return Table(label, headings, body, left_out, totals)


def share(value: float | None) -> Cell:
    """Write a share of one."""
    return Cell("") if value is None else Cell(percent(value), value)


def ms(ns: float | None, digits: int = 1) -> Cell:
    """Write nanoseconds as milliseconds."""
    return Cell("") if ns is None else Cell(milliseconds(ns, digits), ns)


def span(ns: float | None) -> Cell:
    """Write nanoseconds in the unit that suits them."""
    return Cell("") if ns is None else Cell(duration(ns), ns)


def number(value: float | None, written: str = "{:,}") -> Cell:
    """Write a number by a format."""
    return Cell("") if value is None else Cell(written.format(value), value)


def size(value: float | None, unit: str = "B") -> Cell:
    """Write a quantity with a decimal prefix."""
    return Cell("") if value is None else Cell(quantity(value, unit), value)


def rate(gb_per_s: float | None) -> Cell:
    """Write a bandwidth."""
    return Cell("") if gb_per_s is None else Cell(bandwidth(gb_per_s), gb_per_s)


def _cell(written: Cell | str) -> Cell:
    return written if isinstance(written, Cell) else Cell(written)
