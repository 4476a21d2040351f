"""A worker's side of a launch: its membership, through calls to the coordinator."""
