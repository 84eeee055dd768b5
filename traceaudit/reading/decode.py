"""Read one trace file into columns, in bounded memory, whatever wrote it.

A trace is a JSON list of events, one after another with the same bytes between them. The reader learns those bytes
from the first two events, cuts the (inflating) stream there, and decodes whole chunks of events into small typed
structs that hold only the fields later stages need. An event that is not JSON costs itself, not the file: unescaped
quotes in names and bare ``inf`` are repaired, a torn file keeps its complete events, and what is lost is counted.
"""

from contextlib import closing
from pathlib import Path

from traceaudit.errors import InputError
from traceaudit.reading.chunks import Ahead, EventText
from traceaudit.reading.columns import Columns, RawTrace
from traceaudit.reading.mending import decoded
from traceaudit.reading.streams import Inflating, Place, opened


def load(place: Path | Place) -> RawTrace:
    """Read a trace: JSON as it is, gzipped or zstd-compressed, from this machine, an archive or a remote store.

    Raises:
        NotATraceError: the file holds no list of events.
        InputError: the file cannot be opened.
    """
    place = Place(str(place)) if isinstance(place, Path) else place
    trace = RawTrace(place.path)
    try:
        with opened(place) as file:
            source = Inflating(file)
            with closing(Ahead(source)) as ahead:
                text = EventText(ahead)
                columns = Columns(trace)
                for chunk in text:
                    columns.add(*decoded(chunk, text))
                trace.metadata = text.metadata()
            trace.torn = text.torn or source.torn
    except OSError as error:
        raise InputError(f"{place.name}: cannot be read: {error.strerror or error}") from error
    columns.finish()
    trace.dropped += text.dropped
    trace.repaired += text.repaired
    return trace
