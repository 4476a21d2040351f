"""Who trains: the pure rendezvous and supervisor policy, and the Ray-side shells that carry out what they decide."""
