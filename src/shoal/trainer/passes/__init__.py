"""Forward and backward passes of a step, of a loop that writes them out, and of an evaluation."""
