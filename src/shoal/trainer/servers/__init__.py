"""Parameter servers that do not wait: loops of workers and servers, and their messages."""
