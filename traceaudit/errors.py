"""Errors a user can act on: each says where, what was expected and what to do."""


class TraceAuditError(Exception):
    """Base of every error traceaudit raises on purpose; the command line prints it and exits with 1."""


class NotATraceError(TraceAuditError):
    """The file holds no list of trace events."""


class InputError(TraceAuditError):
    """The traces or the options given cannot be analysed as they are."""


class MissingFigureError(InputError):
    """A figure is missing without which nothing can be computed; the message names what would do."""


class ModelFlopsError(TraceAuditError):
    """The declared model FLOPs, peak or layout contradict the traces."""


class PartitionError(TraceAuditError):
    """The leaves of a step do not add up to its window: a fault of traceaudit itself."""
