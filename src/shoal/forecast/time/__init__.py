"""Seconds and bytes of one step: work, collectives, overlap, pipelines, servers, islands."""
