"""Training loops: the only package that combines the packages below it."""
