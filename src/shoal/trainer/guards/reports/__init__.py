"""Texts of errors and notices of guards, imported when there is something to print."""
