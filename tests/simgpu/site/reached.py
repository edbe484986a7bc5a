"""Notes the first time that a named line of `src` begins, in any thread or process.

    SIM_LINES=FILE     {path: {line: number}}; SIM_REACHED=FILE   numbers, one a line, as they are reached

Autograd runs a device's hooks in threads of its own, where no tracer of Python sees them; so each such
statement gets a statement before it, in the tree that is compiled. No byte code of it is kept.
"""

import ast
import builtins
import importlib.abc
import importlib.machinery
import json
import os
import sys


class Noting(importlib.machinery.SourceFileLoader):
    """Compiles a module with its notes."""

    def __init__(self, name, path, lines):
        super().__init__(name, path)
        self.lines = lines

    def get_code(self, fullname):
        """The module, compiled anew."""
        tree = ast.parse(self.get_data(self.path))
        for node in ast.walk(tree):
            for name in ("body", "orelse", "finalbody"):
                body = getattr(node, name, None)
                if isinstance(body, list):
                    setattr(node, name, self.noted(body))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def noted(self, body):
        """Statements, each named one after its note."""
        told = []
        for one in body:
            number = self.lines.get(one.lineno) if isinstance(one, ast.stmt) else None
            if number is not None:
                note = ast.parse(f"__reached__({number})").body[0]
                told.append(ast.fix_missing_locations(ast.copy_location(note, one)))
            told.append(one)
        return told


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules with lines to note."""

    def __init__(self, lines, out):
        self.lines = {path: {int(k): n for k, n in of.items()} for path, of in lines.items()}
        self.file = os.open(out, os.O_WRONLY | os.O_APPEND)
        self.seen = set()
        builtins.__reached__ = self.reached

    def reached(self, number):
        """Once per process."""
        if number not in self.seen:
            self.seen.add(number)
            os.write(self.file, b"%d\n" % number)

    def find_spec(self, name, path, target=None):
        """The plain spec, with another loader."""
        if not name.startswith("shoal."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        lines = self.lines.get(spec.origin) if spec is not None else None
        if lines:
            spec.loader = Noting(name, spec.origin, lines)
        return spec


def install():
    """For this process and those that it forks."""
    with open(os.environ["SIM_LINES"]) as lines:
        sys.meta_path.insert(0, Finder(json.load(lines), os.environ["SIM_REACHED"]))
