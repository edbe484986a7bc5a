"""Techniques that turn a plain module into a program for many processes, and their order."""
