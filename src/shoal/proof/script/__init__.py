"""Proof of a whole script: it runs under a layout, then alone on the micro-batches of that run.

side       settings of one run of the script, and the run itself: base/plans/script_side.py,
           side_process.py
arguments  what the proof changes in `shoal.parallelize`'s arguments: argument_overrides.py
record     micro-batches, gradients, weights and optimizer numbers of each step: script_recorder.py,
           value_files.py, script_actions.py
alone      the recorded micro-batches in one process: batch_replay.py, lone_process.py
compare    two records, in order of time: record_comparison.py
files      writes outside of the script's folder: write_guard.py
"""
