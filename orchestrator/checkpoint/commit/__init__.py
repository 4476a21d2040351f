"""The commit of a resume point: a pure machine, its events, and the driver that carries them out."""
