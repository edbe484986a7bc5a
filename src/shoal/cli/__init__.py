"""One file per verb; heavy things are imported inside the command."""
