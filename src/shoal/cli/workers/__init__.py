"""Worker processes of the verbs: one module per `python -m`."""
