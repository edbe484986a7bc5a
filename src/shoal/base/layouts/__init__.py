"""Layouts: degrees, strategies and policies, the keys by which a user states them."""
