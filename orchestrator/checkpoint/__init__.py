"""Resume points and claims: their layout in storage, the rules of committing them, and which are kept."""
