"""The process of a rank: signals, uncaught errors, the watchdog beside it."""
