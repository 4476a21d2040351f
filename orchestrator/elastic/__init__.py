"""Who trains: the pure rendezvous and the pure policy, and the Ray side that carries out what they decide."""
