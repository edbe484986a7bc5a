"""Connections between processes: authenticated streams, watch pages, stack dumps. No torch."""
