"""What state a run is in, and what of it is missing: what commands, page and notebook judge it by."""
