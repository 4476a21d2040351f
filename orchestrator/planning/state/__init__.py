"""How the state is divided among ranks, and how much memory that takes."""
