"""Choose layout and micro-batch where the user leaves them open."""
