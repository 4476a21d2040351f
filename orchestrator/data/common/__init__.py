"""Stream settings, process limits and user code: shared by all parts of the data plane."""
