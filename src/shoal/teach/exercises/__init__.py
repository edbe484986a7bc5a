"""Exercises of the learning pages; the simulator and the planner compute their answers."""
