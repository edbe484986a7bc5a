"""Files of data: text documents, token files, rows, images, remote folders, the cache."""
