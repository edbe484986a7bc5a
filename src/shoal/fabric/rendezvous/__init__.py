"""Rendezvous: rank and size of this process, and the authenticated store of the ranks."""
