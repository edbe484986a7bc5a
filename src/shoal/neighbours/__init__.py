"""Reads what other libraries' users have (their configurations) as settings of Shoal."""
