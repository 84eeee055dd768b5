"""Bytes of trace files to normalised events of a rank, cached, in parallel."""
