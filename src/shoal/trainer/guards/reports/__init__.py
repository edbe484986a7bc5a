"""Texts of what guards find, imported when there is something to print."""
