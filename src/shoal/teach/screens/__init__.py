"""Screens of `shoal simulate`'s calculators: from options to formulas, figures and a plot."""
