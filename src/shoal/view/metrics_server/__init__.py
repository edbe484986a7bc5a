"""Metrics of a folder's runs for Prometheus: their text, and the HTTP server that sends it."""
