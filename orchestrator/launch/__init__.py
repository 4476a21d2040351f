"""From a command to a supervised launch: the API's functions, what every start does, and what workers run."""
