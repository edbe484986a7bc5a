"""Data files: text documents, token files, rows, images, remote folders, the cache."""
