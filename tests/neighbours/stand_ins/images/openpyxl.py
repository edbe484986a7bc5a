"""Stands for the package `openpyxl`: a workbook that nobody opens."""


class Workbook:
    active = property(lambda self: self)

    def cell(self, **_where):
        pass

    def save(self, path):
        pass
