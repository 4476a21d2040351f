"""Everything that touches Ray's insides: connection, node groups, Ray Train; and the machine itself."""
