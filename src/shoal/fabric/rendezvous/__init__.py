"""Rendezvous: which process this is, and the authenticated store at which ranks meet."""
