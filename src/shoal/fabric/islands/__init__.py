"""Links between islands: rendezvous, heartbeats, groups of sockets, compressed sums."""
