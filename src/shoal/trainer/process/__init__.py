"""Process of a rank: its stop signals, uncaught errors, and the watchdog next to it."""
