"""Stands for the package `evaluate`, whose metrics come from the hub: accuracy and F1 alone."""


class Metric:
    def __init__(self):
        self.pairs = []

    def add_batch(self, predictions, references):
        self.pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self, predictions=None, references=None):
        if predictions is not None:
            self.pairs = list(zip(predictions.tolist(), references.tolist(), strict=True))
        right = sum(a == b for a, b in self.pairs)
        true = sum(a == b == 1 for a, b in self.pairs)
        either = sum((a == 1) + (b == 1) for a, b in self.pairs)
        found = {"accuracy": right / len(self.pairs), "f1": 2 * true / max(1, either)}
        self.pairs = []
        return found


def load(*_names, **_how):
    return Metric()
