"""From samples to ranks: the feeder over Ray Data, and the feed of a process without Ray."""
