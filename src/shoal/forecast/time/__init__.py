"""Seconds and bytes of one step: compute, collectives, overlap, pipelines, servers, islands."""
