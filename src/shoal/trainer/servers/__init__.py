"""Asynchronous parameter servers: loops of workers and servers, and their messages."""
