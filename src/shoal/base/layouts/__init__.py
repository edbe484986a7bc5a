"""Layouts: degrees, strategies and policies, with the keys by which a user states them."""
