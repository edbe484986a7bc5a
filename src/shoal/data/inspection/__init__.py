"""Inspection of training data: samples as the model gets them, and facts of a whole source."""
