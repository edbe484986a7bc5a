"""`shoal watch`: a run, its ranks and its islands on a terminal, from the run folder alone.

    run_watcher      files of a run folder → `WatchedRun`, again and again
    rank_tail        the newest rows of rank_steps/
    rank_states      records, hosts and events → the state of each rank
    letter_curves    numbers → curves of letters
    styled_lines     texts with styles, cut to columns
    rank_table       ranks → lines
    watch_screen     `WatchedRun`, width and height → lines; a pure function
    terminal_screen  lines → the terminal, of which it writes only what changed; keys
    watch_loop       reads, draws and waits, at a small share of a core

Nothing is written to the folder, and no lock is taken.
"""
