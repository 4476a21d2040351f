"""What a resume changes: differences, identity, skips, and the end of the data."""
